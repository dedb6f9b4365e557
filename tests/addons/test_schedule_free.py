"""Schedule-Free: the authors' numbers, a reference with all three sequences, and the two modes."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW, PeakLRError, ScheduleFree, Telemetry
from muonsw.reference import Decay
from tests.common.problems import (
    WITH_REFERENCE,
    assert_same,
    clones,
    matrices,
    run,
    set_gradients,
    step_with_nan,
    tensors_of,
)
from tests.family.references import NorMuon, recorded
from tests.family.schedule_free import SHAPES, STEPS, ReferenceScheduleFree, gradient, start

RECORDED = recorded("schedule_free")["runs"]
CLASSES = {
    **WITH_REFERENCE,
    "normuon": (MuonSW, NorMuon),
}
OPTIONS = {
    "muon": {"ns_dtype": torch.float64},
    "adamw": {"betas": (0.9, 0.999)},
    "normuon": {"ns_dtype": torch.float64, "normalize": "normuon"},
}
CONSTANT = {"lr": 0.05, "decay": "constant"}


def translated(options):
    """The authors' options as ours, for AdamWSW and for ScheduleFree."""
    beta, beta2 = options.get("betas", (0.9, 0.999))
    averaging = {key: options[key] for key in ("r", "weight_lr_power", "warmup_steps") if key in options}
    inner = {"betas": (0.0, beta2), "eps": options.get("eps", 1e-8)}
    decay = {"weight_decay": options.get("weight_decay", 0.0), "decay": "constant"}
    return {"lr": options["lr"], **inner, **decay}, {"beta": beta, **averaging}


@pytest.mark.parametrize("name", RECORDED)
def test_adamw_equals_the_authors(name):
    recording = RECORDED[name]
    inner, outer = translated(recording["options"])
    params = [nn.Parameter(start(shape)) for shape in SHAPES]
    optimizer = ScheduleFree(AdamWSW(params, **inner), **outer)
    optimizer.train()
    for step in range(STEPS):
        for param in params:
            param.grad = gradient(param.detach(), step)
        optimizer.step()
    for sequence in ("y", "x"):
        for param, values in zip(params, recording[sequence], strict=True):
            torch.testing.assert_close(param.detach(), param.new_tensor(values).detach(), rtol=1e-11, atol=1e-13)
        optimizer.eval()


@pytest.mark.parametrize("algorithm", CLASSES)
@pytest.mark.parametrize("rule", ["constant", "scaled"])
def test_it_matches_the_reference(algorithm, rule):
    """Also with missing gradients, which leave a parameter as it is, and with a falling rate."""
    build, reference_of = CLASSES[algorithm]
    params = matrices((6, 4), (3, 5), dtype=torch.float64)
    with warnings.catch_warnings(action="ignore"):
        optimizer = ScheduleFree(
            build(params, lr=0.05, weight_decay=0.5, decay=rule, **OPTIONS.get(algorithm, {})),
            beta=0.95,
            warmup_steps=4,
            r=0.5,
        )
    references = [
        ReferenceScheduleFree(reference_of(p.detach(), Decay(rule, 0.5, 0.05)), beta=0.95, warmup=4, r=0.5)
        for p in params
    ]
    optimizer.train()
    for step in range(25):
        set_gradients(params, step)
        if step % 7 == 3:
            params[1].grad = None
        optimizer.param_groups[0]["lr"] = lr = 0.05 if step < 15 else 0.03
        for param, reference in zip(params, references, strict=True):
            torch.testing.assert_close(param.detach(), reference.y, rtol=1e-9, atol=1e-11)
            reference.step(param.grad, lr)
        optimizer.step()
    optimizer.eval()
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param.detach(), reference.x, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(optimizer.state[param]["z"], reference.base.W, rtol=1e-9, atol=1e-11)


def trained(optimizer, params, steps, start=0):
    optimizer.train()
    run(optimizer, params, steps, start=start)
    optimizer.eval()


@pytest.mark.parametrize("joined", [False, True], ids=["there from the start", "in place of another group"])
def test_a_state_saved_in_training_mode_resumes_in_it(joined):
    params = matrices((5, 4), dtype=torch.float64)
    optimizer = ScheduleFree(AdamWSW(matrices((2, 2)) if joined else params, **CONSTANT))
    optimizer.train()
    if joined:
        optimizer.add_param_group({"params": params})
        del optimizer.param_groups[0]
    run(optimizer, params, 5)
    resumed = clones(params)
    with pytest.warns(UserWarning, match="saved in training mode"):
        saved = copy.deepcopy(optimizer.state_dict())
    other = ScheduleFree(AdamWSW(resumed, **CONSTANT))
    other.load_state_dict(saved)
    assert other.training
    run(optimizer, params, 4, start=5)
    run(other, resumed, 4, start=5)
    optimizer.eval()
    other.eval()
    assert_same(params, resumed)


