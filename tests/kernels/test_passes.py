"""The passes over memory equal their torch twins, and change nothing where a step is skipped."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from muonsw.algorithms import base as twin
from muonsw.kernels import finite, momentum
from muonsw.kernels.common import DTYPES, stochastic_round
from muonsw.kernels.momentum import normalized_momentum, takes
from muonsw.kernels.move import Motion, Weights, move
from muonsw.kernels.tables import runs
from muonsw.orthogonalize import normalize
from muonsw.precision import mix
from muonsw.precision import stochastic_round as rounded

# Stacks, single matrices, odd sizes, huge, tiny and no scale at all.
SCALES = [1.0, 1e-25, 0.0, 1e30]


def problem(shape, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*s):
        return torch.randn(*s, generator=generator)

    grads = [draw(2, *shape), *(draw(*shape) * scale for scale in SCALES)]
    momenta = [draw(*g.shape) * float(g.abs().max()) for g in grads]
    return [g.to(device, dtype) for g in grads], [m.to(device, dtype) for m in momenta]


@triton.jit
def _round(x, out, step, key, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, stochastic_round(tl.load(x + place), tl.load(step), key, place, DTYPE))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter, of infinity times zero
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_is_the_twins_bit_for_bit(dtype, device):
    """For numbers of any size and sign, those that cannot be told from zero, and those that are none."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-30 if dtype == torch.float16 else -148, 17, (4096,), generator=generator)
    x = torch.ldexp(torch.randn(4096, generator=generator), powers)
    x[:7] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3895e38, -3.4e38])
    x, out = x.to(device), torch.empty(4096, device=device)
    step, key = torch.tensor(5.0, device=device), 77
    _round[(1,)](x, out, step, key, DTYPES[dtype], 4096)
    seed = mix(torch.tensor(5, dtype=torch.int32, device=device) ^ key)
    expected = rounded(x, dtype, seed)
    assert torch.equal(out.to(dtype).nan_to_num(1.5), expected.nan_to_num(1.5))
    assert torch.equal(out.to(dtype).isnan(), x.isnan())
    assert not torch.equal(expected, x.to(dtype))


def all_finite(grads):
    bad = torch.zeros((), device=grads[0].device)
    finite.find_bad(grads, bad)
    return bad == 0


def by_torch(grads, momenta, form, nesterov, maximize):
    grads = [-g if maximize else g for g in (g.float() for g in grads)]
    momenta = [m.to(torch.float32, copy=True) for m in momenta]
    twin.advance_momentum(form, momenta, grads, 0.95, None)
    ahead = [torch.empty_like(m) for m in momenta]
    twin.look_ahead(form, momenta, grads, 0.95, out=ahead)
    return momenta, ahead if nesterov else momenta


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["ema", "heavy_ball"])
@pytest.mark.parametrize("shape", [(60, 71), (1, 3)], ids=str)
def test_momentum_and_norm_are_the_twins(shape, form, nesterov, maximize, device):
    grads, momenta = problem(shape, device)
    after, ahead = by_torch(grads, momenta, form, nesterov, maximize)
    options = {"form": form, "beta": 0.95, "nesterov": nesterov, "maximize": maximize, "flag": None}
    batch = normalized_momentum(grads, momenta, **options, dtype=torch.float16)
    for found, expected in zip(momenta, after, strict=True):
        assert (found - expected).abs().max() <= 2**-22 * expected.abs().max()
    expected = torch.cat([normalize(a.cpu().reshape(-1, *shape)) for a in ahead]).to(device)
    # one rounding to float16 before the norm is divided out, one after it
    assert (batch.float() - expected).abs().max() <= 2 * 2.0**-11 * expected.abs().max()
    assert not batch[4].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_and_momenta(dtype, device):
    grads = [torch.randn(40, 56).to(device, dtype) for _ in range(3)]
    momenta = [torch.randn(40, 56).to(device, dtype) for _ in range(3)]
    after, ahead = by_torch(grads, momenta, "heavy_ball", False, False)
    options = {"form": "heavy_ball", "beta": 0.95, "nesterov": False, "maximize": False, "flag": None}
    batch = normalized_momentum(grads, momenta, **options, dtype=torch.float32)
    eps = torch.finfo(dtype).eps
    for found, expected in zip(momenta, after, strict=True):
        assert (found.float() - expected).abs().max() <= eps * expected.abs().max()
    expected = normalize(torch.stack(ahead))
    assert (batch - expected).abs().max() <= eps * expected.abs().max()


def test_layouts_without_a_kernel_are_refused(device):
    straight = torch.randn(2, 8, 6, device=device)
    stacks = [straight, torch.randn(2, 16, 6, device=device)[:, :8]]
    assert takes(stacks, stacks, torch.float16)
    assert not takes([straight[0], straight[0, :, :3]], stacks, torch.float16)
    assert not takes([straight, straight.mT.contiguous().mT], stacks, torch.float16)
    assert not takes(stacks, stacks, torch.float64)
    assert not takes([straight, straight.double()], stacks, torch.float16)


def test_runs_cover_a_tensor_in_order():
    base = torch.arange(4 * 64 * 32.0).view(4, 64, 32)
    for tensor in (base, base[:, 16:48], base[1:3, :, :]):
        flat = tensor.reshape(-1)
        found = runs([tensor])
        assert set(found.owners) == {0}
        assert sum(found.sizes) == tensor.numel()
        for address, size, position in zip(found.addresses, found.sizes, found.positions, strict=True):
            start = (address - base.data_ptr()) // 4
            assert torch.equal(base.view(-1)[start : start + size], flat[position : position + size])
    assert runs([base.mT]) is None


def test_any_number_of_matrices_is_one_launch(device, monkeypatch):
    """Only the first axis of a grid is longer than 65,535."""
    grids = []
    monkeypatch.setattr(momentum, "launch_on", lambda _device, _kernel, grid, *_, **__: grids.append(grid))
    stack = torch.zeros(70_000, 1, 1, device=device)
    options = {"form": "ema", "beta": 0.95, "nesterov": True, "maximize": False, "flag": None}
    normalized_momentum([stack], [stack.clone()], **options, dtype=torch.float16)
    assert grids == [(70_000,), (70_000,)]


def test_many_small_decays_are_not_rounded_to_one_side(device):
    """As in test_precision, by the kernel: the mean over the weights stays far below 2^-25 a step."""
    phi, steps = 2.0**-10 + 2.0**-25 - 2.0**-40, 200
    start = (torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 0.5).to(device)
    weight, zero = start.clone(), torch.zeros_like(start)
    for _ in range(steps):
        assert move(Weights([weight]), [zero], Motion(0.1, phi, None, 1.0, False))
    error = weight.double() / (start.double() * (1 - phi) ** steps) - 1
    assert abs(float(error.mean())) < 0.1 * steps * 2.0**-25


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_bad_entry_is_found_wherever_it_is(bad, dtype, device):
    grads = [torch.randn(n).to(device) for n in (1, 2048, 5000)] + [torch.randn(3, 5).to(device, dtype)]
    assert all_finite(grads)
    for grad in grads:
        for place in (0, grad.numel() // 2, grad.numel() - 1):
            old = grad.view(-1)[place].clone()
            grad.view(-1)[place] = bad
            assert not all_finite(grads)
            grad.view(-1)[place] = old
    assert all_finite([g * 1e30 if g.dtype == torch.float32 else g for g in grads])
