"""What a config refuses, muP by role, and initial weights: the same seed gives the same bits."""

import math

import pytest
import torch

from muonsw.lab.model import Decoder, MuP, role_of, scalings
from tests.lab.model.small_models import small


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 20}, r"width=20 must be a multiple of head_dim=8; try width=16"),
        ({"width": 0}, r"width=0 must be positive"),
        ({"width": 9, "head_dim": 3}, r"head_dim=3 must be even"),
        ({"top_k": 9}, r"top_k=9 must not exceed experts=8"),
        ({"balance_coef": -0.1}, r"balance_coef=-0.1"),
        ({"experts": 1, "top_k": 1}, r"experts=1 must be at least 2"),
        ({"base_width": -1}, r"mup\.base_width=-1"),
    ],
)
def test_invalid_configs_name_the_field_and_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        (MuP if "base_width" in changes else small)(**changes)


# From n normal numbers, the standard error of the standard deviation is std/sqrt(2n) and that of the mean std/sqrt(n).
# A deviation by six standard errors happens by chance once in 5e8 draws.
SIGMAS = 6


@pytest.mark.parametrize("m", [1, 4])
def test_mup_scales_each_role_with_the_width(m):
    """By role: standard deviation, multiplier and learning rate at m times the base width and 12 layers."""
    expected = {
        "embedding": (0.02, 10, 1),
        "head": (0.02, 1 / m, 1),
        "hidden": (0.02 / math.sqrt(m), 1, 1 / m),
        "residual": (0.02 / math.sqrt(24 * m), 1.4 / math.sqrt(12), 1 / m),
        "router": (0.02, 1 / m, 1),
        "norm": (None, 1, 1),
    }
    table = scalings(small(width=256 * m, head_dim=64, layers=12))
    assert {role: (s.std, s.multiplier, s.lr) for role, s in table.items()} == {
        role: pytest.approx(row) for role, row in expected.items()
    }


def test_standard_parametrization_has_the_base_row_at_every_width():
    standard = small(width=1024, head_dim=64, mup=MuP(enabled=False))
    assert scalings(standard) == scalings(small(width=256, head_dim=64))


def test_initial_weights_have_the_deviations_of_the_table():
    config = small(width=256, head_dim=32, layers=3, ff=96, vocab=500)
    table = scalings(config)
    for name, param in Decoder(config, seed=3).named_parameters():
        std = table[role_of(name)].std
        if std is None:
            assert (param == 1).all()
            continue
        n = param.numel()
        assert abs(param.std().item() / std - 1) < SIGMAS / math.sqrt(2 * n), name
        assert abs(param.mean().item()) < SIGMAS * std / math.sqrt(n), name


def test_same_seed_same_bits_and_no_other_randomness():
    torch.manual_seed(1)
    first = Decoder(small(), seed=5).state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = Decoder(small(), seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    other = Decoder(small(), seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if not name.endswith("norm.weight"))
