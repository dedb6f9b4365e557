"""Steps with kernels match steps without, for every option that reaches a kernel."""

from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw import AdamWSW, MuonSW
from muonsw.nonfinite import Flag
from tests.common.problems import assert_same, tensors_of

SHAPES = [(24, 24), (24, 24), (2, 80, 32), (2, 20, 36), (33, 7)]


def trained(build, device, dtype, steps=2):
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]
    optimizer = build(params)
    for step in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(device, dtype)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        optimizer.step()
    return params


def largest_difference(build, device, dtype, kernels_on):
    kernels_on(False)
    expected = trained(build, device, dtype)
    kernels_on(True)
    actual = trained(build, device, dtype)
    total = 0.0
    for p, q in zip(expected, actual, strict=True):
        a, b = p.detach().double(), q.detach().double()
        total = max(total, float((a - b).norm() / a.norm()))
    return total


def muon(params, **options):
    groups = [
        {"params": [params[0], params[1], params[3], params[4]]},
        {"params": [params[2]], "split_sizes": (40, 40)},
    ]
    return MuonSW(groups, lr=0.05, weight_decay=0.3, matrix="stack", ns_dtype="float16", **options)


# Directions differ by float16 rounding: 2^-11 of moves of 0.06 of the weights, amplified by the iteration.
MUON = [
    {},
    {"momentum_form": "heavy_ball", "nesterov": False},
    {"maximize": True},
    {"orthogonalizer": "polar_express"},
    {"orthogonalizer": "newton_schulz", "nonfinite": "propagate"},
    {"orthogonalizer": "exact", "normalize": "normuon"},
    {"chunk_bytes": 20_000},
    {"normalize": "normuon"},
    {"normalize": "normuon", "normalize_axis": "longer", "normalize_snap": True},
    {"normalize": "normuon", "transposed": True, "split_dim": 1},
    {"normalize": "muon_plus"},
    {"normalize": "adamuon", "precondition": "sign"},
    {"precondition": "muon2"},
    {"precondition": "equalize"},
    {"precondition": "equalize", "transposed": True, "split_dim": 1},
    {"precondition": "muon2", "orthogonalizer": "aurora"},
    {"normalize": "normuon", "chunk_bytes": 20_000, "norm": "hyperball"},
]


@pytest.mark.parametrize("options", MUON, ids=str)
def test_muon_matches_steps_without_kernels(options, device, kernels_on):
    # AdaMuon divides small elements by the roots of their squares, which amplifies their rounding
    bound = 5e-4 if options.get("normalize") != "adamuon" else 3e-3
    assert largest_difference(lambda p: muon(p, **options), device, torch.float32, kernels_on) < bound


@pytest.mark.parametrize("options", [{}, {"normalize": "normuon", "precondition": "muon2"}], ids=str)
def test_muon_in_low_precision_matches_steps_without_kernels(options, device, kernels_on):
    # a few stochastically rounded weights differ by 2^-8, where the noise falls between the two
    assert largest_difference(lambda p: muon(p, **options), device, torch.bfloat16, kernels_on) < 4e-3


@pytest.mark.parametrize("split_dim", [0, 1])
@pytest.mark.parametrize(
    "slot",
    [{}, {"normalize": "normuon"}, {"normalize": "adamuon"}, {"precondition": "muon2"}, {"precondition": "equalize"}],
    ids=str,
)
def test_blocks_of_one_matrix_match_steps_without_kernels(slot, split_dim, device, kernels_on):
    """Blocks along the second axis have gaps between their rows."""

    def build(params):
        options = {"split_sizes": (12, 12), "split_dim": split_dim, "ns_dtype": "float16"}
        return MuonSW([{"params": params[:2], **options, **slot}], lr=0.05, weight_decay=0.3)

    bound = 5e-4 if slot.get("normalize") != "adamuon" else 3e-3
    assert largest_difference(build, device, torch.float32, kernels_on) < bound


@pytest.mark.parametrize(
    "slot", [{}, {"normalize": "adamuon"}, {"normalize": "normuon"}, {"precondition": "muon2"}], ids=str
)
@pytest.mark.parametrize("split", [{}, {"heads": 2}, {"split_sizes": (3, 5), "split_dim": 1}], ids=str)
def test_a_flattened_matrix_with_gaps_is_not_a_stack(split, slot, device, kernels_on):
    """Though its last two axes look like one: in a block of a convolution's inputs, or a gradient with gaps."""

    def moved(on):
        kernels_on(on)
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(6, 8, 5).to(device))
        param.grad = torch.randn(12, 8, 5).to(device)[::2] if not split.get("split_dim") else torch.randn_like(param)
        optimizer = MuonSW([param], lr=0.05, matrix="flatten", ns_dtype="float32", **split, **slot)
        optimizer.step()
        return param.detach()

    torch.testing.assert_close(moved(True), moved(False), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", ["expanded", "every other", "not aligned"])
def test_gradients_of_a_stack_in_any_layout(layout, device, kernels_on):
    def moved(on):
        kernels_on(on)
        torch.manual_seed(0)
        param, room = nn.Parameter(torch.randn(3, 8, 12).to(device)), torch.randn(6 * 96 + 1).to(device)
        param.grad = {
            "expanded": room[:96].view(8, 12).expand(3, 8, 12),
            "every other": room[:-1].view(6, 8, 12)[::2],
            "not aligned": room[1:289].view(3, 8, 12),
        }[layout]
        MuonSW([param], lr=0.05, matrix="stack", ns_dtype="float32").step()
        return param.detach()

    torch.testing.assert_close(moved(True), moved(False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"cautious": True, "maximize": True}),
        (torch.bfloat16, {}),
        (torch.float16, {"cautious": True}),
        (torch.float32, {"state_dtype": "int8"}),
        (torch.float32, {"state_dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_adamw_matches_steps_without_kernels(options, dtype, device, kernels_on):
    # float32 differs by the order of a few operations. Low precision is rounded with the same noise, but a few elements
    # in a thousand round the other way; likewise stochastically rounded state.
    bound = 1e-6 if dtype == torch.float32 and not options.get("state_dtype") else 3e-4
    assert (
        largest_difference(lambda p: AdamWSW(p, lr=0.05, weight_decay=0.3, **options), device, dtype, kernels_on)
        < bound
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        MuonSW,
        partial(MuonSW, precondition="muon2", normalize="normuon"),
        partial(MuonSW, precondition="sign", normalize="adamuon"),
        partial(MuonSW, precondition="muon2", orthogonalizer="exact"),
        AdamWSW,
        partial(AdamWSW, state_dtype="int8"),
    ],
    ids=["muon", "muon2 and normuon", "adamuon", "muon2 and exact", "adamw", "adamw in 8 bits"],
)
def test_a_flag_on_the_device_skips_everything(build, dtype, device, kernels_on, monkeypatch):
    """As a GPU step with a bad gradient; the test sets the flag, so it runs on a CPU too."""
    kernels_on(True)
    bad = torch.zeros((), device=device)
    monkeypatch.setattr("muonsw.step.finite_flag", lambda *_: Flag(bad.clone()))
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in ((24, 192), (24, 192))]
    optimizer = build(params, lr=0.05, weight_decay=0.3)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(device, dtype)
    start = [p.detach().clone() for p in params]
    optimizer.step()
    assert not any(torch.equal(p.detach(), s) for p, s in zip(params, start, strict=True))
    before = tensors_of(optimizer, params)
    params[1].grad[3, 3] = float("nan")
    bad.fill_(1)
    optimizer.step()
    assert_same(tensors_of(optimizer, params), before)
