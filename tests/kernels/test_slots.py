"""What kernels make of the two slots is what their torch twins make, state included."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.algorithms.base import Update, advance_momentum, look_ahead
from muonsw.kernels.momentum import Precondition, advance_momenta, normalized_momentum
from muonsw.kernels.move import Motion, Weights, move
from muonsw.kernels.normalize import normalize_
from muonsw.nonfinite import Flag
from muonsw.orthogonalize import normalize
from muonsw.slots import ADAMUON, EQUALIZE, MUON2, MUON_PLUS, NORMUON, SIGN
from tests.kernels.test_steps import largest_difference, muon

MOMENTUM = {"form": "ema", "beta": 0.95, "nesterov": True, "maximize": False, "flag": None}


def directions(shape, dtype, device):
    """Three matrices with rows of very different lengths, some of them zero; the last is zero throughout."""
    U = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) / shape[1] ** 0.5
    U *= torch.linspace(0.01, 2, shape[0])[:, None]
    U[0, 0], U[2] = 0, 0
    return U.to(device, dtype)


def stacks(tensor):
    """The same as a stack of two and a matrix by itself, in memory of their own."""
    return [tensor[:2].clone(), tensor[2].clone()]


def joined(tensors):
    return torch.cat([tensors[0], tensors[1][None]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("snap", [False, True])
@pytest.mark.parametrize(("shape", "by_row"), [((33, 300), True), ((40, 20), True), ((20, 530), False)], ids=str)
def test_normuon_is_the_twins(shape, by_row, snap, dtype, device):
    U = directions(shape, dtype, device)
    options = {**NORMUON.defaults, "snap": snap, "axis": "rows" if by_row else "longer"}
    key = "exp_avg_sq_row" if by_row else "exp_avg_sq_slice"
    average = torch.rand(3, *((shape[0], 1) if by_row else (1, shape[1])), device=device)
    average[1] = 0
    kept, wide = stacks(average), U.float()
    for _ in range(2):
        expected, state = NORMUON.apply(options, wide, {key: average})
        found, average = U.clone(), state[key]
        normalize_(found, slice_averages=kept, by_row=by_row, beta2=0.95, eps=1e-10, snap=snap)
        assert torch.allclose(joined(kept), average, rtol=1e-5, atol=1e-9)
        assert (found.float() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max() + 1e-5
        assert not found[2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(33, 300), (40, 20)], ids=str)
def test_adamuon_and_muon_plus_are_the_twins(shape, dtype, device):
    U = directions(shape, dtype, device)
    average = torch.rand(3, *shape, device=device)
    kept, found = stacks(average), U.clone()
    expected, state = ADAMUON.apply(ADAMUON.defaults, U.float(), {"exp_avg_sq_direction": average})
    normalize_(found, averages=kept, beta2=0.95, eps=1e-8)
    assert torch.allclose(joined(kept), state["exp_avg_sq_direction"], rtol=1e-5, atol=1e-9)
    # rounded after the division and after the multiplication
    assert (found.float() - expected).abs().max() <= 2 * torch.finfo(dtype).eps * expected.abs().max() + 1e-5
    expected, _ = MUON_PLUS.apply({}, U.float(), {})
    found = U.clone()
    normalize_(found)
    assert (found.float() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max() + 1e-5
    assert not found[2].any()


@pytest.mark.parametrize("name", ["sign", "muon2", "equalize"])
def test_preconditioners_of_the_momentum_pass_are_the_twins(name, device):
    grads, momenta = (list(directions((33, 300), torch.float32, device)) for _ in range(2))
    grads = [g * scale for g, scale in zip(grads, (1.0, 1e-12, 1.0), strict=True)]
    squares = [torch.rand(33, 300, device=device) * float(g.abs().max()) ** 2 for g in grads]
    after = [m.clone() for m in momenta]
    advance_momentum("ema", after, grads, 0.95, None)
    ahead = [torch.empty_like(m) for m in after]
    look_ahead("ema", after, grads, 0.95, out=ahead)
    member = {"sign": SIGN, "muon2": MUON2, "equalize": EQUALIZE}[name]
    state = {"exp_avg_sq": torch.stack(squares), "grad": torch.stack(grads)}
    expected, state = member.apply(member.defaults, torch.stack(ahead), state)
    own = (squares, 0.95, 1e-10) if name == "muon2" else ()
    found = normalized_momentum(grads, momenta, **MOMENTUM, dtype=torch.float16, precondition=Precondition(name, *own))
    expected = normalize(expected)
    assert (found.float() - expected).abs().max() <= 2 * 2.0**-11 * expected.abs().max()
    assert torch.allclose(torch.stack(momenta), torch.stack(after), rtol=1e-6, atol=0)
    if name == "muon2":
        assert torch.allclose(torch.stack(squares), state["exp_avg_sq"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
def test_momentum_alone_is_the_twins(form, nesterov, device):
    """Of tensors of any shapes, among them a block of a stack."""
    shapes = [(5,), (2, 40, 30), (3000,), (7, 9)]
    grads, momenta = ([torch.randn(s, device=device) for s in shapes] for _ in range(2))
    momenta[1] = torch.randn(2, 80, 30, device=device)[:, :40]
    after = [m.clone() for m in momenta]
    advance_momentum(form, after, grads, 0.95, None)
    ahead = [torch.empty_like(m) for m in after]
    look_ahead(form, after, grads, 0.95, out=ahead)
    targets = [torch.empty(s, device=device, dtype=torch.float16) for s in shapes]
    assert advance_momenta(grads, momenta, targets, **{**MOMENTUM, "form": form, "nesterov": nesterov})
    for m, a, t, b in zip(momenta, after, targets, ahead if nesterov else after, strict=True):
        assert torch.allclose(m, a, rtol=1e-6, atol=1e-6)
        assert torch.allclose(t.float(), b, rtol=2.0**-11, atol=1e-6)
    assert not advance_momenta([grads[3].mT], [momenta[3].mT], None, **MOMENTUM)


@pytest.mark.parametrize("name", ["sign", "muon2"])
def test_preconditioners_of_elements_run_on_shards_of_any_shape(name, device):
    shapes = [(5,), (2, 40, 30), (3000,)]
    grads, momenta, squares = ([torch.rand(s, device=device) for s in shapes] for _ in range(3))
    after, state = [m.clone() for m in momenta], [v.clone() for v in squares]
    advance_momentum("ema", after, grads, 0.95, None)
    targets = [torch.empty(s, device=device) for s in shapes]
    member, own = (SIGN, ()) if name == "sign" else (MUON2, (squares, 0.95, 1e-10))
    options = {**MOMENTUM, "nesterov": False}
    assert advance_momenta(grads, momenta, targets, **options, precondition=Precondition(name, *own))
    for number, (m, a, t) in enumerate(zip(momenta, after, targets, strict=True)):
        known = {"exp_avg_sq": state[number], "grad": grads[number]}
        expected, new = member.apply(member.defaults, a, known)
        assert torch.allclose(m, a, rtol=1e-6, atol=0)
        assert torch.allclose(t, expected, rtol=1e-5, atol=0)
        assert name == "sign" or torch.allclose(squares[number], new["exp_avg_sq"], rtol=1e-6, atol=0)


def test_a_skipped_step_leaves_all_state_and_gives_zeros(device):
    flag = Flag(torch.ones((), device=device))
    options = {**MOMENTUM, "flag": flag}
    grad, momentum, squares, target = (torch.rand(33, 40, device=device) for _ in range(4))
    grad[3, 3] = float("nan")
    before = momentum.clone(), squares.clone()
    chosen = Precondition("muon2", [squares], 0.95, 1e-10)
    U = normalized_momentum([grad], [momentum], **options, dtype=torch.float16, precondition=chosen)
    assert advance_momenta([grad], [momentum], [target], **options)
    normalize_(U, averages=[squares], beta2=0.95, eps=1e-8, flag=flag)
    rows = squares[:, :1].clone()
    normalize_(U, slice_averages=[rows], beta2=0.95, eps=1e-10, snap=False, flag=flag)
    assert not U.any()
    assert not target.any()
    assert torch.equal(momentum, before[0])
    assert torch.equal(squares, before[1])
    assert torch.equal(rows, squares[:, :1])


@pytest.mark.parametrize(
    "options",
    [
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
    ],
    ids=str,
)
def test_whole_steps(options, device, kernels_on):
    # the bound of `test_muon`; a small element of a row is divided by the root of its own square, twice
    bound = 5e-4 if options.get("normalize") != "adamuon" else 3e-3
    assert largest_difference(lambda p: muon(p, **options), device, torch.float32, kernels_on) < bound


def test_the_move_multiplies_rows_on_its_way(device):
    """Of a stack of blocks and a matrix, rows of 300 that blocks of a kernel cut anywhere."""
    base, other = torch.randn(2, 40, 300, device=device), torch.randn(20, 300, device=device)
    weights = [base[:, :20], other]
    U, factors = torch.randn(3, 20, 300, device=device), torch.rand(3, 20, 1, device=device)
    update = Update([], [U[:2], U[2]], row_factors=factors)
    wanted = [w - 0.5 * d for w, d in zip(weights, update.stretched, strict=True)]
    assert torch.equal(torch.cat([update.stretched[0], update.stretched[1][None]]), U * factors)
    assert move(Weights(weights), update.directions, Motion(0.5, 0.0, None, 1.0, False), factors, 300)
    assert all(torch.allclose(w, x, rtol=1e-6, atol=1e-6) for w, x in zip(weights, wanted, strict=True))
