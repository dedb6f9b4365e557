"""The momentum kernel makes what torch operations make, of equal matrices and of tensors of any shapes."""

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw import MuonSW
from muonsw.algorithms.base import advance_momentum, look_ahead
from muonsw.algorithms.muon import MUON
from muonsw.kernels import momentum
from muonsw.kernels.momentum import Precondition, advance_momenta, normalized_momentum, takes
from muonsw.matrices import WHOLE, Part
from muonsw.orthogonalize import normalize
from muonsw.slots import EQUALIZE, MUON2, SIGN
from muonsw.work import Item

MEMBERS = {"sign": SIGN, "muon2": MUON2, "equalize": EQUALIZE}
OPTIONS = {"form": "ema", "beta": 0.95, "nesterov": True, "maximize": False, "flag": None}
# Of matrices, each with its momentum: huge, tiny and no scale at all.
SCALES = [1.0, 1e-25, 0.0, 1e30]


def by_torch(grads, momenta, form="ema", nesterov=True, maximize=False, member=None, squares=()):
    """Momenta after a step, what is to be orthogonalized, and average squares."""
    grads = [-g if maximize else g for g in (g.float() for g in grads)]
    momenta = [m.to(torch.float32, copy=True) for m in momenta]
    advance_momentum(form, momenta, grads, 0.95, None)
    ahead = [torch.empty_like(m) for m in momenta]
    look_ahead(form, momenta, grads, 0.95, out=ahead)
    ahead, after = ahead if nesterov else momenta, list(squares)
    if member is not None:
        states = [{"exp_avg_sq": v, "grad": g} for v, g in zip(squares or grads, grads, strict=True)]
        results = [member.apply(member.defaults, x, state) for x, state in zip(ahead, states, strict=True)]
        ahead, after = [x for x, _ in results], [state.get("exp_avg_sq") for _, state in results]
    return momenta, ahead, after


def precondition(name, squares):
    return None if name is None else Precondition(name, *((squares, 0.95, 1e-10) if name == "muon2" else ()))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("shape", [(60, 71), (1, 3)], ids=str)
