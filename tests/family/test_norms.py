"""Norm rules give the weights that were recorded from the code of those who proposed them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import SGDSW
from tests.family.record.norms import updates

RECORDED = json.loads((Path(__file__).parent / "recorded/norms.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("norm", RECORDED)
@pytest.mark.parametrize("shape", [(4, 6), (5, 3)], ids=str)
def test_weights_are_those_of_the_source(norm, shape):
    """They compute in float32: a few roundings of half a unit, 6e-8, in every step."""
    known = RECORDED[norm]
    weights = [torch.tensor(rows, dtype=torch.float64) for rows in known["weights"]["x".join(map(str, shape))]]
    param, decay = nn.Parameter(weights[0].clone()), known["weight_decay"]
    decays = {"weight_decay": decay or 1.0, "decay": "constant" if decay else "none"}
    optimizer = SGDSW([param], lr=known["lr"], norm=norm, **decays)
    for step, expected in enumerate(weights[1:]):
        param.grad = updates(shape, step).double()
        optimizer.step()
        torch.testing.assert_close(
            param.detach(), expected, rtol=0, atol=4e-7 * (step + 1) * float(expected.abs().max())
        )
