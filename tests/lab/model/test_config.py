"""What a config derives, and what it refuses."""

import dataclasses
import math

import pytest

from muonsw.lab.model import PRESETS, Decoder, MuP, preset
from tests.lab.model.small_models import small, tokens


def test_every_preset_has_a_dense_variant_that_differs_in_the_experts_alone():
    for name, config in PRESETS.items():
        assert preset(name) is config
        dense = preset(f"{name}-dense")
        assert (dense.experts, dense.top_k) == (1, 1)
        assert dataclasses.replace(dense, experts=config.experts, top_k=config.top_k) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 20}, r"width=20 must be a multiple of head_dim=8; try width=16"),
        ({"width": 0}, r"width=0 must be a positive"),
        ({"width": 9, "head_dim": 3}, r"head_dim=3 must be even"),
        ({"layers": 2.5}, r"layers=2\.5 must be a whole number"),
        ({"ff": 0}, r"ff=0 must be a positive"),
        ({"top_k": 9}, r"top_k=9 must not exceed experts=8"),
        ({"rope_theta": math.inf}, r"rope_theta=inf"),
        ({"balance_coef": -0.1}, r"balance_coef=-0.1 .* 0 switches"),
        ({"balance_over": "epoch"}, r"balance_over='epoch' must be one of batch, sequence"),
        ({"init_std": 0}, r"mup\.init_std=0 must be a positive"),
        ({"base_width": -1}, r"mup\.base_width=-1"),
    ],
)
def test_invalid_configs_name_the_field_and_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        (MuP if set(changes) <= {"init_std", "base_width"} else small)(**changes)


def test_a_sequence_that_is_too_long_is_refused():
    config = small()
    with pytest.raises(ValueError, match="17 tokens are longer than sequence=16"):
        Decoder(config).logits(tokens(config, length=17))
