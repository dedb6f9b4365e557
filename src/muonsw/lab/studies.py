"""The studies that `muonsw reproduce` knows: one entry each."""

from __future__ import annotations

from muonsw.lab.experiments import theory
from muonsw.lab.experiments.experiment import Study
from muonsw.lab.report import convergence
from muonsw.registry import Registry

STUDIES: Registry[Study] = Registry("study")
STUDIES.register(
    "theory",
    Study(
        name="theory",
        title="the convergence theory: every proposition, theorem and lemma, run on two CPU cores",
        experiments=theory.EXPERIMENTS,
        draw=convergence.draw,
    ),
)


def find_study(name: str) -> Study:
    """The study of that name, or `STUDY/EXPERIMENT` for one of its experiments.

    Raises:
        ValueError: If there is none, with what there is.

    Examples:
        >>> [experiment.name for experiment in find_study("theory/matrix").experiments]
        ['matrix']
    """
    study, _, experiment = name.partition("/")
    return STUDIES[study].select(experiment) if experiment else STUDIES[study]