def test_a_state_without_schedule_free_starts_a_new_average():
    params = matrices((4, 6))
    plain = AdamWSW(params, **CONSTANT)
    set_gradients(params, 0)
    plain.step()
    saved, actual = copy.deepcopy(plain.state_dict()), []
    for steps_before in (0, 3):
        resumed = clones(params)
        optimizer = ScheduleFree(AdamWSW(resumed, **CONSTANT))
        optimizer.train()
        run(optimizer, resumed, steps_before)
        resumed[0].data.copy_(params[0])
        optimizer.load_state_dict(saved)
        assert not optimizer.training
        trained(optimizer, resumed, 3, start=1)
        actual.append(resumed)
    assert_same(*actual)


def test_the_wrong_mode_is_an_error():
    model = nn.Linear(4, 4)
    optimizer = ScheduleFree(AdamWSW(model.parameters(), **CONSTANT), model=model)
    with pytest.raises(RuntimeError, match=r"the model trains while its optimizer is in evaluation mode; call .*train"):
        model(torch.ones(4))
    optimizer.train()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"call optimizer.eval\(\) before saving"):
        optimizer.state_dict()
    model.eval()
    with pytest.raises(RuntimeError, match=r"the model evaluates while its optimizer is in training mode; call .*eval"):
        model(torch.ones(4))
    optimizer.eval()
    model(torch.ones(4))
    with torch.no_grad():
        model.train()(torch.ones(4))  # batch norms update their statistics at x
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"in evaluation mode; call optimizer.train\(\)"):
        optimizer.step()
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize(("error", "lr"), [(PeakLRError, 0.2), (torch.OutOfMemoryError, 0.05)], ids=["rate", "memory"])
def test_a_step_that_fails_changes_nothing(error, lr, monkeypatch):
    """Before anything is moved, or while parameters hold z."""
    params = matrices((4, 6), (6, 6), dtype=torch.float64)
    optimizer = ScheduleFree(SGDSW(params, lr=0.05, decay="independent", weight_decay=0.3))
    optimizer.train()
    run(optimizer, params, 3)
    before = tensors_of(optimizer, params)

    def no_memory(*_arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("muonsw.step.update_batch", no_memory)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(error):
        optimizer.step()
    assert_same(before, tensors_of(optimizer, params))
    assert (optimizer.param_groups[0]["averaged_steps"], optimizer.param_groups[0]["lr"]) == (3, lr)


@pytest.mark.usefixtures("known_by")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_skipped_step_has_no_weight_in_the_average(dtype):
    actual = []
    for skipped in ((), (0, 3)):
        params = matrices((4, 6), dtype=dtype)
        optimizer = ScheduleFree(SGDSW(params, **CONSTANT))
        optimizer.train()
        for step in range(6):
            if step in skipped:
                step_with_nan(optimizer, params, step)
            set_gradients(params, step)
            optimizer.step()
        with warnings.catch_warnings(action="ignore"):
            saved = optimizer.state_dict()
        assert isinstance(saved["param_groups"][0]["averaging_weight"], float)
        copied = copy.deepcopy(optimizer)
        optimizer.eval()
        actual.append(params[0].detach())
        assert isinstance(copied.param_groups[0]["averaging_weight"], float)
    torch.testing.assert_close(*actual, rtol=2e-6 if dtype == torch.float32 else 1e-7, atol=0)


def test_a_first_step_at_zero_makes_state_in_both_modes_and_moves_nothing():
    params = matrices((4, 6))
    optimizer = ScheduleFree(AdamWSW(params, **CONSTANT))
    before = params[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert torch.equal(params[0], before)
    assert {"z", "exp_avg", "exp_avg_sq", "step"} == optimizer.state[params[0]].keys()
    assert optimizer.param_groups[0]["averaged_steps"] == 0


def test_warmup_leaves_a_tensor_rate_as_it_was():
    params = matrices((4, 6))
    optimizer = ScheduleFree(AdamWSW(params, **CONSTANT | {"lr": torch.tensor(0.05)}), warmup_steps=5)
    trained(optimizer, params, 2)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


def test_norm_rules_act_on_z():
    params = matrices((4, 6), dtype=torch.float64)
    norm = params[0].detach().norm()
    optimizer = ScheduleFree(MuonSW(params, norm="hyperball", **CONSTANT))
    trained(optimizer, params, 5)
    torch.testing.assert_close(optimizer.state[params[0]]["z"].norm(), norm, rtol=1e-12, atol=0)
    assert params[0].detach().norm() < norm  # an average of points on a ball


def test_schedulers_closures_and_telemetry_work():
    params = matrices((4, 6), dtype=torch.float64)
    optimizer = ScheduleFree(AdamWSW(params, **CONSTANT))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    telemetry = Telemetry(optimizer, every=1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(params[0].detach().clone()))
    optimizer.train()

    def closure():
        optimizer.zero_grad()
        loss = (params[0] - 1).square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[0] > losses[-1]
    optimizer.zero_grad()
    assert params[0].grad is None
    assert torch.equal(seen[-1], params[0].detach())  # y, not z
    assert len(telemetry.records) == 3
    assert optimizer.param_groups[0]["lr"] == 0.0125
    assert optimizer.summary().parameters == {"adamw": 24}
    assert "adamw" in optimizer.routing()
    with pytest.raises(AttributeError, match="has no attribute '_hidden'"):
        _ = optimizer._hidden


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_train_like_the_original(copier):
    model = nn.Linear(6, 4)
    optimizer = ScheduleFree(AdamWSW(model.parameters(), **CONSTANT), beta=0.8, warmup_steps=5, model=model)
    optimizer.train()
    run(optimizer, list(model.parameters()), 3)
    copied, other = copier((model, optimizer))
    assert other.training
    run(optimizer, list(model.parameters()), 6, start=3)
    run(other, list(copied.parameters()), 6, start=3)
    assert_same(list(copied.parameters()), list(model.parameters()))
    other.eval()
    with pytest.raises(RuntimeError, match="the model trains while its optimizer is in evaluation mode"):
        copied(torch.ones(1, 6))


def test_a_model_that_became_bfloat16_is_refused_and_left_alone():
    params = matrices((4, 6))
    optimizer = ScheduleFree(AdamWSW(params, **CONSTANT))
    optimizer.train()
    run(optimizer, params, 2)
    params[0].data, params[0].grad = params[0].data.bfloat16(), None
    before = tensors_of(optimizer, params)
    with pytest.raises(ValueError, match=r"less than torch\.bfloat16 weights with torch\.float32 state can hold"):
        run(optimizer, params, 1, start=2)
    assert_same(before, tensors_of(optimizer, params))


def test_scaled_decay_warns_that_it_is_constant_decay():
    with pytest.warns(UserWarning, match="where decay='scaled' equals decay='constant'"):
        ScheduleFree(AdamWSW(matrices((4, 6)), lr=0.05))
    ScheduleFree(AdamWSW(matrices((4, 6)), lr=0.05, weight_decay=0.0))


def test_a_load_of_what_cannot_be_averaged_changes_nothing():
    def build(**options):
        params = matrices((4, 6))
        return AdamWSW(params, **CONSTANT | options), params

    plain, others = build(state_dtype="bfloat16")
    run(plain, others, 2)
    inside, params = build()
    optimizer = ScheduleFree(inside)
    optimizer.train()
    run(optimizer, params, 3)
    before, groups = tensors_of(optimizer, params), copy.deepcopy(optimizer.param_groups)
    with pytest.raises(ValueError, match="param group 0: "):
        optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same(before, tensors_of(optimizer, params))
    for group, old in zip(optimizer.param_groups, groups, strict=True):
        assert {**group, "params": None} == {**old, "params": None}


def test_mistakes_are_named():
    def build(**options):
        return AdamWSW(matrices((4, 6), dtype=options.pop("dtype", torch.float32)), **CONSTANT | options)

    with pytest.raises(TypeError, match="wraps AdamWSW, MuonSW or SGDSW, not AdamW"):
        ScheduleFree(torch.optim.AdamW(matrices((4, 6))))
    for options in (
        {"beta": 1.0}, {"warmup_steps": -1}, {"r": [0.0]}, {"weight_lr_power": float("nan")},
    ):  # fmt: skip
        message = rf"{next(iter(options))}=.*must be"
        with pytest.raises(ValueError, match=message):
            ScheduleFree(build(), **options)
    with pytest.raises(ValueError, match=r"less than torch\.bfloat16 weights with torch\.float32 state can hold"):
        ScheduleFree(build(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"less than torch\.float32 weights with torch\.bfloat16 state can hold"):
        ScheduleFree(build(state_dtype="bfloat16"))
