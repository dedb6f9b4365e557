"""State in 8 bits and in bfloat16: error and memory."""

from functools import partial
from itertools import permutations

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, MuonSW
from muonsw.codecs import block_length, decode, encode
from muonsw.precision import Noise
from tests.common.cuda import OnAGPU
from tests.common.problems import assert_same, run, tensors_of

KINDS = {"muon": partial(MuonSW, ns_dtype="float32"), "adamw": AdamWSW}
LEVELS = {torch.int8: 127, torch.uint8: 255}


def stored(x, dtype=torch.int8, noise=None):
    codes, scale = (
        torch.zeros(x.shape, dtype=dtype),
        torch.zeros(x.shape[0], x[0].numel() // block_length(tuple(x.shape))),
    )
    encode(x, codes, scale, noise)
    return codes, scale


def wide_and_narrow(rows=16, columns=512, seed=0):
    """Numbers from 1e-6 to 1e3, some of them zero."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.exp(3 * torch.randn(rows, columns, generator=g))
    return torch.where(torch.rand(rows, columns, generator=g) < 0.05, 0.0, x)


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_a_decoded_number_is_one_of_its_two_neighbours(dtype, noisy):
    """With t = |x|/s between (k/N)^4 and ((k+1)/N)^4: half that gap away at most, or all of it with noise."""
    x = wide_and_narrow() if dtype == torch.int8 else wide_and_narrow().square()
    noise = Noise(torch.tensor(3.0), 7) if noisy else None
    codes, scale = stored(x, dtype, noise)
    actual, x, s = decode(codes, scale).double(), x.double(), scale.double().repeat_interleave(256, 1)
    below = (LEVELS[dtype] * (x.abs() / s) ** 0.25).floor().clamp(max=LEVELS[dtype] - 1)
    gap = s * (((below + 1) / LEVELS[dtype]) ** 4 - (below / LEVELS[dtype]) ** 4)
    most = gap * (1 if noisy else 0.5) * (1 + 1e-5) + 1e-6 * x.abs()  # float32 in between
    smallest = s * LEVELS[dtype] ** -4.0 * (1 + 1e-5)
    most = torch.maximum(most, smallest) if dtype == torch.uint8 else most  # squares never become zero
    assert ((actual - x).abs() <= most).all()
    assert torch.equal(actual == 0, x == 0) if dtype == torch.uint8 else (actual[x == 0] == 0).all()
    largest = x.abs().view(16, 2, 256).amax(-1)
    assert torch.equal(actual.abs().view(16, 2, 256).amax(-1), largest)


def test_noise_keeps_the_mean():
    """The mean of 4,000 roundings is within five standard errors, whatever the number; rounded to nearest it is not."""
    x = torch.linspace(1e-4, 1, 256).repeat(16, 1)
    every = torch.stack([decode(*stored(x, noise=Noise(torch.tensor(float(n)), 7))) for n in range(250)])
    every = every.view(4000, 256)
    error = (every.double().mean(0) - x[0]).abs()
    assert (error <= 5 * every.double().std(0) / 4000**0.5 + 1e-7).all()
    assert ((decode(*stored(x))[0] - x[0]).abs() > 10 * error).float().mean() > 0.5


def problem(name, **options):
    """A weight in a layout with gaps, and one that is two matrices for Muon."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(256, 32).t() / 16), nn.Parameter(torch.randn(64, 96) / 10)]
    fused = {"split_sizes": (16, 48)} if name == "muon" else {}
    groups = [{"params": params[:1]}, {"params": params[1:], **fused}]
    return params, KINDS[name](groups, lr=0.01, weight_decay=0.1, **options)


def test_states_of_torch_are_encoded_on_load_and_decoded_again():
    params = [nn.Parameter(wide_and_narrow()), nn.Parameter(torch.randn(4))]
    theirs = torch.optim.AdamW(params, lr=0.01)
    run(theirs, params, 3)
    ours = AdamWSW(params, lr=0.01, state_dtype="int8", peak_lr=0.01)
    ours.load_state_dict(theirs.state_dict())
    state, float32 = ours.state[params[0]], theirs.state[params[0]]
    assert_same({"codes": state["exp_avg"], "scale": state["exp_avg_scale"]},
         dict(zip(("codes", "scale"), stored(float32["exp_avg"]), strict=True)))  # fmt: skip
    assert torch.equal(ours.state[params[1]]["exp_avg"], theirs.state[params[1]]["exp_avg"])
    saved = ours.state_dict()
    saved["param_groups"][0]["state_dtype"] = "float32"
    back = AdamWSW(params, lr=0.01)
    back.load_state_dict(saved)
    assert back.state[params[0]].keys() == {"exp_avg", "exp_avg_sq", "step"}
    assert torch.equal(back.state[params[0]]["exp_avg_sq"], decode(*stored(float32["exp_avg_sq"], torch.uint8)))
    run(back, params, 1)


FORMS = ["int8", "bfloat16", "float32"]


@pytest.mark.parametrize(("before", "after"), list(permutations(FORMS, 2)))
def test_a_load_may_change_state_dtype_mid_run(before, after):
    params, optimizer = problem("adamw", state_dtype=before)
    run(optimizer, params, 1)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["state_dtype"] = after
    optimizer.load_state_dict(saved)
    expected = {"int8": torch.int8, "bfloat16": torch.bfloat16}.get(after, torch.float32)
    assert optimizer.state[params[0]]["exp_avg"].dtype == expected
    optimizer.step()


def test_codes_without_scales_are_refused():
    params, optimizer = problem("adamw", state_dtype="int8")
    run(optimizer, params, 1)
    saved = optimizer.state_dict()
    del saved["state"][0]["exp_avg_scale"]
    with pytest.raises(ValueError, match="its scales exp_avg_scale are missing"):
        problem("adamw", state_dtype="int8")[1].load_state_dict(saved)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_chunk_size_does_not_matter(name):
    results = []
    for chunk_bytes in (None, 256, 40_000):
        params, optimizer = problem(name, state_dtype="int8", chunk_bytes=chunk_bytes)
        run(optimizer, params, 3)
        results.append(tensors_of(optimizer, params))
        assert all(tensor.is_contiguous() for tensor in optimizer.state[params[0]].values())
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_averages_lose_no_small_contributions(dtype, close):
    """Squares become 100 times smaller; to nearest, their average (beta2=0.999) would end 20% too large."""
    exact, sizes = 0.0, [1.0] * 50 + [0.1] * 450
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = AdamWSW([param], lr=0.0, betas=(0.9, 0.999), state_dtype=dtype)
    for size in sizes:
        param.grad = torch.full_like(param, size)
        param.grad[:, 0] = 1  # keeps the scale of each block
        optimizer.step()
        exact = 0.999 * exact + 0.001 * size**2
    state = optimizer.state[param]
    squares = decode(state["exp_avg_sq"], state["exp_avg_sq_scale"]) if dtype == "int8" else state["exp_avg_sq"]
    assert squares[:, 1:].double().mean().item() == pytest.approx(exact, rel=close)


def test_pending_copies_to_the_host_are_waited_for(monkeypatch):
    """Even if no group offloads any more: saving and loading then move the state back to the parameters' device."""
    waited = []
    monkeypatch.setattr("muonsw.optimizer.wait_for_host", waited.append)
    optimizer, param = AdamWSW([nn.Parameter(torch.ones(4, 4))], lr=0.1), torch.ones(4, 4).as_subclass(OnAGPU)
    optimizer.state[param] = {"exp_avg": torch.zeros(4, 4)}
    optimizer._wait_for_host()
    assert waited == [param.device]
