"""Telemetry changes nothing, samples when it should, and refuses mistakes."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from muonsw import (
    ALGORITHMS,
    AdamWSW,
    MuonSW,
    NonFiniteGradientError,
    NonFiniteGradientWarning,
    Telemetry,
)
from tests.common.problems import assert_same, matrices, run, set_gradients
from tests.family.members import OPTIONS
from tests.telemetry.float64_telemetry import Step, assert_values


def groups_under(algorithm, params):
    groups = [{"params": params[:2]}, {"params": params[2:], "matrix": "stack"}]
    return MuonSW([{**g, "algorithm": algorithm, "momentum": 0.9} for g in groups], lr=0.02, weight_decay=0.3)


BUILDS = {name: partial(groups_under, name) for name in ALGORITHMS}
BUILDS["cautious"] = lambda params: MuonSW(params, lr=0.02, weight_decay=0.3, cautious=True, matrix="stack")
BUILDS |= {name: partial(MuonSW, lr=0.02, matrix="stack", **options) for name, options in OPTIONS.items()}
BUILDS["int8"] = partial(AdamWSW, lr=0.02, state_dtype="int8")
BUILDS |= {f"torch {kind.__name__}": partial(kind, lr=0.02) for kind in (torch.optim.AdamW, torch.optim.SGD)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", BUILDS)
def test_weights_and_state_are_the_same_with_and_without(build, dtype):
    def trained(watched):
        params = matrices((12, 8), (64, 96), (3, 6, 4), dtype=dtype)
        optimizer = BUILDS[build](params)
        if watched:
            Telemetry(optimizer, every=2, spectral_norm=True, condition=True)
        run(optimizer, params, 5)
        state = [value for p in params for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        return params + state, [p.grad for p in params]

    before = torch.get_rng_state()
    (left, grads), (right, untouched) = trained(True), trained(False)
    assert_same(left, right)
    assert_same(grads, untouched)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiled_step_is_measured_and_stays_the_same():
    def trained(watched):
        torch._dynamo.reset()
        params = matrices((8, 8), (8, 8))
        optimizer = MuonSW(params, lr=0.02, weight_decay=0.3, ns_dtype="float32", ns_steps=1)
        telemetry = Telemetry(optimizer, every=3) if watched else None
        step = torch.compile(optimizer.step, backend="eager")
        for number in range(6):
            set_gradients(params, number)
            taken = Step(optimizer, params, step)
        return params, telemetry, taken

    params, telemetry, taken = trained(True)
    assert [record["step"] for record in telemetry.records] == [1, 3, 6]
    assert_values(telemetry.last["all"], taken.expected([0.006] * 2))
    assert_same(params, trained(False)[0])


def test_when_it_samples_and_which_records_it_keeps():
    params, seen = matrices((4, 4)), []
    optimizer = MuonSW(params, lr=0.02)
    with Telemetry(optimizer, every=3, keep=2, sink=seen.append, parameters=False) as telemetry:
        assert telemetry.last is None
        due = []
        for number in range(7):
            due.append(telemetry.due)
            run(optimizer, params, 1, start=number)
    run(optimizer, params, 3)
    assert [record["step"] for record in telemetry.records] == [3, 6]
    assert [record["step"] for record in seen] == [1, 3, 6]
    assert all("parameters" not in record for record in seen)
    assert due == [True, False, True, False, False, True, False]
    assert telemetry.step == 7
    assert not optimizer._optimizer_step_pre_hooks


def test_a_resumed_run_has_the_records_of_the_uninterrupted_one():
    def records(stop):
        params = matrices((6, 4), (3, 4, 4))
        groups = [{"params": params[:1]}, {"params": params[1:], "matrix": "stack"}]
        optimizer = MuonSW(groups, lr=0.02, ns_dtype="float32")
        telemetry = Telemetry(optimizer, every=2, spectral_norm=True)
        run(optimizer, params, stop)
        actual = telemetry.records
        if stop < 9:
            other = MuonSW(copy.deepcopy(groups), lr=0.02, ns_dtype="float32")
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            resumed = [p for group in other.param_groups for p in group["params"]]
            telemetry = Telemetry(other, every=2, start_step=stop, spectral_norm=True)
            run(other, resumed, 9 - stop, start=stop)
            actual += telemetry.records
        return actual

    assert records(9) == records(5) == records(4)


@pytest.mark.parametrize("build", [MuonSW, torch.optim.AdamW])
def test_the_step_torch_takes_to_allocate_state_is_not_counted(build):
    """Its gradients and learning rate are zero; the first step of a warmup from zero has nonzero gradients."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = build(model.parameters(), lr=0.02)
    telemetry = Telemetry(optimizer, every=1)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    assert telemetry.step == 0
    assert telemetry.records == []
    warm = build(model.parameters(), lr=0.0)
    telemetry = Telemetry(warm, every=1)
    set_gradients([model.weight], 0)
    warm.step()
    assert telemetry.last["step"] == 1


