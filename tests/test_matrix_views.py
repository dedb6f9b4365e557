"""Matrices stored as (in, out), and heads as a shorthand: each equals what it stands for, to the float64 reference."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.matrices import SHAPE_SCALES
from muonsw.reference import Decay, ReferenceMuonSW, ns5
from tests.common.problems import matrices, set_gradients

PEAK, LAM, STEPS = 0.05, 0.3, 20
OPTIONS = {"lr": PEAK, "weight_decay": LAM, "ns_dtype": "float64"}


def assert_follows(param, references, pieces_of, **options):
    """Steps with the same gradients for an optimizer and for references of the parts that it must see."""
    optimizer = MuonSW([param], **OPTIONS, **options)
    for step in range(STEPS):
        set_gradients([param], step)
        for reference, grad in zip(references, pieces_of(param.grad), strict=True):
            reference.step(grad, PEAK)
        optimizer.step()
    for reference, piece in zip(references, pieces_of(param.detach()), strict=True):
        torch.testing.assert_close(piece, reference.W, rtol=1e-9, atol=1e-11)


def reference(W, scale="match_rms_adamw", **options):
    listing = {"nesterov": True, "heavy_ball": False, "orthogonalize": ns5, "stretch": SHAPE_SCALES[scale]}
    return ReferenceMuonSW(W, Decay("scaled", LAM, PEAK), **listing, **options)


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original", "spectral"])
@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (3, 4, 10)])
def test_a_weight_stored_as_in_out_gets_the_scale_of_out_in(shape, scale):
    (param,) = matrices(shape, dtype=torch.float64)
    matrix = "stack" if len(shape) > 2 else None
    pieces_of = lambda t: t.reshape(-1, *shape[-2:])  # noqa: E731
    references = [reference(W, scale, in_out=True) for W in pieces_of(param.detach())]
    assert_follows(param, references, pieces_of, scale=scale, transposed=True, matrix=matrix)


@pytest.mark.parametrize(
    ("shape", "options", "axis"),
    [
        ((12, 5), {}, 0),
        ((5, 12), {"split_dim": 1}, 1),
        ((5, 12), {"transposed": True}, 1),
        ((12, 5), {"transposed": True, "split_dim": 1}, 0),
    ],
)
def test_heads_are_separate_matrices(shape, options, axis):
    """Three heads along out, which is the last axis where the weight is stored as (in, out)."""
    (param,) = matrices(shape, dtype=torch.float64)
    pieces_of = lambda t: t.split(4, axis)  # noqa: E731
    in_out = options.get("transposed", False)
    references = [reference(W, "spectral", in_out=in_out) for W in pieces_of(param.detach())]
    assert_follows(param, references, pieces_of, scale="spectral", heads=3, **options)


def test_a_grouped_convolution_is_its_groups():
    """Four groups of two filters each train as four convolutions side by side."""
    (conv,) = matrices((8, 3, 2, 2), dtype=torch.float64)
    pieces_of = lambda t: [part.reshape(2, 12) for part in t.split(2)]  # noqa: E731
    assert_follows(conv, [reference(W) for W in pieces_of(conv.detach())], pieces_of, matrix="flatten", heads=4)


def test_a_transposed_convolution_is_a_matrix_of_in_and_the_rest():
    (conv,) = matrices((6, 3, 2, 2), dtype=torch.float64)
    pieces_of = lambda t: [t.reshape(6, 12)]  # noqa: E731
    references = [reference(W, "original", in_out=True) for W in pieces_of(conv.detach())]
    assert_follows(conv, references, pieces_of, scale="original", matrix="flatten", transposed=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, r"heads=5 asks for equal blocks, but layer\.w of shape \(12, 4\) has 12 along axis 0"),
        ({"heads": 3, "transposed": True}, r"heads=3 asks for equal blocks, but layer\.w .* has 4 along axis 1"),
        ({"heads": 2, "split_sizes": (6, 6)}, r"heads=2 and split_sizes=\(6, 6\) both say how to split layer\.w"),
        ({"heads": 0}, "heads=0: must be a whole number of at least 1"),
        ({"heads": 2.0}, r"heads=2\.0: must be a whole number"),
        ({"transposed": 1}, "transposed=1: must be True or False"),
    ],
)
def test_views_that_do_not_fit_are_errors_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        MuonSW([("layer.w", nn.Parameter(torch.randn(12, 4)))], lr=0.1, **options)
