"""The coordinate check: flat where it should be, drifting where not, and able to tell one from the other."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from muonsw.lab.model import Decoder
from muonsw.lab.stats import Criterion
from muonsw.lab.studies.figures import draw_coordinates
from muonsw.lab.studies.mup import (
    COORDINATES,
    EXPERIMENTS,
    MATRICES,
    WORDS,
    activations,
    chain_tokens,
    measure,
    measure_widths,
    power_claim,
)
from muonsw.lab.train.state import build_optimizer
from muonsw.matrices import SHAPE_SCALES

ARMS = {experiment.name: experiment for experiment in EXPERIMENTS}
LITTLE = {"seeds": 3, "layers": 1, "experts": 2, "vocab": 32}
SMALL = {name: replace(arm, widths=(32, 64, 128), steps=3, **LITTLE) for name, arm in ARMS.items()}
# Where AdamW is to be flat its finite-width terms must have faded.
SMALL["adamw"] = replace(ARMS["adamw"], widths=(64, 128, 256), **LITTLE)


@cache
def outcome(name):
    return SMALL[name].run(0)


@pytest.mark.parametrize("name", ARMS)
def test_no_claim_fails_and_every_mean_is_where_the_claim_says(name):
    claims = outcome(name).claims
    for claim in claims:
        assert not claim.fails, claim
        if claim.criterion is Criterion.ABSOLUTE:
            assert abs(claim.measured - claim.predicted) <= claim.tolerance, claim
        assert math.isfinite(claim.measured)


def test_the_figure_has_a_panel_for_every_size(tmp_path):
    png, svg = draw_coordinates({name: outcome(name) for name in ARMS}, tmp_path)
    assert png.stat().st_size > 10_000
    text = svg.read_text(encoding="utf-8")
    assert [title for title in WORDS.values() if title not in text] == []


@pytest.mark.parametrize("name", ["muon-adam", "muon-none", "standard"])
def test_what_drifts_does_not_pass_for_flat(name):
    sizes = {curves.name: torch.tensor(curves.values, dtype=torch.float64) for curves in outcome(name).series}
    claims = [power_claim(SMALL[name], sizes, f"update {matrix}", 0.0) for matrix in MATRICES]
    assert not any(claim.holds for claim in claims)
    assert any(claim.fails for claim in claims)


def test_the_seed_fixes_every_bit():
    setting = replace(ARMS["adamw"], widths=(32, 64), seeds=2, steps=1)
    first, again, other = (measure_widths(setting, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_the_first_update_of_muon_has_the_size_of_its_spectral_norm():
    """Inputs lie in the span of the update, so `||dW x||` is its singular values (0.68 to 1.14) times `||x||`."""
    setting = ARMS["muon-sqrt"]
    tokens = chain_tokens(2, 8, setting.vocab, torch.Generator().manual_seed(0))
    model = Decoder(setting.model(128), seed=0)
    inputs = activations(model, tokens[:, :-1])[1]["out/1"].rows
    sizes = measure(model, build_optimizer(model, setting.optimizer()), tokens, steps=1)
    lr = setting.lr * math.sqrt(2)  # width 128 is half the base width
    unit = lr * SHAPE_SCALES["match_rms_adamw"](128, 128) * float(inputs.square().mean().sqrt())
    assert 0.6 < sizes["update out/1"] / unit < 1.2


def test_sizes_are_those_of_the_forward_pass():
    setting = ARMS["adamw"]
    tokens = chain_tokens(2, 8, setting.vocab, torch.Generator().manual_seed(0))
    assert tokens.shape == (2, 9)
    model = Decoder(setting.model(32), seed=0)
    outputs, matrices = activations(model, tokens[:, :-1])
    assert torch.equal(outputs["logits"], model.logits(tokens[:, :-1]))
    streams = [outputs[f"stream/{layer}"] for layer in range(setting.layers)]
    branches = outputs["attention/1"] + outputs["experts/1"]
    torch.testing.assert_close(streams[1], streams[0] + model.layers[1].multiplier * branches)
    assert matrices["gate_up/0"].rows.shape == (2 * 8 * 2, 32)
    assert matrices["down/0"].rows.shape == (2 * 8 * 2, setting.ff * 32)
    assert {name.partition("/")[0] for name in outputs} == set(COORDINATES)
