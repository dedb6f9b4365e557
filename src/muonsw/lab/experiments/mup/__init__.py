"""The check that muP does what it is for: sizes that do not depend on the width."""

from muonsw.lab.experiments.experiment import Experiment
from muonsw.lab.experiments.mup.coordinates import ARMS

EXPERIMENTS: tuple[Experiment, ...] = tuple(ARMS)

__all__ = ["EXPERIMENTS"]
