"""The kernels that move and round weights, and the check for finite gradients, match torch operations."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from muonsw.kernels import finite
from muonsw.kernels.common import DTYPES, stochastic_round
from muonsw.kernels.move import Weights, move
from muonsw.precision import mix
from muonsw.precision import stochastic_round as rounded
from muonsw.work import StepContext


@triton.jit
def _round(x, out, step, key, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, stochastic_round(tl.load(x + place), tl.load(step), key, place, DTYPE))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, of infinity times zero
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_equals_the_torch_version(dtype, device):
    """For numbers of any size and sign, numbers that round to zero, infinities and NaN."""
    powers = torch.randint(-30 if dtype == torch.float16 else -148, 17, (4096,))
    x = torch.ldexp(torch.randn(4096), powers)
    x[:7] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38, -3.4e38])
    x, out = x.to(device), torch.empty(4096, device=device)
    step, key = torch.tensor(5.0, device=device), 77
    _round[(1,)](x, out, step, key, DTYPES[dtype], 4096)
    seed = mix(torch.tensor(5, dtype=torch.int32, device=device) ^ key)
    expected = rounded(x, dtype, seed)
    assert torch.equal(out.to(dtype).nan_to_num(1.5), expected.nan_to_num(1.5))
    assert torch.equal(out.to(dtype).isnan(), x.isnan())
    assert not torch.equal(expected, x.to(dtype))


def test_rounding_many_small_decays_is_unbiased(device):
    """The mean error over the weights stays far below 2^-25 per step, as in test_precision."""
    phi, steps = 2.0**-10 + 2.0**-25 - 2.0**-40, 200
    start = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 0.5).to(device)
    weight, zero = start.clone(), torch.zeros_like(start)
    for _ in range(steps):
        assert move(Weights([weight]), [zero], 1.0, False, StepContext(0.1, phi, 0))
    error = weight.double() / (start.double() * (1 - phi) ** steps) - 1
    assert abs(float(error.mean())) < 0.1 * steps * 2.0**-25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_columns_move_like_matrices_without_gaps(dtype, device):
    fused, U = torch.randn(33, 180).to(device, dtype), torch.randn(3, 33, 60, device=device)
    counters, keys = [torch.tensor(5.0, device=device)] * 3, [1, 2, 3]
    rounding = (counters, keys) if dtype == torch.bfloat16 else ()
    others = [block.clone() for block in fused.split(60, dim=1)]
    for weights in (list(fused.split(60, dim=1)), others):
        assert move(Weights(weights, *rounding), list(U), 1.0, False, StepContext(0.5, 0.25, 0))
    assert torch.equal(fused, torch.cat(others, dim=1))


@pytest.mark.parametrize(("rows", "columns"), [(20, 300), (3000, 3), (7, 5000), (1, 50), (50, 1)])
@pytest.mark.parametrize("by_row", [True, False])
def test_factors_of_rows_and_columns(by_row, rows, columns, device):
    U, stack = torch.randn(3, rows, columns, device=device), torch.randn(2, 2 * rows, columns, device=device)[:, :rows]
    weights = [stack if rows * columns > 1024 else stack.contiguous(), torch.randn(rows, columns, device=device)]
    factors = torch.rand(3, *((rows, 1) if by_row else (1, columns)), device=device).expand_as(U)
    expected = [w - 0.5 * d for w, d in zip(weights, [(factors * U)[:2], (factors * U)[2]], strict=True)]
    assert move(Weights(weights), [U[:2], U[2].clone()], 1.0, False, StepContext(0.5, 0.0, 0), factors)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_non_finite_element_is_found_anywhere(bad, dtype, device):
    def all_finite(grads):
        flag = torch.zeros((), device=device)
        finite.find_bad(grads, flag)
        return flag == 0

    grads = [torch.randn(n).to(device) for n in (1, 2048, 5000)] + [torch.randn(3, 5).to(device, dtype)]
    assert all_finite(grads)
    for grad in grads:
        for place in (0, grad.numel() // 2, grad.numel() - 1):
            old = grad.view(-1)[place].clone()
            grad.view(-1)[place] = bad
            assert not all_finite(grads)
            grad.view(-1)[place] = old
    assert all_finite([g * 1e30 if g.dtype == torch.float32 else g for g in grads])
