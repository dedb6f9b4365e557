"""Every shape that a model may hold."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from tests.common.problems import assert_same, matrices, run, set_gradients

OPTIONS = {"lr": 0.05, "weight_decay": 0.3, "ns_dtype": "float32"}


def stepped(params, steps=5, **options):
    run(MuonSW(params, **OPTIONS, **options), params, steps)
    return [p.detach() for p in params]


@pytest.mark.parametrize(
    ("shape", "sizes", "dim", "matrix"),
    [
        ((12, 4), (4, 4, 4), 0, None),
        ((10, 4), (4, 6), 0, None),
        ((4, 12), (3, 9), 1, None),
        ((3, 10, 4), (5, 5), 0, "stack"),
        ((3, 4, 10), (4, 6), 1, "stack"),
        ((8, 3, 2, 2), (3, 5), 0, "flatten"),
        ((4, 6, 2, 2), (2, 4), 1, "flatten"),
    ],
)
def test_a_fused_projection_is_its_parts(shape, sizes, dim, matrix):
    (fused,) = matrices(shape, dtype=torch.float64)
    axis = dim if matrix == "flatten" else len(shape) - 2 + dim
    parts = [nn.Parameter(p.clone()) for p in fused.detach().split(sizes, axis)]
    options = {**OPTIONS, "ns_dtype": "float64", "matrix": matrix}
    together = MuonSW([fused], **options, split_sizes=sizes, split_dim=dim)
    apart = MuonSW(parts, **options)
    for step in range(5):
        set_gradients([fused], step)
        for part, grad in zip(parts, fused.grad.split(sizes, axis), strict=True):
            part.grad = grad.clone()
        together.step()
        apart.step()
    expected = torch.cat([p.detach() for p in parts], axis)
    torch.testing.assert_close(fused.detach(), expected, rtol=1e-12, atol=1e-14)
    assert together.state[fused]["momentum_buffer"].shape == shape


def test_a_channels_last_convolution_is_the_same():
    (conv,) = matrices((6, 2, 3, 3))
    last = nn.Parameter(conv.detach().clone(memory_format=torch.channels_last))
    expected = stepped([conv], matrix="flatten")
    assert_same(stepped([last], matrix="flatten"), expected)
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (40, 3), (3, 40)])
def test_narrow_matrices_move_by_the_shape_scale(shape):
    """One step from zero momentum moves a matrix by eta * 0.2 sqrt(max(m, n)) * (an almost orthogonal matrix)."""
    (param,) = matrices(shape, dtype=torch.float64)
    before = param.detach().clone()
    set_gradients([param], 0)
    MuonSW([param], lr=0.05, weight_decay=0.0).step()
    moved = torch.linalg.svdvals(param.detach() - before) / (0.05 * 0.2 * max(shape) ** 0.5)
    assert moved.min() > 0.6
    assert moved.max() < 1.21


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0), (0, 3, 3), (2, 0, 3)])
def test_zero_size_parameters_are_harmless(shape):
    empty, full = nn.Parameter(torch.zeros(shape)), matrices((4, 4))[0]
    optimizer = MuonSW([empty, full], **OPTIONS, matrix="stack")
    before = full.detach().clone()
    set_gradients([empty, full], 0)
    optimizer.step()
    assert empty.shape == shape
    assert not torch.equal(full, before)


def test_non_contiguous_parameters_and_gradients():
    (plain,) = matrices((6, 4))
    strided = nn.Parameter(plain.detach().t().contiguous().t())
    assert not strided.is_contiguous()
    a, b = MuonSW([plain], **OPTIONS), MuonSW([strided], **OPTIONS)
    for step in range(5):
        set_gradients([plain], step)
        strided.grad = plain.grad.t().contiguous().t()
        a.step()
        b.step()
    torch.testing.assert_close(strided.detach(), plain.detach())


@pytest.mark.parametrize("algorithm", ["muon", "adamw", "sgd", "lion"])
def test_chunks_of_any_size_give_the_same(algorithm):
    """What is computed together is a matter of memory alone."""
    shapes = [(4, 6), (3, 5, 4), (4, 6), (50, 2), (7, 5, 4)]

    def result(chunk_bytes):
        params = matrices(*shapes, dtype=torch.float64)
        group = {"params": params, "algorithm": algorithm, "matrix": "stack", "momentum": 0.9}
        run(MuonSW([group], lr=0.05, weight_decay=0.3, chunk_bytes=chunk_bytes), params, 4)
        return params

    for chunk_bytes in (1, 100, 700, 10**9):
        for a, b in zip(result(chunk_bytes), result(None), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((5,), {}, r"algorithm='muon' needs matrices, but layer\.w has shape \(5,\)"),
        ((), {}, r"algorithm='muon' needs matrices"),
        ((2, 3, 4), {}, r"layer\.w has shape \(2, 3, 4\).*matrix='stack'"),
        ((8, 3, 3, 3), {}, r"matrix='flatten'.*MuonSW\.for_model"),
        ((6, 4), {"split_sizes": (2, 3)}, r"add up to 5, but layer\.w of shape \(6, 4\) has 6 along axis 0"),
    ],
)
def test_what_is_no_matrix_is_refused_by_name(shape, options, message):
    with pytest.raises(ValueError, match=message):
        MuonSW([("layer.w", nn.Parameter(torch.ones(shape)))], **OPTIONS, **options)
