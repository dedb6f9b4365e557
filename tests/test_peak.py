"""The peak learning rate under every scheduler, loop, save and load that people use."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from muonsw import SGDSW, AdamWSW, MuonSW, PeakLRError, PeakLRWarning
from muonsw.peak import scheduler_peaks

LAMBDA = 0.5


def weight(value=1.0):
    return nn.Parameter(torch.full((4, 4), value, dtype=torch.float64))


def decay_only(optimizer, scheduler, steps, *, plateau=False):
    """Steps with zero gradients, so that nothing but decay moves the weight; returns (lr, shrink factor) pairs."""
    (param,) = optimizer.param_groups[0]["params"]
    seen = []
    for _ in range(steps):
        param.grad = torch.zeros_like(param)
        before, lr = param[0, 0].item(), float(optimizer.param_groups[0]["lr"])
        optimizer.step()
        seen.append((lr, 1 - param[0, 0].item() / before))
        scheduler.step(1.0) if plateau else scheduler.step()
    return seen


def assert_scaled_by(seen, peak):
    for lr, shrink in seen:
        assert shrink == pytest.approx(LAMBDA * lr**2 / peak, rel=1e-9, abs=1e-15)
    assert max(lr for lr, _ in seen) <= peak * (1 + 1e-6)


SCHEDULERS = {
    "LambdaLR": (lambda o: LambdaLR(o, lambda t: (t + 1) / 10 if t < 10 else 0.5), 0.1),
    "LambdaLR from zero": (lambda o: LambdaLR(o, lambda t: t / 10 if t < 10 else 0.5), 0.1),
    "CosineAnnealingLR": (lambda o: CosineAnnealingLR(o, T_max=30), 0.1),
    "CosineAnnealingWarmRestarts": (lambda o: CosineAnnealingWarmRestarts(o, T_0=7), 0.1),
    "OneCycleLR": (lambda o: OneCycleLR(o, max_lr=0.7, total_steps=31, cycle_momentum=False), 0.7),
    "OneCycleLR with momentum": (lambda o: OneCycleLR(o, max_lr=0.7, total_steps=31), 0.7),
    "warmup then cosine": (
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 25)], [5]),
        0.1,
    ),
    "chained": (lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 25)]), 0.1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("optimizer_class", [MuonSW, AdamWSW, SGDSW])
def test_decay_follows_the_schedulers_own_peak(name, optimizer_class):
    make, peak = SCHEDULERS[name]
    optimizer = optimizer_class([weight()], lr=0.1, weight_decay=LAMBDA)
    seen = decay_only(optimizer, make(optimizer), 30)
    assert_scaled_by(seen, peak)
    assert optimizer.param_groups[0]["resolved_peak_lr"] == pytest.approx(peak)


def test_reduce_on_plateau_keeps_the_constructors_peak():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    seen = decay_only(optimizer, ReduceLROnPlateau(optimizer, patience=2), 10, plateau=True)
    assert seen[-1][0] < 0.1
    assert_scaled_by(seen, 0.1)


def test_a_loop_that_assigns_lr_uses_the_constructors_peak():
    param = weight()
    optimizer = SGDSW([param], lr=0.1, weight_decay=LAMBDA)
    for lr in (0.01, 0.1, 0.02):
        before = param[0, 0].item()
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert 1 - param[0, 0].item() / before == pytest.approx(LAMBDA * lr**2 / 0.1)


def test_cyclic_lr_is_caught_with_the_remedy_and_changes_nothing():
    param = weight()
    optimizer = SGDSW([param], lr=0.1, weight_decay=LAMBDA)
    scheduler = CyclicLR(optimizer, base_lr=0.1, max_lr=0.4, step_size_up=5, cycle_momentum=False)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    scheduler.step()
    before = param.detach().clone()
    with pytest.raises(PeakLRError, match=r"above its peak 0\.1.*set_peak_lr\(scheduler\)"):
        optimizer.step()
    assert torch.equal(param, before)


def test_cyclic_lr_handed_over_is_right():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    scheduler = CyclicLR(optimizer, base_lr=0.1, max_lr=0.4, step_size_up=5, cycle_momentum=False)
    optimizer.set_peak_lr(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_scaled_by(decay_only(optimizer, scheduler, 20), 0.4)


def test_scheduler_peaks_looks_into_nested_schedulers_and_lambdas():
    optimizer = SGDSW([weight()], lr=0.1)
    rising = LambdaLR(optimizer, lambda t: 1 + t)
    assert scheduler_peaks(rising, total_steps=5) == pytest.approx([0.5])
    assert scheduler_peaks(rising) == pytest.approx([0.1])
    growing = MultiplicativeLR(optimizer, lambda t: 2.0 if t < 3 else 0.5)
    assert scheduler_peaks(growing, total_steps=6) == pytest.approx([0.1 * 2 * 2])
    both = SequentialLR(optimizer, [rising, CosineAnnealingLR(optimizer, 5)], [5])
    assert scheduler_peaks(both, total_steps=3) == pytest.approx([0.3])


def test_explicit_value_wins_over_scheduler_and_constructor():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA, peak_lr=2.0)
    scheduler = OneCycleLR(optimizer, max_lr=0.7, total_steps=31, cycle_momentum=False)
    optimizer.set_peak_lr(scheduler)
    seen = decay_only(optimizer, scheduler, 30)
    for lr, shrink in seen:
        assert shrink == pytest.approx(LAMBDA * lr**2 / 2.0)


def test_running_max_follows_the_highest_so_far():
    param = weight()
    optimizer = SGDSW([param], lr=0.1, weight_decay=LAMBDA, peak_lr="running_max")
    highest = 0.0
    for lr in (0.05, 0.3, 0.2, 0.4, 0.1):
        highest = max(highest, lr)
        optimizer.param_groups[0]["lr"] = lr
        before = param[0, 0].item()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        assert 1 - param[0, 0].item() / before == pytest.approx(LAMBDA * lr**2 / highest)


def test_groups_have_their_own_peaks():
    slow, fast = weight(), weight()
    groups = [{"params": [slow], "lr": 0.01}, {"params": [fast], "lr": 0.2}]
    optimizer = SGDSW(groups, lr=0.1, weight_decay=LAMBDA)
    scheduler = CosineAnnealingLR(optimizer, 10)
    for _ in range(6):
        for p in (slow, fast):
            p.grad = torch.zeros_like(p)
        optimizer.step()
        scheduler.step()
    assert [g["resolved_peak_lr"] for g in optimizer.param_groups] == [0.01, 0.2]


def test_base_peak_undoes_the_groups_multiplier():
    plain, divided = weight(), weight()
    groups = [{"params": [plain]}, {"params": [divided], "lr_multiplier": 0.25}]
    optimizer = SGDSW(groups, lr=0.2, weight_decay=LAMBDA, peak="base")
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05)
    for p in (plain, divided):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert 1 - plain[0, 0].item() == pytest.approx(LAMBDA * 0.2)
    assert 1 - divided[0, 0].item() == pytest.approx(LAMBDA * 0.05**2 / 0.2)
    assert optimizer.param_groups[1]["resolved_peak_lr"] == pytest.approx(0.05)


def test_group_peak_is_the_default_under_a_multiplier():
    divided = weight()
    optimizer = SGDSW([{"params": [divided], "lr_multiplier": 0.25}], lr=0.2, weight_decay=LAMBDA)
    divided.grad = torch.zeros_like(divided)
    optimizer.step()
    assert 1 - divided[0, 0].item() == pytest.approx(LAMBDA * 0.05)


def test_a_group_added_mid_run_has_its_own_peak():
    first, second = weight(), weight()
    optimizer = SGDSW([first], lr=0.1, weight_decay=LAMBDA)
    scheduler = CosineAnnealingLR(optimizer, 10)
    decay_only(optimizer, scheduler, 5)
    optimizer.add_param_group({"params": [second], "lr": 0.4})
    for p in (first, second):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert 1 - second[0, 0].item() == pytest.approx(LAMBDA * 0.4)
    assert optimizer.param_groups[0]["resolved_peak_lr"] == 0.1


def test_a_later_scheduler_may_raise_the_peak_but_not_lower_it():
    param = weight()
    optimizer = SGDSW([param], lr=0.1, weight_decay=LAMBDA)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    CosineAnnealingLR(optimizer, 10)
    with pytest.warns(PeakLRWarning, match=r"below the 0\.1 in use"):
        optimizer.step()
    assert optimizer.param_groups[0]["resolved_peak_lr"] == 0.1
    OneCycleLR(optimizer, max_lr=0.3, total_steps=10, cycle_momentum=False)
    with pytest.warns(PeakLRWarning, match=r"from 0\.1 to 0\.3"):
        optimizer.step()
    assert optimizer.param_groups[0]["resolved_peak_lr"] == 0.3
    optimizer.step()  # each change is reported once: warnings are errors here


def test_load_into_an_optimizer_built_with_another_lr_keeps_the_saved_peak():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    scheduler = CosineAnnealingLR(optimizer, 10)
    decay_only(optimizer, scheduler, 5)
    other = SGDSW([weight()], lr=0.003, weight_decay=LAMBDA)
    with pytest.warns(PeakLRWarning, match=r"peak learning rate of 0\.003 and loaded one of 0\.1"):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[0]["resolved_peak_lr"] == 0.1
    (param,) = other.param_groups[0]["params"]
    lr = other.param_groups[0]["lr"]
    param.grad = torch.zeros_like(param)
    other.step()
    assert 1 - param[0, 0].item() == pytest.approx(LAMBDA * lr**2 / 0.1)
    other.set_peak_lr(0.2)
    assert other.param_groups[0]["resolved_peak_lr"] == 0.2


def test_an_older_state_without_the_key_finds_the_peak_anew():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("resolved_peak_lr", "peak_record", "constructor_lr", "peak_lr"):
        del saved["param_groups"][0][key]
    saved["param_groups"][0]["lr"] = 0.02
    fresh = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    with pytest.warns(PeakLRWarning, match=r"knows no peak learning rate; its own is 0\.02 and the 0\.1"):
        fresh.load_state_dict(saved)
    (param,) = fresh.param_groups[0]["params"]
    param.grad = torch.zeros_like(param)
    fresh.step()
    assert 1 - param[0, 0].item() == pytest.approx(LAMBDA * 0.02**2 / 0.1)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_step_at_lr_zero_before_loading_changes_nothing(tensor_lr):
    """Distributed checkpointing fills the state of a fresh optimizer that way."""
    param = weight()
    optimizer = MuonSW([param], lr=torch.tensor(0.1) if tensor_lr else 0.1, weight_decay=LAMBDA)
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], torch.tensor(0.0) if tensor_lr else 0.0
    param.grad = torch.zeros_like(param)
    optimizer.step()
    group["lr"] = lr
    assert torch.equal(param, torch.ones_like(param))
    assert group["resolved_peak_lr"] is None
    assert "momentum_buffer" in optimizer.state[param]
    optimizer.step()
    assert group["resolved_peak_lr"] == pytest.approx(0.1)
    assert 1 - param[0, 0].item() == pytest.approx(LAMBDA * 0.1)


def test_distributed_checkpoint_round_trip_keeps_the_peak():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def trained(lr):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = MuonSW.for_model(model, lr=lr, weight_decay=LAMBDA)
        return model, optimizer, CosineAnnealingLR(optimizer, 20)

    model, optimizer, scheduler = trained(0.1)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
    saved = get_optimizer_state_dict(model, optimizer)
    fresh_model, fresh, _ = trained(0.1)
    fresh_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(fresh_model, fresh, saved)
    assert [g["resolved_peak_lr"] for g in fresh.param_groups] == [0.1] * len(fresh.param_groups)
    for m, o in ((model, optimizer), (fresh_model, fresh)):
        m.zero_grad()
        m(torch.ones(2, 4)).sum().backward()
        o.step()
    for a, b in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("decay", "weight_decay"), [("constant", 0.1), ("squared", 0.1), ("none", 0.1), ("scaled", 0.0)]
)
def test_rules_that_need_no_peak_do_not_check_it(decay, weight_decay):
    param = weight()
    optimizer = SGDSW([param], lr=0.1, weight_decay=weight_decay, decay=decay)
    optimizer.param_groups[0]["lr"] = 0.9
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert param[0, 0].item() < 0.2


def test_a_saved_explicit_peak_that_differs_is_reported():
    never_stepped = SGDSW([weight()], lr=0.1, peak_lr=0.5)
    other = SGDSW([weight()], lr=0.1, peak_lr=0.2)
    with pytest.warns(PeakLRWarning, match=r"peak learning rate of 0\.2 and loaded one of 0\.5"):
        other.load_state_dict(never_stepped.state_dict())


def test_running_max_refuses_a_learning_rate_that_the_host_cannot_see():
    for options in ({"lr": torch.tensor(0.1)}, {"lr": 0.1, "capturable": True}):
        with pytest.raises(ValueError, match="'running_max' needs a learning rate that the host knows"):
            SGDSW([weight()], peak_lr="running_max", **options)


def test_rounding_above_the_peak_is_tolerated():
    param = weight()
    optimizer = SGDSW([param], lr=0.1, weight_decay=LAMBDA)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + 5e-7)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert 1 - param[0, 0].item() == pytest.approx(LAMBDA * 0.1, rel=1e-5)


def test_tensor_lr_above_the_peak_is_raised_later_and_once():
    param = weight()
    lr = torch.tensor(0.1)
    optimizer = SGDSW([param], lr=lr, weight_decay=LAMBDA)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.check()
    lr.fill_(0.2)
    optimizer.step()
    with pytest.raises(PeakLRError, match="tensor learning rate exceeded its peak"):
        optimizer.state_dict()
    optimizer.state_dict()


def test_decay_of_more_than_the_weight_is_an_error_before_anything_changes():
    param = weight()
    optimizer = SGDSW([param], lr=0.5, weight_decay=3.0)
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"decay would take 1\.5 times the weight"):
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param))
    tensor = SGDSW([param], lr=torch.tensor(0.5), weight_decay=3.0)
    tensor.step()
    with pytest.raises(PeakLRError, match="decay factor exceeded 1"):
        tensor.check()
