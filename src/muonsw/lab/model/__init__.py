"""The paper's model: a LLaMA-style decoder with a mixture of experts, in muP.

It never imports the optimizer. Suffixes of tensor names are axes: B sequences, T positions, N = B*T tokens, D width,
H heads, C head dimension, E experts, K experts per token, R = N*K rows sorted by expert, F expert width, V vocabulary.
"""

from muonsw.lab.model.config import (
    MUON_LR_POWERS,
    PRESETS,
    ModelConfig,
    MuP,
    enters_norm,
    initialize,
    muon_lr_multiplier,
    preset,
    role_of,
    scalings,
)
from muonsw.lab.model.decoder import Decoder, Losses, count, unallocated
from muonsw.lab.model.loss import cross_entropy

__all__ = ["MUON_LR_POWERS", "PRESETS", "Decoder", "Losses", "ModelConfig", "MuP", "count", "cross_entropy"]
__all__ += ["enters_norm", "initialize", "muon_lr_multiplier", "preset", "role_of", "scalings", "unallocated"]
