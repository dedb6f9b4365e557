"""Every proposition, theorem and lemma of the paper's convergence theory, run with the library's optimizers."""

from muonsw.lab.experiments.experiment import Experiment
from muonsw.lab.experiments.theory.deterministic import DETERMINISTIC
from muonsw.lab.experiments.theory.fixed_rate import FIXED_RATE
from muonsw.lab.experiments.theory.matrix import MATRIX, MATRIX_FIGURE
from muonsw.lab.experiments.theory.muon import MUON
from muonsw.lab.experiments.theory.rates import STRONGLY_CONVEX
from muonsw.lab.experiments.theory.scalar import SCALAR
from muonsw.lab.experiments.theory.scalar_figure import SCALAR_FIGURE
from muonsw.lab.experiments.theory.sgd import NONCONVEX

EXPERIMENTS: tuple[Experiment, ...] = (
    SCALAR,
    SCALAR_FIGURE,
    MATRIX,
    MATRIX_FIGURE,
    NONCONVEX,
    STRONGLY_CONVEX,
    MUON,
    DETERMINISTIC,
    FIXED_RATE,
)

__all__ = ["EXPERIMENTS"]