def test_a_skipped_step_is_reported_differently_from_an_update_of_zero():
    params = matrices((6, 4), (5,))
    optimizer = MuonSW([{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}], lr=0.02)
    telemetry = Telemetry(optimizer, every=1)
    run(optimizer, params, 2)
    before = telemetry.last
    set_gradients(params, 2)
    params[0].grad[0, 0] = math.nan
    weights = torch.cat([p.detach().flatten() for p in params]).double()
    with pytest.warns(NonFiniteGradientWarning):
        optimizer.step()
    record = telemetry.last
    assert (before["skipped"], before["was_skipped"]) == (0, False)
    assert (record["skipped"], record["was_skipped"], record["step"]) == (1, True, 3)
    assert record["all"]["weight_rms"] == pytest.approx(weights.square().mean().sqrt().item())
    for values in (record["all"], record["decayed"], record["parameters"]["parameter 0 of group 0"]):
        assert all(
            value is None for key, value in values.items() if key not in ("weight_rms", "lr", "peak_lr", "numel")
        )
    assert (record["all"]["lr"], record["decayed"]["peak_lr"]) == pytest.approx((0.02, 0.02))
    assert record["all"].keys() >= before["all"].keys() - {"defect"}
    set_gradients(params, 3)
    optimizer.step()
    assert telemetry.last["skipped"] == 1
    assert telemetry.last["all"]["update_rms"] > 0
    telemetry.detach()
    with Telemetry(optimizer, every=1) as late:
        run(optimizer, params, 1)
    assert (late.last["skipped"], late.last["step"]) == (0, 1)  # steps before it was attached do not count


