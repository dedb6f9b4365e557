"""What kernels make of directions is what the members of the `normalize` slot make, state included."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.kernels.momentum import Precondition, advance_momenta, normalized_momentum
from muonsw.kernels.normalize import slice_factors
from muonsw.nonfinite import Flag
from muonsw.slots import ADAMUON, MUON_PLUS, NORMUON
from tests.kernels.test_momentum import OPTIONS


def directions(shape, dtype, device):
    """Three matrices with rows of very different lengths, some of them zero; the last is zero throughout."""
    U = torch.randn(3, *shape) / shape[1] ** 0.5 * torch.linspace(0.01, 2, shape[0])[:, None]
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
def test_normuon(shape, by_row, snap, dtype, device):
    U = directions(shape, dtype, device)
    options = {**NORMUON.defaults, "snap": snap, "axis": "rows" if by_row else "longer"}
    average = torch.rand(3, *((shape[0], 1) if by_row else (1, shape[1])), device=device)
    average[1] = 0
    kept, wide = stacks(average), U.float()
    for _ in range(2):
        expected, state = NORMUON.apply(options, wide, {"average": average})
        average = state["average"]
        factors = slice_factors(U, slice_averages=kept, by_row=by_row, beta2=0.95, eps=1e-10, snap=snap)
        assert torch.allclose(joined(kept), average, rtol=1e-5, atol=1e-9)
        assert torch.allclose(U * factors, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(33, 300), (40, 20)], ids=str)
def test_adamuon_and_muon_plus(shape, dtype, device):
    U = directions(shape, dtype, device)
    average = torch.rand(3, *shape, device=device)
    kept, found = stacks(average), U.clone()
    expected, state = ADAMUON.apply(ADAMUON.defaults, U.float(), {"average": average})
    factors = slice_factors(found, averages=kept, beta2=0.95, eps=1e-8)
    assert torch.allclose(joined(kept), state["average"], rtol=1e-5, atol=1e-9)
    # divided elements are rounded
    assert torch.allclose(found * factors, expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    expected, _ = MUON_PLUS.apply({}, U.float(), {})
    assert torch.allclose(U * slice_factors(U), expected, rtol=1e-5, atol=1e-5)


def test_a_skipped_step_leaves_all_state_and_gives_zeros(device):
    flag = Flag(torch.ones((), device=device))
    options = {**OPTIONS, "flag": flag}
    grad, momentum, squares, target = (torch.rand(33, 40, device=device) for _ in range(4))
    grad[3, 3] = float("nan")
    before = momentum.clone(), squares.clone()
    chosen = Precondition("muon2", [squares], 0.95, 1e-10)
    U = normalized_momentum([grad], [momentum], **options, dtype=torch.float16, precondition=chosen)
    assert advance_momenta([grad], [momentum], [target], **options)
    slice_factors(U, averages=[squares], beta2=0.95, eps=1e-8, flag=flag)
    rows = squares[:, :1].clone()
    slice_factors(U, slice_averages=[rows], beta2=0.95, eps=1e-10, snap=False, flag=flag)
    assert not U.any()
    assert not target.any()
    assert torch.equal(momentum, before[0])
    assert torch.equal(squares, before[1])
    assert torch.equal(rows, squares[:, :1])
