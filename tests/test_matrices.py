"""Parameters seen as matrices: every view moves as its matrices would."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.matrices import SHAPE_SCALES, MatrixView, matrix_chunks
from muonsw.reference import Decay, ReferenceMuonSW, ns5
from muonsw.work import Item
from tests.common.problems import matrices, set_gradients

PEAK, LAM = 0.05, 0.3


# Shapes with the options of a view, and the matrices that it must see.
VIEWS = [
    ((4, 12), {"transposed": True}, lambda t: [t]),
    ((3, 4, 10), {"transposed": True, "matrix": "stack"}, list),
    ((12, 5), {"heads": 3}, lambda t: t.split(4)),
    ((5, 12), {"heads": 3, "split_dim": 1}, lambda t: t.split(4, 1)),
    ((5, 12), {"heads": 3, "transposed": True}, lambda t: t.split(4, 1)),  # heads are along out, the last axis here
    ((12, 5), {"heads": 3, "transposed": True, "split_dim": 1}, lambda t: t.split(4)),
    ((3, 10, 4), {"matrix": "stack", "split_sizes": (4, 6)}, lambda t: [m for p in t.split((4, 6), 1) for m in p]),
    ((3, 4, 10), {"matrix": "stack", "split_sizes": (4, 6), "split_dim": 1},
     lambda t: [m for p in t.split((4, 6), 2) for m in p]),
    ((8, 3, 2, 2), {"matrix": "flatten", "heads": 4}, lambda t: [p.flatten(1) for p in t.split(2)]),  # four groups
    ((8, 3, 2, 2), {"matrix": "flatten", "split_sizes": (3, 5)}, lambda t: [p.flatten(1) for p in t.split((3, 5))]),
    ((4, 6, 2, 2), {"matrix": "flatten", "split_sizes": (2, 4), "split_dim": 1},
     lambda t: [p.flatten(1) for p in t.split((2, 4), 1)]),
    ((6, 3, 2, 2), {"matrix": "flatten", "transposed": True}, lambda t: [t.flatten(1)]),  # of a ConvTranspose
]  # fmt: skip


@pytest.mark.parametrize("scale", ["match_rms_adamw", "original", "spectral"])
@pytest.mark.parametrize(
    ("shape", "options", "pieces_of"), VIEWS, ids=lambda value: None if callable(value) else str(value)
)
def test_a_view_moves_like_its_matrices(shape, options, pieces_of, scale):
    (param,) = matrices(shape, dtype=torch.float64)
    listing = {"nesterov": True, "heavy_ball": False, "orthogonalize": ns5, "stretch": SHAPE_SCALES[scale]}
    listing["in_out"] = options.get("transposed", False)
    references = [ReferenceMuonSW(W, Decay("scaled", LAM, PEAK), **listing) for W in pieces_of(param.detach())]
    optimizer = MuonSW([param], lr=PEAK, weight_decay=LAM, ns_dtype="float64", scale=scale, **options)
    for step in range(10):
        set_gradients([param], step)
        for reference, grad in zip(references, pieces_of(param.grad), strict=True):
            reference.step(grad, PEAK)
        optimizer.step()
    for reference, piece in zip(references, pieces_of(param.detach()), strict=True):
        torch.testing.assert_close(piece, reference.W, rtol=1e-9, atol=1e-11)


FLOAT32 = {"lr": PEAK, "weight_decay": LAM, "ns_dtype": "float32"}


@pytest.mark.parametrize(
    ("shape", "options", "restride"),
    [
        ((6, 2, 3, 3), {"matrix": "flatten"}, lambda t: t.clone(memory_format=torch.channels_last)),
        ((6, 4), {}, lambda t: t.t().contiguous().t()),
    ],
    ids=["channels_last", "transposed"],
)
def test_strides_do_not_matter(shape, options, restride):
    (plain,) = matrices(shape)
    strided = nn.Parameter(restride(plain.detach()))
    before = strided.stride()
    optimizers = [MuonSW([param], **FLOAT32, **options) for param in (plain, strided)]
    for step in range(5):
        set_gradients([plain], step)
        strided.grad = restride(plain.grad)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(strided.detach(), plain.detach())
    assert strided.stride() == before != plain.stride()


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0), (0, 3, 3), (2, 0, 3)])
def test_zero_size_parameters_are_harmless(shape):
    empty, full = nn.Parameter(torch.zeros(shape)), matrices((4, 4))[0]
    optimizer = MuonSW([empty, full], **FLOAT32, matrix="stack")
    before = full.detach().clone()
    set_gradients([empty, full], 0)
    optimizer.step()
    assert empty.shape == shape
    assert not torch.equal(full, before)


@pytest.mark.parametrize("chunk_bytes", [1, 200, 700, 10**9])
def test_chunks_hold_every_matrix_once_and_as_many_as_fit(chunk_bytes):
    shapes = [(4, 6), (3, 5, 4), (4, 6), (7, 5, 4), (4, 6)]
    items = [Item(place, str(place), param, param, {}) for place, param in enumerate(map(torch.zeros, shapes))]
    chunks = matrix_chunks(MatrixView("stack"), items, chunk_bytes)
    for chunk in chunks:
        elements = sum(part.grad.numel() for part in chunk.parts)
        assert 4 * elements <= max(chunk_bytes, 4 * chunk.rows * chunk.columns)
        for part in chunk.parts:
            part.grad.add_(1)
    assert all(bool((item.grad == 1).all()) for item in items)
    assert len(chunks) == {1: 13, 200: 8, 700: 3, 10**9: 2}[chunk_bytes]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((5,), {}, r"algorithm='muon' needs matrices, but layer\.w has shape \(5,\)"),
        ((), {}, r"algorithm='muon' needs matrices"),
        ((2, 3, 4), {}, r"layer\.w has shape \(2, 3, 4\).*matrix='stack'"),
        ((8, 3, 3, 3), {}, r"matrix='flatten'.*MuonSW\.for_model"),
        ((6, 4), {"split_sizes": (2, 3)}, r"add up to 5, but layer\.w of shape \(6, 4\) has 6 along axis 0"),
        ((12, 4), {"heads": 5}, r"heads=5 needs equal blocks, but layer\.w of shape \(12, 4\) has 12 along axis 0"),
        ((12, 4), {"heads": 3, "transposed": True}, r"heads=3 needs equal blocks, .* has 4 along axis 1"),
        ((12, 4), {"heads": 2, "split_sizes": (6, 6)}, r"heads=2 and split_sizes=\(6, 6\) both split layer.w"),
        ((12, 4), {"heads": 0}, "heads=0: must be a whole number of at least 1"),
        ((12, 4), {"heads": 2.0}, r"heads=2\.0: must be a whole number"),
        ((12, 4), {"transposed": 1}, "transposed=1: must be True or False"),
    ],
)
def test_unfit_shapes_are_refused_by_name(shape, options, message):
    with pytest.raises(ValueError, match=message):
        MuonSW([("layer.w", nn.Parameter(torch.ones(shape)))], lr=0.1, **options)
