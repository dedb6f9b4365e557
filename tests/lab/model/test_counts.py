"""Parameter counts and FLOPs are the paper's, and counting allocates nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from muonsw.lab.model import PRESETS, Decoder, count
from tests.lab.model.small_models import small

# Name: exact total and active, then as printed in millions, and GFLOP a token as in the notes (None: not given).
PAPER = {
    "w128": (26_115_200, 11_959_424, "26.1", "12.0", None),
    "w256": (72_677_632, 30_210_304, "72.7", "30.2", "0.219"),
    "w512": (264_892_928, 95_023_616, "264.9", "95.0", "0.646"),
    "w768": (520_022_784, 180_284_160, "520.0", "180.3", "1.195"),
    "w1024": (932_439_040, 309_584_896, "932.4", "309.6", "2.009"),
}


@pytest.mark.parametrize("name", PAPER)
def test_counts_are_the_papers(name):
    total, active, printed_total, printed_active, gflop = PAPER[name]
    counts = count(PRESETS[name])
    assert (counts.total, counts.active) == (total, active)
    assert (f"{total / 1e6:.1f}", f"{active / 1e6:.1f}") == (printed_total, printed_active)
    if gflop is not None:
        assert f"{counts.flops_per_token / 1e9:.3f}" == gflop


@pytest.mark.parametrize("name", PRESETS)
def test_counts_follow_from_the_shapes(name):
    for config in (PRESETS[name], PRESETS[name].dense()):
        d, router = config.width, config.experts if config.experts > 1 else 0
        shared = config.vocab * d + d + config.layers * (4 * d * d + 2 * d + router * d)
        expert = config.layers * 3 * d * config.ff_width
        counts = count(config)
        assert counts.total == shared + config.experts * expert
        assert counts.active == shared + config.top_k * expert


def test_counting_allocates_no_memory():
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.append(out)
            return out

    with Watch():
        count(PRESETS["w1024"])
    assert made
    assert all(tensor.is_meta for tensor in made if isinstance(tensor, torch.Tensor))


def test_counts_are_those_of_the_allocated_model():
    config = small()
    assert count(config).total == sum(p.numel() for p in Decoder(config).parameters())
