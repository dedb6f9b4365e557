"""Optimizers whose weight decay follows the learning rate: lambda * lr^2 / peak instead of lambda * lr.

    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)

trains the hidden matrices of a model with Muon and the rest with AdamW, in one optimizer with scaled weight decay.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# The public names by module. Each is imported on first use, because importing torch would slow down `muonsw --help`.
_NAMES = {
    "addons.clipping": ["clip_optimizer_grads_"],
    "addons.norm_rules": ["NORM_RULES"],
    "addons.qk_clip": ["HeadRows", "QKClip", "max_attention_logits"],
    "addons.scale_weight_decay": ["scale_weight_decay"],
    "addons.schedule_free": ["ScheduleFree"],
    "algorithms": ["ALGORITHMS"],
    "decay": ["DECAY_RULES", "convert_weight_decay", "decay_factor"],
    "matrices": ["SHAPE_SCALES"],
    "nonfinite": ["NonFiniteGradientError", "NonFiniteGradientWarning"],
    "optimizer": ["ScaledDecayOptimizer"],
    "options": ["GroupOptions", "MuonOptions"],
    "orthogonalize": ["ORTHOGONALIZERS"],
    "peak": ["PeakLRError", "PeakLRWarning"],
    "presets": ["PRESETS"],
    "slots": ["NORMALIZERS", "PRECONDITIONERS"],
    "telemetry": ["JsonlSink", "MlflowSink", "Telemetry", "TensorBoardSink", "WandbSink"],
    "variants": ["SGDSW", "AdamWSW", "MuonSW"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)
__all__ += ["__version__"]

if TYPE_CHECKING:
    from muonsw.addons.clipping import clip_optimizer_grads_ as clip_optimizer_grads_
    from muonsw.addons.norm_rules import NORM_RULES as NORM_RULES
    from muonsw.addons.qk_clip import HeadRows as HeadRows
    from muonsw.addons.qk_clip import QKClip as QKClip
    from muonsw.addons.qk_clip import max_attention_logits as max_attention_logits
    from muonsw.addons.scale_weight_decay import scale_weight_decay as scale_weight_decay
    from muonsw.addons.schedule_free import ScheduleFree as ScheduleFree
    from muonsw.algorithms import ALGORITHMS as ALGORITHMS
    from muonsw.decay import DECAY_RULES as DECAY_RULES
    from muonsw.decay import convert_weight_decay as convert_weight_decay
    from muonsw.decay import decay_factor as decay_factor
    from muonsw.matrices import SHAPE_SCALES as SHAPE_SCALES
    from muonsw.nonfinite import NonFiniteGradientError as NonFiniteGradientError
    from muonsw.nonfinite import NonFiniteGradientWarning as NonFiniteGradientWarning
    from muonsw.optimizer import ScaledDecayOptimizer as ScaledDecayOptimizer
    from muonsw.options import GroupOptions as GroupOptions
    from muonsw.options import MuonOptions as MuonOptions
    from muonsw.orthogonalize import ORTHOGONALIZERS as ORTHOGONALIZERS
    from muonsw.peak import PeakLRError as PeakLRError
    from muonsw.peak import PeakLRWarning as PeakLRWarning
    from muonsw.presets import PRESETS as PRESETS
    from muonsw.slots import NORMALIZERS as NORMALIZERS
    from muonsw.slots import PRECONDITIONERS as PRECONDITIONERS
    from muonsw.telemetry import JsonlSink as JsonlSink
    from muonsw.telemetry import MlflowSink as MlflowSink
    from muonsw.telemetry import Telemetry as Telemetry
    from muonsw.telemetry import TensorBoardSink as TensorBoardSink
    from muonsw.telemetry import WandbSink as WandbSink
    from muonsw.variants import SGDSW as SGDSW
    from muonsw.variants import AdamWSW as AdamWSW
    from muonsw.variants import MuonSW as MuonSW
else:  # hidden from type checkers, which would accept any name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'muonsw' has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"muonsw.{_HOMES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