def test_equal_matrices(shape, form, nesterov, maximize, device):
    grads = [torch.randn(2, *shape), *(torch.randn(shape) * scale for scale in SCALES)]
    momenta = [(torch.randn_like(g) * float(g.abs().max())).to(device) for g in grads]
    grads = [g.to(device) for g in grads]
    after, ahead, _ = by_torch(grads, momenta, form, nesterov, maximize)
    options = {**OPTIONS, "form": form, "nesterov": nesterov, "maximize": maximize}
    batch = normalized_momentum(grads, momenta, **options, dtype=torch.float16)
    for found, expected in zip(momenta, after, strict=True):
        assert (found - expected).abs().max() <= 2**-22 * expected.abs().max()
    expected = torch.cat([normalize(a.cpu().reshape(-1, *shape)) for a in ahead]).to(device)
    # one rounding to float16 before the norm is divided out, one after it
    assert (batch.float() - expected).abs().max() <= 2 * 2.0**-11 * expected.abs().max()
    assert not batch[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_and_momenta(dtype, device):
    grads, momenta = ([torch.randn(40, 56).to(device, dtype) for _ in range(3)] for _ in range(2))
    after, ahead, _ = by_torch(grads, momenta, "heavy_ball", nesterov=False)
    options = {**OPTIONS, "form": "heavy_ball", "nesterov": False}
    batch, eps = normalized_momentum(grads, momenta, **options, dtype=torch.float32), torch.finfo(dtype).eps
    for found, expected in zip(momenta, after, strict=True):
        assert (found.float() - expected).abs().max() <= eps * expected.abs().max()
    expected = normalize(torch.stack(ahead))
    assert (batch - expected).abs().max() <= eps * expected.abs().max()


@pytest.mark.parametrize("name", MEMBERS)
def test_preconditioners_of_equal_matrices(name, device):
    """Rows of very different lengths, one of them zero; the last matrix is zero, the second tiny."""
    grads = (
        torch.randn(3, 33, 300) * torch.linspace(0.01, 2, 33)[:, None] * torch.tensor([1.0, 1e-12, 0.0])[:, None, None]
    )
    grads[0, 0] = 0
    grads = list(grads.to(device))
    momenta, squares = [g.clone() for g in grads], [torch.rand_like(g) * float(g.abs().max()) ** 2 for g in grads]
    after, ahead, averages = by_torch(grads, momenta, member=MEMBERS[name], squares=squares)
    chosen = precondition(name, squares)
    found = normalized_momentum(grads, momenta, **OPTIONS, dtype=torch.float16, precondition=chosen)
    expected = normalize(torch.stack(ahead))
    assert (found.float() - expected).abs().max() <= 2 * 2.0**-11 * expected.abs().max()
    torch.testing.assert_close(momenta, after, rtol=1e-6, atol=0)
    if name == "muon2":
        torch.testing.assert_close(squares, averages, rtol=1e-6, atol=0)


PLAIN = [(None, form, nesterov) for form in ("ema", "heavy_ball") for nesterov in (False, True)]


@pytest.mark.parametrize(("name", "form", "nesterov"), [*PLAIN, ("sign", "ema", False), ("muon2", "ema", True)])
def test_tensors_of_any_shapes(name, form, nesterov, device):
    """Among them a block of a stack, which is not contiguous."""
    shapes = [(5,), (2, 40, 30), (3000,), (7, 9)]
    grads, momenta, squares = ([torch.rand(s, device=device) for s in shapes] for _ in range(3))
    momenta[1] = torch.rand(2, 80, 30, device=device)[:, :40]
    after, ahead, averages = by_torch(grads, momenta, form, nesterov, member=MEMBERS.get(name), squares=squares)
    targets = [torch.empty(s, device=device, dtype=torch.float16) for s in shapes]
    options = {**OPTIONS, "form": form, "nesterov": nesterov, "precondition": precondition(name, squares)}
    assert advance_momenta(grads, momenta, targets, **options)
    torch.testing.assert_close(momenta, after, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close([t.float() for t in targets], ahead, rtol=2.0**-11, atol=1e-6)
    if name == "muon2":
        torch.testing.assert_close(squares, averages, rtol=1e-6, atol=0)
    assert not advance_momenta([grads[3].mT], [momenta[3].mT], None, **OPTIONS)


def test_layouts_without_a_kernel_are_refused(device):
    straight = torch.randn(2, 8, 6, device=device)
    stacks = [straight, torch.randn(2, 16, 6, device=device)[:, :8]]
    assert takes(stacks, stacks, torch.float16)
    assert not takes([straight[0], straight[0, :, :3]], stacks, torch.float16)
    assert not takes([straight, straight.mT.contiguous().mT], stacks, torch.float16)
    assert not takes(stacks, stacks, torch.float64)
    assert not takes([straight, straight.double()], stacks, torch.float16)


def test_any_number_of_matrices_is_one_launch(device, monkeypatch):
    """Only the first axis of a grid is longer than 65,535."""
    grids = []
    monkeypatch.setattr(momentum, "launch_on", lambda _device, _kernel, grid, *_, **__: grids.append(grid))
    stack = torch.zeros(70_000, 1, 1, device=device)
    normalized_momentum([stack], [stack.clone()], **OPTIONS, dtype=torch.float16)
    assert grids == [(70_000,), (70_000,)]


@pytest.mark.parametrize("name", [None, *MEMBERS])
def test_shards_are_advanced_with_an_elementwise_preconditioner(name, device, kernels_on):
    found = []
    for on in (False, True):
        kernels_on(on)
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(8, 12, device=device)) for _ in range(2)]
        group = MuonSW(params, lr=0.1, precondition=name).param_groups[0]
        states = [{key: torch.rand(8, 12, device=device) for key in ("momentum_buffer", "exp_avg_sq")} for _ in params]
        items = [Item(0, "", param.detach(), torch.randn_like(param.detach()), state)
                 for param, state in zip(params, states, strict=True)]  # fmt: skip
        targets = [torch.empty(8, 12, device=device) for _ in params]
        MUON.matrices.advance(group, [Part(item, WHOLE) for item in items], targets)
        found.append([*targets, *(tensor for state in states for tensor in state.values())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
