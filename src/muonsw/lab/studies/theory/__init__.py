"""Every proposition, theorem and lemma of the paper's convergence theory, run with the library's optimizers.

Everywhere `s` are the settings of an experiment, and a function that judges says what it found, in which words it
claims what, and then its claims.
"""

from muonsw.lab.studies.experiment import Experiment
from muonsw.lab.studies.theory.matrix import FIXED_RATE, MATRIX, MATRIX_FIGURE
from muonsw.lab.studies.theory.muon import DETERMINISTIC, MUON
from muonsw.lab.studies.theory.noise import EQUILIBRIUM
from muonsw.lab.studies.theory.scalar import SCALAR, SCALAR_FIGURE
from muonsw.lab.studies.theory.sgd import NONCONVEX, STRONGLY_CONVEX

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
    EQUILIBRIUM,
)

__all__ = ["EXPERIMENTS"]
