"""Low-precision weights decay, state keeps its dtype, and rounding is unbiased."""

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from muonsw import SGDSW, MuonSW, machine
from muonsw.machine import product_dtype
from muonsw.precision import mix, stochastic_round, uniform_hash
from tests.common.problems import OPTIMIZERS, flag_on_device, matrices, run

LOW = [torch.bfloat16, torch.float16]


def seed(number):
    return torch.tensor(number, dtype=torch.int32)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", [1.0 + 1e-3, -0.3, 3.3e-6, 1234.567])
def test_stochastic_rounding_keeps_the_mean_and_picks_neighbours(dtype, value):
    x = torch.full((200_000,), value)
    rounded = stochastic_round(x, dtype, seed(7)).float()
    info = torch.finfo(dtype)
    ulp = max(2.0 ** math.floor(math.log2(abs(value))), info.smallest_normal) * info.eps
    assert rounded.unique().numel() <= 2
    assert (rounded - x).abs().max() <= ulp
    # the mean of n coin flips between neighbours an ulp apart, within five standard errors
    assert abs(float(rounded.double().mean()) - float(x[0])) <= 5 * 0.5 * ulp / math.sqrt(x.numel())


@pytest.mark.parametrize("dtype", LOW)
def test_representable_values_and_non_finite_ones_stay(dtype):
    exact = torch.randn(1000).to(dtype).float()
    exact[:6] = torch.tensor([0.0, -0.0, 1.0, 2.0, float("inf"), -float("inf")])
    assert torch.equal(stochastic_round(exact, dtype, seed(0)).float(), exact)
    assert stochastic_round(torch.tensor([float("nan")]), dtype, seed(3)).isnan().all()


def test_each_weight_and_each_chunk_has_its_own_noise():
    params = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    SGDSW(params, lr=2**-9, weight_decay=0.0, chunk_bytes=64).step()  # to the middle between two neighbours
    parts = [tuple(part.tolist()) for param in params for part in param.detach().split(32)]
    assert len(set(parts)) == 4


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_many_small_decays_of_each_dtype_in_a_group_shrink_it_as_they_should(algorithm):
    decays = 200  # by 0.001 each, which rounding to nearest in bfloat16 would undo
    tolerances = {torch.float32: decays * 2**-24, torch.bfloat16: 0.01, torch.float64: 1e-12, torch.float16: 0.01}
    params = [nn.Parameter(torch.ones(32, 32, dtype=dtype)) for dtype in tolerances]
    optimizer = OPTIMIZERS[algorithm](params, lr=0.01, weight_decay=0.1)
    for _ in range(decays):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    for param, tolerance in zip(params, tolerances.values(), strict=True):
        assert param.detach().double().mean().item() == pytest.approx((1 - 1e-3) ** decays, rel=tolerance)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [*((name, {}) for name in OPTIMIZERS), ("muon", {"momentum_form": "heavy_ball"}), ("sgd", {"fused": False})],
)
def test_float64_keeps_its_digits_under_the_device_flag(algorithm, options, monkeypatch):
    def trained():
        params = matrices((4, 6), dtype=torch.float64)
        extra = {"momentum": 0.9} if algorithm == "sgd" else {}
        run(OPTIMIZERS[algorithm](params, lr=0.05, weight_decay=0.3, **extra, **options), params, 20)
        return params[0].detach()

    host = trained()
    monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    torch.testing.assert_close(trained(), host, rtol=1e-11, atol=1e-13)


def test_noise_is_a_known_hash_of_seed_and_place():
    """Wellons's lowbias32, as in the kernels; a part of a tensor gets the noise of its position in the whole."""

    def lowbias32(x):
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ x >> 16

    numbers = torch.tensor([0, 1, 12345, -1, -(2**31), 2**31 - 1], dtype=torch.int32)
    assert [n & 0xFFFFFFFF for n in mix(numbers).tolist()] == [lowbias32(n & 0xFFFFFFFF) for n in numbers.tolist()]
    whole = uniform_hash(torch.Size((40,)), torch.tensor(3, dtype=torch.int32))
    for origin in (1, 5, 30):
        part = uniform_hash(torch.Size((10,)), torch.tensor(3, dtype=torch.int32), origin=origin)
        assert torch.equal(part, whole[origin : origin + 10])


def test_the_fastest_accurate_dtype_of_products_is_chosen(monkeypatch):
    cpu, mps = torch.device("cpu"), torch.device("mps")
    assert product_dtype("auto", torch.float64, cpu) == torch.float64
    assert product_dtype("auto", torch.float32, mps) == torch.float32
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(machine, "fast_bfloat16", lambda fast=fast: fast)
        assert product_dtype("auto", torch.float32, cpu) == dtype
    assert product_dtype("float16", torch.float32, cpu) == torch.float16
    gpus = ((True, 90, torch.bfloat16), (False, 75, torch.float16), (False, 61, torch.float32))
    monkeypatch.setattr(machine, "_fastest", machine._fastest.__wrapped__)  # without its cache
    for fast, capability, dtype in gpus:
        monkeypatch.setattr(machine, "gpu_fast_bfloat16", lambda _, fast=fast: fast)
        monkeypatch.setattr(machine, "gpu_capability", lambda _, capability=capability: capability)
        assert product_dtype("auto", torch.float32, torch.device("cuda", 0)) == dtype


def test_cpus_told_to_avoid_bfloat16_units_compute_in_float32():
    """In another process, because these tests may pretend to run on another machine."""
    code = (
        "import os; from muonsw.machine import fast_bfloat16\n"
        "for isa in ('AVX2', 'AVX512_CORE'):\n"
        "    os.environ['ONEDNN_MAX_CPU_ISA'] = isa\n"
        "    assert fast_bfloat16.__wrapped__() is False"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("algorithm", ["muon", "sgd"])
def test_many_small_decays_are_not_rounded_to_one_side(algorithm):
    """A step of decay rounds each weight once, to either side; `1 - phi` in float32 always rounds to the same side.

    `1 - phi` is about halfway between two float32 numbers, so each step would lose 2^-25 of every weight. With
    rounding to either side, the mean error of many weights stays below a hundredth of that.
    """
    phi, steps = 2.0**-10 + 2.0**-25 - 2.0**-40, 600
    start = torch.rand(32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add_(0.5).float()
    param = nn.Parameter(start.clone())
    group = {"params": [param], "algorithm": algorithm, "momentum": 0.5}
    optimizer = MuonSW([group], lr=1e-3, weight_decay=phi, decay="fixed", ns_steps=1)
    param.grad = torch.zeros_like(param)
    for _ in range(steps):
        optimizer.step()
    error = param.detach().double() / (start.double() * (1 - phi) ** steps) - 1
    assert abs(float(error.mean())) < 0.01 * steps * 2.0**-25
