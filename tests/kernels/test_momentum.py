"""The momentum kernel matches torch operations, on equal matrices and on tensors of any shapes."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw import MuonSW
from muonsw.algorithms.base import advance_momentum, look_ahead, whole_parts
from muonsw.algorithms.muon import MUON
from muonsw.kernels import momentum
from muonsw.kernels.momentum import advance_momenta, normalized_momentum
from muonsw.kernels.tables import runs
from muonsw.orthogonalize import normalize
from muonsw.slots import PRECONDITION
from muonsw.work import Item, StepContext

NAMES = ("sign", "muon2", "equalize")
GROUP = {"momentum_form": "ema", "momentum": 0.95, "nesterov": True, "maximize": False, "precondition": None}
# Scales of matrices and their momenta: also tiny, zero and huge.
SCALES = [1.0, 1e-25, 0.0, 1e30]


def by_torch(group, grads, momenta, squares=()):
    """Momenta after a step, the matrices to orthogonalize, and average squares."""
    form, beta = group["momentum_form"], group["momentum"]
    grads = [-g if group["maximize"] else g for g in (g.float() for g in grads)]
    momenta = [m.to(torch.float32, copy=True) for m in momenta]
    advance_momentum(form, momenta, grads, beta, None)
    ahead = [m.clone() for m in momenta]
    if group["nesterov"]:
        look_ahead(form, momenta, grads, beta, out=ahead)
    states = [{"exp_avg_sq": v, "grad": g} for v, g in zip(squares or grads, grads, strict=True)]
    results = [PRECONDITION.apply(group, x, state) for x, state in zip(ahead, states, strict=True)]
    return momenta, [x for x, _ in results], [state["exp_avg_sq"] for _, state in results if state]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("shape", [(60, 71), (1, 3)], ids=str)
def test_momenta_of_equal_matrices_match(shape, form, nesterov, maximize, device):
    grads = [torch.randn(2, *shape), *(torch.randn(shape) * scale for scale in SCALES)]
    momenta = [(torch.randn_like(g) * float(g.abs().max())).to(device) for g in grads]
    grads = [g.to(device) for g in grads]
    group = {**GROUP, "momentum_form": form, "nesterov": nesterov, "maximize": maximize}
    after, ahead, _ = by_torch(group, grads, momenta)
    batch = normalized_momentum(group, grads, momenta, [], shape, torch.float16, None)
    for actual, expected in zip(momenta, after, strict=True):
        assert (actual - expected).abs().max() <= 2**-22 * expected.abs().max()
    expected = torch.cat([normalize(a.cpu().reshape(-1, *shape)) for a in ahead]).to(device)
    # one rounding to float16 before the division by the norm, one after it
    assert (batch.float() - expected).abs().max() <= 2 * 2.0**-11 * expected.abs().max()
    assert not batch[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momenta_of_low_precision_gradients_match(dtype, device):
    grads, momenta = ([torch.randn(40, 56).to(device, dtype) for _ in range(3)] for _ in range(2))
    group, eps = {**GROUP, "momentum_form": "heavy_ball", "nesterov": False}, torch.finfo(dtype).eps
    after, ahead, _ = by_torch(group, grads, momenta)
    batch = normalized_momentum(group, grads, momenta, [], (40, 56), torch.float32, None)
    for actual, expected in zip(momenta, after, strict=True):
        assert (actual.float() - expected).abs().max() <= eps * expected.abs().max()
    expected = normalize(torch.stack(ahead))
    assert (batch - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_preconditioners_of_equal_matrices_match(name, device):
    """Rows of very different norms, one of them zero; the second matrix is tiny, the last zero."""
    grads = (
        torch.randn(3, 33, 300) * torch.linspace(0.01, 2, 33)[:, None] * torch.tensor([1.0, 1e-12, 0.0])[:, None, None]
    )
    grads[0, 0] = 0
    grads = list(grads.to(device))
    momenta, group = [g.clone() for g in grads], {**GROUP, "precondition": name}
    squares = [torch.rand_like(g) * float(g.abs().max()) ** 2 for g in grads] if name == "muon2" else []
    after, ahead, averages = by_torch(group, grads, momenta, squares)
    actual = normalized_momentum(group, grads, momenta, squares, (33, 300), torch.float16, None)
    expected = normalize(torch.stack(ahead))
    assert (actual.float() - expected).abs().max() <= 2 * 2.0**-11 * expected.abs().max()
    torch.testing.assert_close([*momenta, *squares], [*after, *averages], rtol=1e-6, atol=0)


PLAIN = [(None, form, nesterov) for form in ("ema", "heavy_ball") for nesterov in (False, True)]


@pytest.mark.parametrize(("name", "form", "nesterov"), [*PLAIN, ("sign", "ema", False), ("muon2", "ema", True)])
def test_momenta_of_tensors_of_any_shapes_match(name, form, nesterov, device):
    """Including blocks of rows and of columns, which are not contiguous."""
    shapes = [(5,), (2, 40, 30), (3000,), (7, 9), (50, 60), (2, 8, 6)]
    grads, momenta, squares = ([torch.rand(s, device=device) for s in shapes] for _ in range(3))
    for tensors in (grads, momenta, squares):
        tensors[1] = torch.rand(2, 80, 30, device=device)[:, :40]
        tensors[4] = torch.rand(50, 180, device=device)[:, 60:120]
        tensors[5] = torch.rand(2, 8, 18, device=device)[..., 12:]
    squares = squares if name == "muon2" else []
    group = {**GROUP, "momentum_form": form, "nesterov": nesterov, "precondition": name}
    after, ahead, averages = by_torch(group, grads, momenta, squares)
    targets = [torch.empty(s, device=device, dtype=torch.float16) for s in shapes]
    assert advance_momenta(group, grads, momenta, squares, targets, None)
    torch.testing.assert_close([*momenta, *squares], [*after, *averages], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close([t.float() for t in targets], ahead, rtol=2.0**-11, atol=1e-6)
    assert not advance_momenta(GROUP, [grads[3].mT], [momenta[3].mT], [], None, None)
    assert not advance_momenta(GROUP, [grads[4]], [momenta[4].contiguous()], [], None, None)


def test_addresses_of_matrices_in_every_layout_that_a_kernel_reads(device):
    stack, block = torch.randn(2, 8, 6, device=device), torch.randn(2, 16, 6, device=device)[:, :8]
    layout = runs([stack[1], stack, stack.view(2, 4, 12), block, stack[:1].expand(2, 8, 6)], 48)
    matrices = [stack[1], *stack, *stack, *block, stack[0], stack[0]]
    assert (layout.addresses, layout.rows) == ([matrix.data_ptr() for matrix in matrices], ())
    columns = torch.randn(2, 8, 18, device=device)[..., 6:12]
    layout, matrices = runs([stack[0], columns[1], columns], 48), [stack[0], columns[1], *columns]
    assert layout.addresses == [matrix.data_ptr() for matrix in matrices]
    assert layout.rows == ([48, 6, 6, 6], [48, 18, 18, 18])
    assert layout[2:4] == ([0, 1, 2, 2], [0, 0, 0, 48])
    assert runs([stack, stack.mT], 48) is None
    assert runs([stack], 40) is None
    assert runs([torch.randn(12, 8, 5, device=device)[::2]], 240) is None
    # gradients and momenta must have the same gaps, and each a dtype that the kernel knows
    refused = ([columns[0]], [stack[0]]), ([stack, stack.half()], [stack, stack]), ([stack.double()], [stack])
    for grads, momenta in refused:
        assert normalized_momentum(GROUP, grads, momenta, [], (8, 6), torch.float16, None) is None


def test_any_number_of_matrices_is_one_launch(device, monkeypatch):
    """Only the first axis of a grid is longer than 65,535."""
    grids = []
    monkeypatch.setattr(momentum, "launch_on", lambda _device, _kernel, grid, *_, **__: grids.append(grid))
    stack = torch.zeros(70_000, 1, 1, device=device)
    normalized_momentum(GROUP, [stack], [stack.clone()], [], (1, 1), torch.float16, None)
    assert grids == [(70_000,), (70_000,)]


@pytest.mark.parametrize("name", [None, *NAMES])
def test_shards_are_advanced_with_an_elementwise_preconditioner(name, device, kernels_on):
    actual = []
    for on in (False, True):
        kernels_on(on)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(8, 12, device=device)) for _ in range(2)]
        group = MuonSW(params, lr=0.1, precondition=name).param_groups[0]
        states = [{key: torch.rand(8, 12, device=device) for key in ("momentum_buffer", "exp_avg_sq")} for _ in params]
        pairs = zip(params, states, strict=True)
        items = [Item(0, "", param.detach(), torch.randn_like(param.detach()), state) for param, state in pairs]
        targets = [torch.empty(8, 12, device=device) for _ in params]
        MUON.matrices.advance(group, whole_parts(items), targets, StepContext(0.1, 0.0, 2**20))
        actual.append([*targets, *(tensor for state in states for tensor in state.values())])
    torch.testing.assert_close(*actual, rtol=1e-5, atol=1e-6)
