"""Steps of nanochat's Muon in float64: MuonEq, Muon+, NorMuon along the longer axis and cautious decay in one function.

`python -m tests.family.record.nanochat CLONES` writes them.
"""

import sys
from functools import partial

import torch

from tests.family.record.authors import Clone
from tests.family.record.common import record

OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "beta2": 0.9}


class OneByOne:
    """Calls the fused step for each parameter, with buffers of the shapes that nanochat gives them."""

    def __init__(self, fused, params, **options):
        self.fused, self.params = fused, params
        self.scalars = [torch.tensor(options[key], dtype=torch.float64) for key in KEYS]
        self.buffers = [(torch.zeros_like(param[None]), second(param)) for param in params]

    @torch.no_grad()
    def step(self):
        for param, (momentum, squares) in zip(self.params, self.buffers, strict=True):
            along = -1 if param.shape[0] >= param.shape[1] else -2
            self.fused(param.grad[None].clone(), param.detach()[None], momentum, squares, *self.scalars, 5, along)


KEYS = ("momentum", "lr", "weight_decay", "beta2")


def second(param):
    rows, columns = param.shape
    return torch.zeros((1, rows, 1) if rows >= columns else (1, 1, columns), dtype=param.dtype)


def main(clones):
    file = Clone(clones, "karpathy/nanochat", "92d63d4", "nanochat/optim.py")
    fused = file.load("muon_step_fused", "polar_express_coeffs", COMPUTE_DTYPE=torch.float64)[0]
    record("nanochat", file.source, partial(OneByOne, fused), OPTIONS)


if __name__ == "__main__":
    main(sys.argv[1])
