"""The paper's theory: each file has the closed forms of some theorems, the runs that test them, and the claims.

Closed forms are pure functions. `lam` is the weight decay lambda and `q = lam / eta_max` the coefficient of scaled
decay. A hypothesis that does not hold raises `HypothesisError`, which names it. `EXPERIMENTS` are what `muonsw
reproduce theory` runs, with the library's optimizers.
"""

from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.theory.matrix import FIXED_RATE, MATRIX, MATRIX_FIGURE
from muonsw.lab.theory.muon import DETERMINISTIC, MUON
from muonsw.lab.theory.noise_equilibrium import EQUILIBRIUM
from muonsw.lab.theory.scalar import SCALAR, SCALAR_FIGURE
from muonsw.lab.theory.sgd import NONCONVEX, STRONGLY_CONVEX

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
