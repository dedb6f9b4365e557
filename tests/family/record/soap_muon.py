"""Steps of the SOAP-Muon of modded-nanogpt's track 3 in float64, without what that file does to updates after it.

`python -m tests.family.record.soap_muon CLONES` writes them. Matrices are square: of others one factor is singular at
first, and rounding chooses its null space.
"""

import sys
from functools import partial

import torch

from tests.family.record.authors import Clone
from tests.family.record.common import record

FILE = "records/track_3_optimization/results/20260609_soap_f1_auxb2_clean/train_gpt_clean_SOTA.py"
NAMES = ("soap_precondition_momentum", "soap_update_preconditioner", "muon_update", "soap_eigenbasis", "soap_basis_qr")
NAMES += ("gram_frobenius_norm_estimate", "_ns_inner", "zeropower_via_newtonschulz5")
NAMES += ("SOAP_BETA2", "SOAP_PRECONDITION_FREQUENCY", "SOAP_DENOM_POWER")
OPTIONS = {"lr": 0.02, "weight_decay": 0.0}


class SoapMuon:
    """The lines of the file's `Muon.step` for a parameter of an MLP, up to the norm rules."""

    def __init__(self, found, params, lr, weight_decay):
        assert weight_decay == 0
        self.precondition, self.follow, self.update = found[:3]
        self.params, self.lr = params, lr
        self.states = [self.begin(param) for param in params]

    @staticmethod
    def begin(param):
        zeros = partial(torch.zeros, dtype=torch.float64)
        sides = {"row_gg": zeros(param.size(0), param.size(0)), "col_gg": zeros(param.size(1), param.size(1))}
        averages = {"momentum": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        return {**sides, **averages, "q_row": None, "q_col": None, "soap_step": 0}

    @torch.no_grad()
    def step(self):
        for param, state in zip(self.params, self.states, strict=True):
            state["momentum"].lerp_(param.grad, 1 - 0.95)
            ahead = param.grad.lerp(state["momentum"], 0.95)
            param.add_(self.update(self.precondition(ahead, state)), alpha=-self.lr)
            self.follow(param.grad, state)


def main(clones):
    file = Clone(clones, "KellerJordan/modded-nanogpt", "f411b3d", FILE)
    record("soap_muon", file.source, partial(SoapMuon, file.load(*NAMES)), OPTIONS, [(4, 4), (5, 5)], steps=5)


if __name__ == "__main__":
    main(sys.argv[1])
