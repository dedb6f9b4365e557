"""The paper's training experiments as data: runs, claims with the paper's values, and how each scale changes them."""

from muonsw.lab.experiments.training.catalogue import TRAINING_STUDIES
from muonsw.lab.experiments.training.scales import SCALES, Scale
from muonsw.lab.experiments.training.study import Comparison, Results, TrainingStudy

__all__ = ["SCALES", "TRAINING_STUDIES", "Comparison", "Results", "Scale", "TrainingStudy"]
