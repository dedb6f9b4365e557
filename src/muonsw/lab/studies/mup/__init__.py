"""The check that muP does what it is for: sizes that do not depend on the width."""

from muonsw.lab.studies.experiment import Experiment
from muonsw.lab.studies.mup.coordinates import ARMS

EXPERIMENTS: tuple[Experiment, ...] = tuple(ARMS)

__all__ = ["EXPERIMENTS"]
