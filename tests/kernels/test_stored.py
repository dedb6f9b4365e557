"""State in 8 bits and in bfloat16: the kernels match their torch versions bit for bit."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw import AdamWSW, codecs
from muonsw.kernels import adamw, launch_on
from muonsw.kernels import stored as kernels
from muonsw.precision import Noise
from tests.common.problems import assert_same

LEVELS = {torch.int8: 127, torch.uint8: 255}


def numbers(rows, columns, device):
    """Magnitudes from 1e-9 to 1e9, some zeros, and a row of zeros."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=g) * torch.exp(5 * torch.randn(rows, columns, generator=g))
    x = torch.where(torch.rand(rows, columns, generator=g) < 0.05, 0.0, x)
    x[1] = 0
    return x.to(device)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(20, 512), (5, 1009), (70, 96)], ids=str)
def test_codes_and_decoded_values_match_the_torch_version(shape, dtype, noisy, device):
    x = numbers(*shape, device)
    x = x if dtype == torch.int8 else x.square()
    noise = Noise(torch.tensor(3.0, device=device), 77, 2**33 + 5) if noisy else None
    actual = []
    for encode in (lambda *a: kernels.encode(*a, LEVELS[dtype], noise, None),
                   lambda *a: codecs.encode(*a, noise, fused=False)):  # fmt: skip
        codes = torch.zeros(shape, dtype=dtype, device=device)
        scale = torch.zeros(x.shape[0], x[0].numel() // codecs.block_length(tuple(x.shape)), device=device)
        encode(x, codes, scale)
        actual.append((codes, scale))
    (codes, scale), (others, other_scale) = actual
    assert torch.equal(codes, others)
    assert torch.equal(scale, other_scale)
    assert codes.unique().numel() > 50
    assert torch.equal(kernels.decode(codes, scale, LEVELS[dtype]), codecs.decode(codes, scale, fused=False))
    if noisy:
        low = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]
        kernels.round_bfloat16(x, low[0], noise, None)
        codecs.round_bfloat16(x, low[1], noise, None, fused=False)
        assert torch.equal(*low)


def test_a_flag_prevents_writes_and_nan_is_stored(device):
    x = numbers(20, 512, device)
    x[3, 7] = torch.nan
    codes, scale = torch.ones(x.shape, dtype=torch.int8, device=device), torch.ones(20, 2, device=device)
    noise = Noise(torch.tensor(3.0, device=device), 77)
    low = torch.ones(x.shape, dtype=torch.bfloat16, device=device)
    for ok in (torch.tensor(False, device=device), torch.tensor(True, device=device)):
        kernels.encode(x, codes, scale, 127, noise, ok)
        kernels.round_bfloat16(x, low, noise, ok)
        assert torch.equal(codes == 1, torch.ones_like(codes, dtype=torch.bool)) is not bool(ok)
        assert (scale == 1).all() == (not ok)
        assert (low == 1).all() == (not ok)
    assert kernels.decode(codes, scale, 127).isnan().sum() == 256
    assert low.isnan().sum() == 1


SHAPES = [(16, 256), (5, 1009), (70, 96), (9, 512), (48,)]
FORMS = {
    "int8": {"state_dtype": "int8"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "bfloat16 weights": {"state_dtype": "int8", "dtype": torch.bfloat16},
    "cautious": {"state_dtype": "int8", "cautious": True, "maximize": True},
}


def of_shape(shape, device):
    return numbers(100, 1009, device).flatten()[-math.prod(shape) :].view(shape)


def after_steps(device, *, bad=None, dtype=torch.float32, **options):
    """Weights and state after three steps, the second with a NaN in gradient number `bad`."""
    params = [torch.nn.Parameter(of_shape(shape, device).sign().to(dtype)) for shape in SHAPES]
    optimizer = AdamWSW(params, lr=0.01, weight_decay=0.1, **options)
    for number in range(3):
        for place, param in enumerate(params):
            param.grad = (of_shape(param.shape, device).clamp(-1, 1) * (number + 1)).to(dtype)
            if number == 1 and place == bad:
                param.grad[0] = torch.nan
        optimizer.step()
    return [param.detach() for param in params], [optimizer.state[param] for param in params]


@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
@pytest.mark.parametrize("bad", [None, 1])
@pytest.mark.parametrize("form", FORMS)
def test_in_place_updates_of_encoded_state_equal_decoded_updates(form, bad, device, kernels_on, monkeypatch):
    kernels_on(True)
    monkeypatch.setattr(codecs, "position", lambda _: 2**33 + 5)  # as for a shard
    actual, calls = after_steps(device, bad=bad, **FORMS[form]), []
    monkeypatch.setattr(codecs, "update_in_place", lambda _, items, __: calls.append(True) or items)
    expected = after_steps(device, bad=bad, **FORMS[form])
    assert_same(actual[0], expected[0])
    for pair in zip(actual[1], expected[1], strict=True):
        assert_same(*pair)
    assert calls  # the in-place update was possible


@pytest.mark.parametrize("form", FORMS)
def test_kernels_detect_state_that_is_not_aligned(form, device, kernels_on, monkeypatch):
    """They would read sixteen bytes at a time, which fails on a GPU but not in the interpreter."""
    kernels_on(True)
    aligned = []

    def launch(*args, **options):
        aligned.append(options["ALIGNED"])
        launch_on(*args, **options)

    monkeypatch.setattr(adamw, "launch_on", launch)
    dtype, options = FORMS[form].get("dtype", torch.float32), {k: v for k, v in FORMS[form].items() if k != "dtype"}
    param = torch.nn.Parameter(of_shape((16, 256), device).sign().to(dtype))
    param.grad = torch.ones_like(param)
    optimizer = AdamWSW([param], lr=0.01, **options)
    optimizer.step()
    assert all(aligned)
    for key, value in optimizer.state[param].items():
        before = value.data
        value.data = value.new_empty(value.numel() + 1)[1:].view_as(value).copy_(value)
        aligned.clear()
        optimizer.step()
        assert aligned, key
        assert not any(aligned), key
        value.data = before
