"""The studies that `muonsw reproduce` knows: one entry each."""

from __future__ import annotations

from muonsw.lab.report.study_figures import draw_convergence, draw_coordinates
from muonsw.lab.studies import mup, theory
from muonsw.lab.studies.study import ExperimentStudy, TrainingStudy
from muonsw.lab.studies.training.catalogue import TRAINING_STUDIES
from muonsw.registry import Registry

THEORY = ExperimentStudy(
    name="theory",
    title="the convergence theory: every proposition, theorem and lemma, run on two CPU cores",
    experiments=theory.EXPERIMENTS,
    picture=draw_convergence,
)
COORDINATES = ExperimentStudy(
    name="coordinates",
    title="the coordinate check of muP: which sizes depend on the width, run on two CPU cores",
    experiments=mup.EXPERIMENTS,
    picture=draw_coordinates,
)
ALL: tuple[ExperimentStudy | TrainingStudy, ...] = (THEORY, COORDINATES, *TRAINING_STUDIES)
STUDIES: Registry[ExperimentStudy | TrainingStudy] = Registry("study")
for _study in ALL:
    STUDIES.register(_study.name, _study)


def find_study(name: str) -> ExperimentStudy | TrainingStudy:
    """The study of that name, or `STUDY/EXPERIMENT` for one experiment of a study that has several.

    Raises:
        ValueError: If there is none, with what there is.

    Examples:
        >>> [experiment.name for experiment in find_study("theory/matrix").experiments]
        ['matrix']
    """
    study, _, experiment = name.partition("/")
    found = STUDIES[study]
    if not experiment:
        return found
    if isinstance(found, TrainingStudy):
        raise ValueError(f"{study} is one experiment and has no part {experiment!r}; leave it out")
    return found.select(experiment)
