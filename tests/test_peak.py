"""The peak learning rate under schedulers, loops, saves and loads."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from muonsw import SGDSW, AdamWSW, MuonSW, PeakLRError, PeakLRWarning, scale_weight_decay

LAMBDA = 0.5


def weight(value=1.0):
    return nn.Parameter(torch.full((4, 4), value, dtype=torch.float64))


def shrinks(optimizer):
    """The factor by which one step with zero gradients, so that only decay acts, shrinks each group."""
    params = [group["params"][0] for group in optimizer.param_groups]
    before = [param[0, 0].item() for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return [1 - param[0, 0].item() / old for param, old in zip(params, before, strict=True)]


def decay_only(optimizer, scheduler, steps, *metrics):
    """Pairs of learning rate and shrink factor of the first group."""
    seen = []
    for _ in range(steps):
        seen.append((float(optimizer.param_groups[0]["lr"]), shrinks(optimizer)[0]))
        scheduler.step(*metrics)
    return seen


def assert_scaled_by(seen, peak):
    for lr, shrink in seen:
        assert shrink == pytest.approx(LAMBDA * lr**2 / peak, rel=1e-9, abs=1e-15)
    assert max(lr for lr, _ in seen) <= peak * (1 + 1e-6)


SCHEDULERS = {
    "LambdaLR from zero": (lambda o: LambdaLR(o, lambda t: t / 10 if t < 10 else 0.5), 0.1),
    "CosineAnnealingLR": (lambda o: CosineAnnealingLR(o, T_max=30), 0.1),
    "CosineAnnealingWarmRestarts": (lambda o: CosineAnnealingWarmRestarts(o, T_0=7), 0.1),
    "OneCycleLR": (lambda o: OneCycleLR(o, max_lr=0.7, total_steps=31), 0.7),
    "warmup then cosine": (
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 25)], [5]),
        0.1,
    ),
    "chained": (lambda o: ChainedScheduler([LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 25)]), 0.1),
}


@pytest.mark.filterwarnings("ignore:the scheduler cycles betas")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_decay_follows_the_schedulers_own_peak(name):
    make, peak = SCHEDULERS[name]
    optimizer = AdamWSW([weight()], lr=0.1, weight_decay=LAMBDA)
    seen = decay_only(optimizer, make(optimizer), 30)
    assert_scaled_by(seen, peak)
    assert optimizer.param_groups[0]["resolved_peak_lr"] == pytest.approx(peak)


def test_reduce_on_plateau_keeps_the_constructors_peak():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    scheduler = ReduceLROnPlateau(optimizer, patience=2)
    seen = decay_only(optimizer, scheduler, 10, 1.0)
    assert seen[-1][0] < 0.1
    optimizer.set_peak_lr(scheduler)
    seen += decay_only(optimizer, scheduler, 10, 1.0)
    assert_scaled_by(seen, 0.1)


def test_cyclic_lr_is_caught_with_the_remedy_and_changes_nothing():
    optimizer = SGDSW([param := weight()], lr=0.1, weight_decay=LAMBDA)
    optimizer.param_groups[0]["lr"] *= 1 + 5e-7  # rounding is tolerated
    shrinks(optimizer)
    scheduler = CyclicLR(optimizer, base_lr=0.1, max_lr=0.4, step_size_up=5, cycle_momentum=False)
    decay_only(optimizer, scheduler, 1)
    before = param.detach().clone()
    with pytest.raises(PeakLRError, match=r"above its peak 0\.1.*param_groups\[\d\]\['peak_lr'\]"):
        optimizer.step()
    assert torch.equal(param, before)


def test_explicit_value_wins_over_scheduler_and_constructor():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA, peak_lr=2.0)
    scheduler = OneCycleLR(optimizer, max_lr=0.7, total_steps=31, cycle_momentum=False)
    optimizer.set_peak_lr(scheduler)
    assert_scaled_by(decay_only(optimizer, scheduler, 30), 2.0)


def test_running_max_follows_the_highest_so_far():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA, peak_lr="running_max")
    for lr, highest in ((0.05, 0.05), (0.3, 0.3), (0.2, 0.3), (0.4, 0.4)):
        optimizer.param_groups[0]["lr"] = lr
        assert shrinks(optimizer) == pytest.approx([LAMBDA * lr**2 / highest])


def test_the_peak_of_a_multiplied_rate_is_the_groups_or_the_base():
    for peak, eta_max in (("group", 0.05), ("base", 0.2)):
        groups = [{"params": [weight()]}, {"params": [weight()], "lr_multiplier": 0.25}]
        optimizer = SGDSW(groups, lr=0.2, weight_decay=LAMBDA, peak=peak)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05)
        assert shrinks(optimizer) == pytest.approx([LAMBDA * 0.2, LAMBDA * 0.05**2 / eta_max])
        assert optimizer.param_groups[1]["resolved_peak_lr"] == pytest.approx(0.05)


def test_an_added_group_past_its_peak_does_not_warn():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    scheduler = CosineAnnealingLR(optimizer, 10)
    decay_only(optimizer, scheduler, 6)
    optimizer.add_param_group({"params": [weight()], "lr": scheduler.get_last_lr()[0], "initial_lr": 0.1})
    for lr in (0.03, 0.02, 0.01):
        for group in optimizer.param_groups:
            group["lr"] = lr
        assert shrinks(optimizer) == pytest.approx([LAMBDA * lr**2 / 0.1] * 2)
    optimizer.add_param_group({"params": [weight()], "lr": 0.01, "peak_lr": 0.2})
    assert optimizer.param_groups[-1]["highest_lr"] == 0.2, "telemetry would report that it misses its peak"


def test_a_later_scheduler_may_raise_the_peak_but_not_lower_it():
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    shrinks(optimizer)
    CosineAnnealingLR(optimizer, 10)
    optimizer.step()  # the same peak does not warn: warnings are errors here
    del optimizer.param_groups[0]["initial_lr"]
    optimizer.param_groups[0]["lr"] = 0.05
    CosineAnnealingLR(optimizer, 10)
    with pytest.warns(PeakLRWarning, match=r"below the 0\.1 in use"):
        optimizer.step()
    assert optimizer.param_groups[0]["resolved_peak_lr"] == 0.1
    OneCycleLR(optimizer, max_lr=0.3, total_steps=10, cycle_momentum=False)
    with pytest.warns(PeakLRWarning, match=r"from 0\.1 to 0\.3"):
        optimizer.step()
    assert optimizer.param_groups[0]["resolved_peak_lr"] == 0.3
    assert optimizer.param_groups[0]["highest_lr"] == pytest.approx(0.3 / 25)  # a warmup to the new peak begins
    optimizer.step()  # each change is reported once: warnings are errors here


def test_a_step_at_lr_zero_before_loading_changes_nothing():
    """Distributed checkpointing fills the state of a fresh optimizer that way."""
    optimizer = MuonSW([param := weight()], lr=0.1, weight_decay=LAMBDA)
    group = optimizer.param_groups[0]
    group["lr"] = 0.0
    assert shrinks(optimizer) == [0.0]
    assert group["resolved_peak_lr"] is None
    assert "momentum_buffer" in optimizer.state[param]
    group["lr"] = 0.1
    assert shrinks(optimizer) == pytest.approx([LAMBDA * 0.1])
    assert group["resolved_peak_lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("options", [{"decay": "constant"}, {"weight_decay": 0.0}, {"norm": "hyperball"}], ids=str)
def test_rules_that_need_no_peak_do_not_check_it(options):
    param = weight()
    optimizer = SGDSW([param], lr=0.1, **{"weight_decay": 0.1, **options})
    for lr in (0.1, 0.9, 0.001):
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.eye(4, dtype=torch.float64)
        optimizer.step()
    assert param[0, 0].item() < 0.2


def test_a_schedule_that_never_reaches_its_peak_warns_once_for_each_group():
    """The idiom of the original Transformer: lr=1, and LambdaLR's factors are the rates."""
    optimizer = SGDSW([{"params": [weight()]}, {"params": [weight()]}], lr=1.0, weight_decay=LAMBDA)
    scheduler = LambdaLR(optimizer, lambda t: 0.1 * min((t + 1) / 8, ((t + 1) / 8) ** -0.5))
    with warnings.catch_warnings(record=True, action="always") as caught:
        decay_only(optimizer, scheduler, 20)
    assert [entry.category for entry in caught] == [PeakLRWarning] * 2
    for number, entry in enumerate(caught):
        message = rf"param group {number} has turned down at 0\.1 without coming near its peak 1, .* 10 times weaker"
        assert re.search(message, str(entry.message))
    assert optimizer.summary().groups[0].highest_lr == pytest.approx(0.1)
    optimizer.state_dict()
    optimizer.set_peak_lr(0.1)
    assert_scaled_by(decay_only(optimizer, scheduler, 2), 0.1)


