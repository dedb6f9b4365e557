"""Optimizers whose weight decay follows the learning rate: lambda * lr^2 / peak instead of lambda * lr.

    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)

is Muon with scaled weight decay for the hidden matrices of a model and AdamW for the rest, in one optimizer.
"""

from muonsw.algorithms import ALGORITHMS as ALGORITHMS
from muonsw.clipping import clip_optimizer_grads_ as clip_optimizer_grads_
from muonsw.decay import DECAY_RULES as DECAY_RULES
from muonsw.decay import convert_weight_decay as convert_weight_decay
from muonsw.decay import decay_factor as decay_factor
from muonsw.interop.drive import drive_weight_decay as drive_weight_decay
from muonsw.matrices import SHAPE_SCALES as SHAPE_SCALES
from muonsw.nonfinite import NonFiniteGradientError as NonFiniteGradientError
from muonsw.nonfinite import NonFiniteGradientWarning as NonFiniteGradientWarning
from muonsw.norms import NORM_RULES as NORM_RULES
from muonsw.optimizer import ScaledDecayOptimizer as ScaledDecayOptimizer
from muonsw.options import GroupOptions as GroupOptions
from muonsw.orthogonalize import ORTHOGONALIZERS as ORTHOGONALIZERS
from muonsw.peak import PeakLRError as PeakLRError
from muonsw.peak import PeakLRWarning as PeakLRWarning
from muonsw.telemetry import JsonlSink as JsonlSink
from muonsw.telemetry import MlflowSink as MlflowSink
from muonsw.telemetry import Telemetry as Telemetry
from muonsw.telemetry import TensorBoardSink as TensorBoardSink
from muonsw.telemetry import WandbSink as WandbSink
from muonsw.variants import SGDSW as SGDSW
from muonsw.variants import AdamWSW as AdamWSW
from muonsw.variants import MuonSW as MuonSW
from muonsw.version import __version__ as __version__

__all__ = [
    "ALGORITHMS",
    "DECAY_RULES",
    "NORM_RULES",
    "ORTHOGONALIZERS",
    "SGDSW",
    "SHAPE_SCALES",
    "AdamWSW",
    "GroupOptions",
    "JsonlSink",
    "MlflowSink",
    "MuonSW",
    "NonFiniteGradientError",
    "NonFiniteGradientWarning",
    "PeakLRError",
    "PeakLRWarning",
    "ScaledDecayOptimizer",
    "Telemetry",
    "TensorBoardSink",
    "WandbSink",
    "__version__",
    "clip_optimizer_grads_",
    "convert_weight_decay",
    "decay_factor",
    "drive_weight_decay",
]