@pytest.mark.parametrize("cautious", [False, True])  # cautious decay spares only weights that move outward
def test_an_update_of_zero_is_not_a_skip(cautious):
    params = matrices((6, 4))
    optimizer = MuonSW(params, lr=0.02, weight_decay=0.5, cautious=cautious)
    telemetry = Telemetry(optimizer, every=1)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    values = telemetry.last["all"]
    assert values["update_rms"] == 0
    assert values["decay"] == pytest.approx(0.01)
    assert values["applied_rms"] == pytest.approx(0.01 * values["weight_rms"])
    assert values["alignment_update"] is None
    assert values["alignment_update_mean"] is None
    assert not telemetry.last["was_skipped"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_skips_leaves_no_trace_unless_a_fused_kernel_skips(fused):
    """GradScaler does not call our optimizers for such a step; it calls torch's fused ones, which skip it."""
    model = nn.Linear(4, 4)
    ours, theirs = MuonSW.for_model(model, lr=0.02), torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    optimizer = theirs if fused else ours
    telemetry = Telemetry(optimizer, every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (False, True, False):
        loss = model(torch.ones(2, 4)).square().mean() * (math.inf if bad else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    skips = [(record["step"], record["was_skipped"], record["skipped"]) for record in telemetry.records]
    assert skips == ([(1, False, 0), (2, True, 1), (3, False, 1)] if fused else [(1, False, 0), (2, False, 0)])
    assert (telemetry.records[1]["all"]["update_rms"] is None) == fused


@pytest.mark.parametrize("build", [AdamWSW, torch.optim.AdamW])
def test_a_closure_computes_the_gradients_inside_the_step(build):
    params = matrices((6, 4))
    optimizer = build(params, lr=0.02)
    telemetry = Telemetry(optimizer, every=1)

    def closure():
        set_gradients(params, 5)
        return 0.0

    before = params[0].detach().double().clone()
    optimizer.step(closure)
    expected = torch.cosine_similarity(before.flatten(), params[0].grad.double().flatten(), dim=0).item()
    assert telemetry.last["all"]["alignment_gradient"] == pytest.approx(expected, abs=1e-6)


def test_parameters_without_a_gradient_are_left_out():
    params = matrices((6, 4), (4, 4))
    for optimizer in (MuonSW(params, lr=0.02), torch.optim.AdamW(params, lr=0.02)):
        telemetry = Telemetry(optimizer, every=1)
        params[1].grad = None
        params[0].grad = torch.randn(6, 4)
        optimizer.step()
        assert list(telemetry.last["parameters"]) == ["parameter 0 of group 0"]
        params[0].grad = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this step found no gradients")
            optimizer.step()
        assert telemetry.last["parameters"] == {}
        assert telemetry.last["all"]["numel"] == 0
        assert telemetry.last["all"]["weight_rms"] is None


def test_a_step_that_raises_is_not_counted():
    params = matrices((6, 4))
    optimizer = MuonSW(params, lr=0.02, nonfinite="raise")
    telemetry = Telemetry(optimizer, every=2)
    params[0].grad = torch.full((6, 4), math.nan)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step()
    run(optimizer, params, 2)
    assert [record["step"] for record in telemetry.records] == [1, 2]


def test_names_roles_and_layers_come_from_the_optimizer_or_the_model():
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 12, bias=False))
    roles = {"embedding", "hidden", "bias", "norm", "head"}
    numbered = ["0", "1", "2", "3"]
    builds = {
        "ours": (MuonSW.for_model(model, lr=0.02), None),
        "named": (torch.optim.AdamW(model.named_parameters(), lr=0.02), None),
        "model": (torch.optim.AdamW(model.parameters(), lr=0.02), model),
        "neither": (torch.optim.AdamW(model.parameters(), lr=0.02), None),
    }
    for case, (optimizer, given) in builds.items():
        telemetry = Telemetry(optimizer, every=1, model=given)
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()
        record = telemetry.last
        assert set(record["roles"]) == (roles if case in ("ours", "model") else set()), case
        assert list(record["layers"]) == (numbered if case != "neither" else []), case
        names = {name for name, _ in model.named_parameters()}
        assert (set(record["parameters"]) == names) == (case != "neither"), case
        assert sum(v["numel"] for v in record["parameters"].values()) == record["all"]["numel"]
    assert list(record["parameters"])[1] == "parameter 1 of group 0"


def test_mistakes_are_refused():
    params = matrices((4, 4))
    optimizer = MuonSW(params, lr=0.02)
    for key, wrong in (("every", 0), ("every", 2.5), ("start_step", -1), ("keep", 0)):
        with pytest.raises(ValueError, match=f"{key}={wrong}"):
            Telemetry(optimizer, **{key: wrong})
    with pytest.raises(TypeError, match="is not callable"):
        Telemetry(optimizer, sink=["metrics.jsonl"])
    with pytest.raises(TypeError, match=r"not a list.*pass the optimizer inside"):
        Telemetry(params)
    assert not optimizer._optimizer_step_pre_hooks
    telemetry = Telemetry(optimizer)
    with pytest.raises(ValueError, match="has a Telemetry already"):
        Telemetry(optimizer)
    telemetry.detach()
    telemetry.detach()
    Telemetry(optimizer)
