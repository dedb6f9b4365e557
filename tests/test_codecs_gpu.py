"""State in 8 bits, in bfloat16 and in host memory on a CUDA device. Run by `make test-gpu`."""

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, MuonSW, kernels, machine
from muonsw.codecs import block_length, decode, encode
from muonsw.precision import Noise
from tests.common.cuda import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]

KINDS = {
    "muon": (MuonSW, {}),
    "muon2": (MuonSW, {"precondition": "muon2", "orthogonalizer": "newton_schulz"}),
    "adamw": (AdamWSW, {}),
    "lion": (AdamWSW, {"algorithm": "lion"}),
    "soap": (MuonSW, {"algorithm": "soap", "precondition_frequency": 2}),
}
FORMS = [{"state_dtype": "int8"}, {"state_dtype": "bfloat16"}, {"offload": True},
         {"state_dtype": "int8", "offload": True}, {"state_dtype": "bfloat16", "offload": True}]  # fmt: skip


def problem(name, shapes=((64, 256), (64, 256), (96, 128), (256, 64), (8, 8)), **options):
    kind, own = KINDS[name]
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device="cuda") / 16) for shape in shapes]
    return params, kind([{"params": params, **own}], lr=0.01, weight_decay=0.1, **options)


def steps(params, optimizer, count, first=0):
    for step in range(first, first + count):
        generator = torch.Generator("cuda").manual_seed(step)
        for param in params:
            noise = torch.randn(param.shape, generator=generator, device="cuda")
            param.grad = noise * 0.1 + param.detach() if param.grad is None else param.grad.copy_(noise)
        optimizer.step()


def assert_same_states(optimizer, params, other, others):
    states, others_states = optimizer.state_dict()["state"], other.state_dict()["state"]
    for key, state in states.items():
        assert state.keys() == others_states[key].keys()
        for name, value in state.items():
            assert torch.equal(value.cuda(), others_states[key][name].cuda()), name
    assert all(map(torch.equal, params, others))


def test_codes_are_the_same_on_every_device():
    x = torch.randn(64, 512) * torch.exp(3 * torch.randn(64, 512))
    actual = []
    for device in ("cpu", "cuda"):
        codes, scale = (
            torch.zeros(x.shape, dtype=torch.int8, device=device),
            torch.zeros(x.shape[0], x[0].numel() // block_length(tuple(x.shape)), device=device),
        )
        encode(x.to(device), codes, scale, Noise(torch.tensor(5.0, device=device), 7, 9))
        actual.append((codes.cpu(), scale.cpu(), decode(codes, scale).cpu()))
    assert all(map(torch.equal, *actual))


@pytest.mark.parametrize("chunk_bytes", [None, 70_000])
@pytest.mark.parametrize("state_dtype", ["auto", "int8", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_state_in_host_memory_makes_the_same_bits(name, state_dtype, chunk_bytes):
    options = {"state_dtype": state_dtype, "chunk_bytes": chunk_bytes, "replay": False}
    params, here = problem(name, **options)
    others, away = problem(name, **options, offload=True)
    for first in (0, 3):
        steps(params, here, 3, first)
        steps(others, away, 3, first)
    assert_same_states(here, params, away, others)
    tensors = [value for state in away.state.values() for value in state.values() if value.dim()]
    assert all(value.is_pinned() and value.device.type == "cpu" for value in tensors)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["muon", "adamw", "soap"])
def test_a_bad_gradient_changes_nothing(name, form):
    params, optimizer = problem(name, **form)
    steps(params, optimizer, 2)
    torch.cuda.synchronize()
    before = [{key: value.clone() for key, value in optimizer.state[param].items()} for param in params]
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    torch.cuda.synchronize()
    for param, state in zip(params, before, strict=True):
        for key, value in state.items():
            assert torch.equal(value, optimizer.state[param][key]), key


@pytest.mark.parametrize("form", FORMS[:2], ids=str)
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_replayed_steps_make_the_same_bits(name, form, monkeypatch):
    monkeypatch.setattr(kernels, "TORCH_BELOW", 0)  # torch's fused AdamW is never captured, and rounds differently
    params, eager = problem(name, **form, replay=False)
    others, replayed = problem(name, **form, replay=True)
    steps(params, eager, 8)
    steps(others, replayed, 8)
    assert replayed._replay._replays >= 1
    assert_same_states(eager, params, replayed, others)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_step_never_waits_for_the_device(name, form):
    params, optimizer = problem(name, **form)
    steps(params, optimizer, 2)
    before = params[0].detach().clone()
    with no_waiting():
        optimizer.step()
    assert not torch.equal(params[0], before)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_saved_run_resumes_bit_for_bit(name, form, tmp_path):
    params, optimizer = problem(name, **form)
    steps(params, optimizer, 3)
    torch.save((params, optimizer.state_dict()), tmp_path / "saved")
    steps(params, optimizer, 3, first=3)
    weights, saved = torch.load(tmp_path / "saved", weights_only=True, map_location="cpu")
    others, again = problem(name, **form)
    for param, weight in zip(others, weights, strict=True):
        param.data.copy_(weight)
        param.grad = torch.zeros_like(param)  # `steps` then reuses it
    again.load_state_dict(saved)
    steps(others, again, 3, first=3)
    assert_same_states(optimizer, params, again, others)


@pytest.mark.parametrize(("form", "bytes_an_element"), [
    ({}, 4), ({"state_dtype": "bfloat16"}, 2), ({"state_dtype": "int8"}, 1.02), ({"offload": True}, 0),
])  # fmt: skip
def test_state_takes_the_documented_memory_of_the_device(form, bytes_an_element):
    """Between steps only weights, gradients and state remain; during one, at most ten times `chunk_bytes` more."""
    shapes, chunk = ((1024, 4096),) * 8, 2**25
    torch.cuda.empty_cache()  # the allocator may hand out larger blocks than asked for, and counts all of them
    before = torch.cuda.memory_allocated()
    params, optimizer = problem("muon", shapes, chunk_bytes=chunk, replay=False, **form)
    for param in params:
        param.grad = torch.randn_like(param)
    weights = torch.cuda.memory_allocated() - before
    optimizer.step()
    torch.cuda.synchronize()
    elements = sum(param.numel() for param in params)
    assert torch.cuda.memory_allocated() - before - weights <= (bytes_an_element + 0.01) * elements + 2**16
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - weights - bytes_an_element * elements
    print(f"{form}: {peak / 2**20:.0f} MiB on top of weights, gradients and state; a chunk has {chunk / 2**20:.0f}")
    assert peak <= 10 * chunk


def test_a_group_that_stops_offloading_saves_its_latest_state():
    params, optimizer = problem("adamw", ((4096, 4096),), offload=True)
    steps(params, optimizer, 2)
    optimizer.param_groups[0]["offload"] = False
    saved = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items()}
    torch.cuda.synchronize()
    assert all(torch.equal(saved[key], value) for key, value in optimizer.state[params[0]].items())
