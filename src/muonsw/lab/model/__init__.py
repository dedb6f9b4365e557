"""The paper's model: a LLaMA-style decoder with a mixture of experts, in muP.

It never imports the optimizer. Names of tensors carry their axes: B sequences, T positions, N = B*T tokens, D width,
H heads, C head dimension, E experts, K experts a token, R = N*K rows sorted by expert, F expert width, V vocabulary.
"""

from muonsw.lab.model.config import PRESETS as PRESETS
from muonsw.lab.model.config import ModelConfig as ModelConfig
from muonsw.lab.model.config import MuP as MuP
from muonsw.lab.model.config import preset as preset
from muonsw.lab.model.decoder import Decoder as Decoder
from muonsw.lab.model.decoder import Losses as Losses
from muonsw.lab.model.decoder import ModelSize as ModelSize
from muonsw.lab.model.decoder import count as count
from muonsw.lab.model.decoder import unallocated as unallocated
from muonsw.lab.model.init import MUON_LR_POWERS as MUON_LR_POWERS
from muonsw.lab.model.init import Scaling as Scaling
from muonsw.lab.model.init import enters_norm as enters_norm
from muonsw.lab.model.init import initialize as initialize
from muonsw.lab.model.init import muon_lr_multiplier as muon_lr_multiplier
from muonsw.lab.model.init import role_of as role_of
from muonsw.lab.model.init import scalings as scalings
from muonsw.lab.model.loss import cross_entropy as cross_entropy

__all__ = [
    "MUON_LR_POWERS",
    "PRESETS",
    "Decoder",
    "Losses",
    "ModelConfig",
    "ModelSize",
    "MuP",
    "Scaling",
    "count",
    "cross_entropy",
    "enters_norm",
    "initialize",
    "muon_lr_multiplier",
    "preset",
    "role_of",
    "scalings",
    "unallocated",
]
