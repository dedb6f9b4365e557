"""The paper's training experiments as data: runs, claims with the paper's values, and how each scale changes them."""

from muonsw.lab.studies.training.catalogue import TRAINING_STUDIES
from muonsw.lab.studies.training.scales import SCALES, Scale
from muonsw.lab.studies.training.study import Comparison, Results, TrainingStudy

__all__ = ["SCALES", "TRAINING_STUDIES", "Comparison", "Results", "Scale", "TrainingStudy"]
