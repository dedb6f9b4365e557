"""The decoder: the logits of the reference, the counts of the paper, and roles that the optimizer's router finds."""

import pytest
import torch
from torch.nn import functional

from muonsw import MuonSW
from muonsw.lab.model import PRESETS, Decoder, count
from muonsw.lab.model.decoder import rotary_table, rotate
from tests.lab.model.small_models import reference_logits, small, tokens


def test_losses_are_those_of_the_logits_and_add_up():
    config = small()
    model = Decoder(config).double()
    ids = tokens(config, length=9)
    losses = model(ids[:, :-1], ids[:, 1:])
    plain = functional.cross_entropy(model.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(losses.cross_entropy, plain)
    torch.testing.assert_close(losses.total, plain + 0.1 * losses.balance + 0.01 * losses.z)


def test_logits_are_those_of_the_reference():
    model, ids = Decoder(small(layers=3)).double(), tokens(small(), length=9)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(0.0, param.shape[-1] ** -0.5)
    torch.testing.assert_close(model.logits(ids), reference_logits(model, ids))


def test_bfloat16_autocast_stays_near_float32():
    config = small(width=64, head_dim=32, ff=64)
    model = Decoder(config)
    ids = tokens(config, length=9)
    exact = model(ids[:, :-1], ids[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(ids[:, :-1], ids[:, 1:])
    assert rounded.cross_entropy.dtype == rounded.total.dtype == torch.float32
    torch.testing.assert_close(rounded.total, exact.total, rtol=0.02, atol=0)
    rounded.total.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# torch's tracer instantiates autograd functions, which torch warns about
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_traced_without_a_break_it_gives_the_same_losses_and_gradients():
    """A break is where the host reads a value from the device."""
    config = small(layers=1, experts=4)
    eager, traced = Decoder(config).double(), Decoder(config).double()
    ids = tokens(config, length=9)
    expected = eager(ids[:, :-1], ids[:, 1:])
    got = torch.compile(traced, backend="aot_eager", fullgraph=True)(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(tuple(got), tuple(expected))
    gradients = torch.autograd.grad(got.total, list(traced.parameters()))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.total, list(eager.parameters())))


def test_the_library_finds_the_roles_and_takes_the_fused_projections():
    model = Decoder(small())
    patterns = {pattern: {"split_sizes": sizes} for pattern, sizes in model.fused_projections().items()}
    optimizer = MuonSW.for_model(model, lr=0.01, weight_decay=0.1, patterns=patterns)
    roles = {
        name.removeprefix("layers.0."): group["role"]
        for group in optimizer.param_groups
        for name in group["param_names"]
        if not name.startswith("layers.1.")
    }
    assert roles == {
        "embedding.weight": "embedding",
        "norm.weight": "norm",
        "attention_norm.weight": "norm",
        "moe_norm.weight": "norm",
        "attention.qkv.weight": "hidden",
        "attention.out.weight": "hidden",
        "moe.router.weight": "router",
        "moe.gate_up": "experts",
        "moe.down": "experts",
    }


def test_scores_depend_on_relative_positions_alone():
    q, k = torch.randn(2, 1, 1, 12, 64, dtype=torch.float64)
    table = rotary_table(1012, 64, 10000.0)
    here, there = ([part[start : start + 12] for part in table] for start in (0, 1000))
    scores = rotate(q, here) @ rotate(k, here).mT
    # angles go up to the shift, with a relative rounding error of 2^-53
    torch.testing.assert_close(rotate(q, there) @ rotate(k, there).mT, scores, rtol=0, atol=1e-10)


# Name: total and active parameters, heads, inner size of an expert, and GFLOP a token as in the notes (or None).
PAPER = {
    "w128": (26_115_200, 11_959_424, 2, 512, None),
    "w256": (72_677_632, 30_210_304, 4, 768, "0.219"),
    "w512": (264_892_928, 95_023_616, 8, 1536, "0.646"),
    "w768": (520_022_784, 180_284_160, 12, 2048, "1.195"),
    "w1024": (932_439_040, 309_584_896, 16, 2816, "2.009"),
}


@pytest.mark.parametrize("name", PAPER)
def test_sizes_and_counts_are_the_papers(name):
    *expected, gflop = PAPER[name]
    config, counts = PRESETS[name], count(PRESETS[name])
    assert [counts.total, counts.active, config.width // config.head_dim, config.ff_width] == expected
    assert (config.layers, config.head_dim, config.experts, config.top_k) == (12, 64, 8, 2)
    assert (config.vocab, config.sequence) == (50304, 2048)
    if gflop is not None:
        assert f"{counts.flops_per_token / 1e9:.3f}" == gflop