@pytest.mark.parametrize("peak_lr", [None, "running_max"])
def test_resuming_with_another_peak_than_the_constructors_does_not_warn(peak_lr):
    def make():
        groups = [{"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}]
        optimizer = SGDSW(groups, lr=0.1, weight_decay=LAMBDA, peak_lr=peak_lr)
        return optimizer, CyclicLR(optimizer, base_lr=0.1, max_lr=0.4, step_size_up=5, cycle_momentum=False)

    optimizer, scheduler = make()
    optimizer.set_peak_lr(scheduler)
    for _ in range(8):
        shrinks(optimizer)
        scheduler.step()
    fresh, _ = make()
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # warnings are errors here
    assert fresh.param_groups[0]["resolved_peak_lr"] == pytest.approx(0.4)


def test_set_peak_lr_refuses_foreign_schedulers_and_missing_groups():
    optimizer, other = (SGDSW([weight()], lr=0.1) for _ in range(2))
    with pytest.raises(ValueError, match="this CosineAnnealingLR schedules another optimizer"):
        optimizer.set_peak_lr(CosineAnnealingLR(other, 10))
    with pytest.raises(ValueError, match="group=7: this optimizer has param groups 0 to 0"):
        optimizer.set_peak_lr(0.2, group=7)


class Wrapped:
    """What Accelerate returns: the scheduler under `scheduler`, and no `optimizer`."""

    def __init__(self, scheduler):
        self.scheduler, self.step = scheduler, scheduler.step


@pytest.mark.parametrize(
    "make",
    [
        lambda o: CyclicLR(o, base_lr=0.1, max_lr=0.4, step_size_up=5, cycle_momentum=False),
        lambda o: Wrapped(OneCycleLR(o, max_lr=0.4, total_steps=21, cycle_momentum=False)),
    ],
    ids=["CyclicLR", "wrapped OneCycleLR"],
)
def test_set_peak_lr_reads_the_peak_of_a_scheduler(make):
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    scheduler = make(optimizer)
    optimizer.set_peak_lr(scheduler)  # warnings are errors here
    assert_scaled_by(decay_only(optimizer, scheduler, 20), 0.4)


@pytest.mark.parametrize(
    "make",
    [lambda o: CosineAnnealingLR(o, 9), lambda o: SequentialLR(o, [LinearLR(o), CosineAnnealingLR(o, 9)], [2])],
    ids=["cosine", "sequence"],
)
def test_set_peak_lr_with_a_scheduler_overrides_earlier_peaks(make):
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA, peak_lr="running_max")
    decay_only(optimizer, OneCycleLR(optimizer, max_lr=0.4, total_steps=5, cycle_momentum=False), 4)
    optimizer.param_groups[0].update(lr=0.05, initial_lr=0.05, peak_lr=None)
    scheduler = make(optimizer)
    optimizer.set_peak_lr(scheduler)
    assert_scaled_by(decay_only(optimizer, scheduler, 9), 0.05)


def test_layer_decay_is_part_of_the_peak_if_the_scheduler_applies_it():
    """timm's schedulers multiply a group's rate by its `lr_scale`, but not the record; torch's ignore it."""
    groups = [{"params": [weight()], "lr_scale": scale, "initial_lr": 0.2} for scale in (1.0, 0.25)]
    optimizer = SGDSW(groups, weight_decay=LAMBDA, lr=0.2)
    for multiple in (0.1, 0.5, 1.0, 0.7, 0.2):
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * multiple * group["lr_scale"]
        assert shrinks(optimizer) == pytest.approx([LAMBDA * 0.2 * multiple**2, LAMBDA * 0.05 * multiple**2])

    optimizer = SGDSW([{"params": [weight()], "lr_scale": 0.25}], lr=0.2, weight_decay=LAMBDA)
    assert_scaled_by(decay_only(optimizer, CosineAnnealingLR(optimizer, 10), 8), 0.2)


@pytest.mark.parametrize("driven", [False, True])
def test_each_raised_peak_of_a_group_with_decay_warns_once(driven):
    groups = [{"params": [weight()], "weight_decay": lam} for lam in (0.1, 0.0, 0.2)]
    optimizer = torch.optim.AdamW(groups, lr=0.1) if driven else SGDSW(groups, lr=0.1)
    if driven:
        scale_weight_decay(optimizer, "scaled")
    shrinks(optimizer)
    OneCycleLR(optimizer, max_lr=0.5, total_steps=20, cycle_momentum=False)
    with pytest.warns(PeakLRWarning) as caught:
        optimizer.step()
    raised = [str(entry.message) for entry in caught]
    assert raised == [f"a scheduler raised the peak learning rate of param group {n} from 0.1 to 0.5" for n in (0, 2)]
    optimizer.step()  # warnings are errors here
    assert [group["resolved_peak_lr"] for group in optimizer.param_groups] == [0.5] * 3


@pytest.mark.parametrize("built_for", [{"lr": 0.003}, {"peak_lr": 0.2}, {"peak_lr": "running_max"}], ids=str)
def test_a_load_keeps_the_saved_peak_and_warns_of_another_one(built_for):
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    decay_only(optimizer, CosineAnnealingLR(optimizer, 10), 5)
    saved = optimizer.state_dict()
    other = SGDSW([weight()], **{"lr": 0.1, **built_for}, weight_decay=LAMBDA)
    (value,) = built_for.values()
    with pytest.warns(PeakLRWarning, match=rf"built for .* of {value!r} and loaded one of 0\.1, which it keeps"):
        other.load_state_dict(copy.deepcopy(saved))
    assert shrinks(other) == pytest.approx([LAMBDA * other.param_groups[0]["lr"] ** 2 / 0.1])
    SGDSW([weight()], lr=0.1, weight_decay=LAMBDA, peak_lr=0.1).load_state_dict(saved)


def test_a_schedule_that_dips_before_its_top_does_not_warn_early():
    """ConstantLR holds down what ExponentialLR lowers, and lets go after five steps; warnings are errors here."""
    optimizer = SGDSW([weight()], lr=0.1, weight_decay=LAMBDA)
    scheduler = ChainedScheduler([ConstantLR(optimizer, 0.3, total_iters=5), ExponentialLR(optimizer, 0.9)])
    rates = [lr for lr, _ in decay_only(optimizer, scheduler, 6)]
    assert rates[4] < rates[0] < rates[5]
    with pytest.warns(PeakLRWarning, match=rf"turned down at {rates[5]:g} .*unless the schedule rises again"):
        decay_only(optimizer, scheduler, 6)


FAST, SLOW = 0.02, 3e-4


def test_one_peak_for_groups_of_several_rates_is_refused_with_the_fix():
    groups = [{"params": [weight()]}, {"params": [weight()], "lr": SLOW}]
    for refused in (
        lambda: SGDSW(groups, lr=FAST, peak_lr=FAST, weight_decay=LAMBDA),
        lambda: SGDSW(groups[:1], lr=FAST, peak_lr=FAST, weight_decay=LAMBDA).add_param_group(groups[1]),
        lambda: SGDSW(groups, lr=FAST, weight_decay=LAMBDA).set_peak_lr(FAST),
    ):
        with pytest.raises(ValueError, match=r"learning rates 0\.02 and 0\.0003; give each group its own peak_lr"):
            refused()


def test_each_group_may_have_its_own_peak():
    groups = [{"params": [weight()]}, {"params": [weight()], "lr": SLOW, "peak_lr": 1e-3}]
    optimizer = SGDSW(groups, lr=FAST, weight_decay=LAMBDA, peak_lr=2 * FAST)
    assert shrinks(optimizer) == pytest.approx([LAMBDA * FAST / 2, LAMBDA * SLOW**2 / 1e-3])
    optimizer.set_peak_lr(SLOW, group=1)
    assert shrinks(optimizer) == pytest.approx([LAMBDA * FAST / 2, LAMBDA * SLOW])
    groups = [{"params": [weight()]}, {"params": [weight()], "lr": SLOW, "weight_decay": 0.0}]  # the second needs none
    assert shrinks(SGDSW(groups, lr=FAST, weight_decay=LAMBDA, peak_lr=FAST)) == pytest.approx([LAMBDA * FAST, 0.0])
