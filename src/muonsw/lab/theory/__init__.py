"""The paper's theory: one file a theorem, with its closed form, the run that tests it, and the claims.

Closed forms are pure functions. `lam` is the weight decay lambda and `q = lam / eta_max` the coefficient of scaled
decay. A hypothesis that does not hold raises `HypothesisError`, which names it. `EXPERIMENTS` are what `muonsw
reproduce theory` runs, with the library's optimizers.
"""

from muonsw.lab.theory.experiment import Experiment
from muonsw.lab.theory.fixed_rate import FIXED_RATE
from muonsw.lab.theory.hypotheses import HypothesisError as HypothesisError
from muonsw.lab.theory.matrix import MATRIX, MATRIX_FIGURE
from muonsw.lab.theory.matrix import muon_loss_floor as muon_loss_floor
from muonsw.lab.theory.muon_deterministic import DETERMINISTIC
from muonsw.lab.theory.muon_noise import MUON
from muonsw.lab.theory.muon_noise import noise_floor as noise_floor
from muonsw.lab.theory.noise_equilibrium import EQUILIBRIUM
from muonsw.lab.theory.nonconvex import NONCONVEX
from muonsw.lab.theory.norm import NormHistory as NormHistory
from muonsw.lab.theory.norm import Tracking as Tracking
from muonsw.lab.theory.norm import constant_decay_norm_limit as constant_decay_norm_limit
from muonsw.lab.theory.norm import next_norm as next_norm
from muonsw.lab.theory.norm import predict_norms as predict_norms
from muonsw.lab.theory.norm import relaxation_times as relaxation_times
from muonsw.lab.theory.norm import scaled_decay_norm_limit as scaled_decay_norm_limit
from muonsw.lab.theory.norm import steady_state_norm as steady_state_norm
from muonsw.lab.theory.norm import steady_state_norm_with_memory as steady_state_norm_with_memory
from muonsw.lab.theory.norm import target_norms as target_norms
from muonsw.lab.theory.norm import track as track
from muonsw.lab.theory.scalar import SCALAR, SCALAR_FIGURE
from muonsw.lab.theory.scalar import constant_decay_fixed_point as constant_decay_fixed_point
from muonsw.lab.theory.scalar import constant_decay_loss_gap as constant_decay_loss_gap
from muonsw.lab.theory.scalar import scaled_decay_error as scaled_decay_error
from muonsw.lab.theory.strongly_convex import STRONGLY_CONVEX

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
