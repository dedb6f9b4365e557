"""Tables of named functions, and users' entries in them."""

import pytest
import torch
from torch import nn

from muonsw import DECAY_RULES, ORTHOGONALIZERS, SHAPE_SCALES, MuonSW
from muonsw.decay import DecayRule
from muonsw.registry import Registry


@pytest.fixture(autouse=True)
def _restored_tables():
    tables = (DECAY_RULES, ORTHOGONALIZERS, SHAPE_SCALES)
    before = [dict(table) for table in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)


def stepped(grad=3.0, **options):
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.full_like(param, grad)
    MuonSW([param], lr=0.1, **options).step()
    return param.detach()


@pytest.mark.parametrize(("scale", "expected"), [("none", 0.9), ("double", 0.8)])
def test_a_users_orthogonalizer_and_shape_scale_are_used(scale, expected):
    ORTHOGONALIZERS.register("sign", lambda matrices, *, steps, dtype=None: matrices.sign())  # noqa: ARG005
    SHAPE_SCALES.register("double", lambda rows, columns: rows * columns / 8)
    moved = stepped(weight_decay=0.0, orthogonalizer="sign", scale=scale)
    assert torch.allclose(moved, torch.full((4, 4), expected))


def test_a_users_decay_rule_is_used():
    DECAY_RULES.register("flat", DecayRule(lambda lam, at: lam * at.step / 4, uses_step=True))
    assert torch.allclose(stepped(grad=0.0, weight_decay=1.0, decay="flat"), torch.full((4, 4), 0.75))


def test_a_registered_name_is_not_overwritten():
    table = Registry("thing")
    table.register("a", 1)
    with pytest.raises(ValueError, match="thing 'a' is already registered"):
        table.register("a", 2)
    assert dict(table) == {"a": 1}
