"""Scaled decay for optimizers of torch and others."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CyclicLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from muonsw import DECAY_RULES, AdamWSW, MuonSW, PeakLRError, Telemetry, scale_weight_decay
from tests.common.cuda import OnAGPU
from tests.common.problems import RULE_OPTIONS, assert_same, clones, matrices, run, set_gradients

RULES = [rule for rule in DECAY_RULES if rule != "gradient_norm"]
LAMBDA = {"squared": 0.5, "independent": 0.002, "fixed": 0.01}


@pytest.mark.parametrize("rule", RULES)
def test_a_scaled_adamw_equals_ours(rule):
    ours, theirs = matrices((4, 6), (5,)), matrices((4, 6), (5,))
    lam = LAMBDA.get(rule, 0.3)
    options = RULE_OPTIONS.get(rule, {})
    mine = AdamWSW(ours, lr=0.01, weight_decay=lam, decay=rule, **options)
    scaled = torch.optim.AdamW(theirs, lr=0.01, weight_decay=lam)
    scale_weight_decay(scaled, rule, **options)
    for optimizer, params in ((mine, ours), (scaled, theirs)):
        scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=41, cycle_momentum=False)
        run(optimizer, params, 40, scheduler=scheduler)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", ["scaled", "log_time"])
@pytest.mark.parametrize("edit", [None, 0.2])
def test_our_optimizer_loads_the_state_of_a_scaled_one_with_its_lambda(rule, edit):
    params = [nn.Parameter(param.detach().double()) for param in matrices((4, 4), (3,))]
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    scheduler = CosineAnnealingLR(optimizer, 10)
    scale_weight_decay(optimizer, rule)
    run(optimizer, params, 5, scheduler=scheduler)
    if edit is not None:
        optimizer.param_groups[0]["weight_decay"] = edit
    mine = AdamWSW(params, lr=0.1, decay=rule)
    mine.load_state_dict(optimizer.state_dict())
    assert mine.param_groups[0]["weight_decay"] == (edit or 0.3)
    before = [param.detach().clone() for param in params]
    run(optimizer, params, 1, start=5)
    expected = [param.detach().clone() for param in params]
    with torch.no_grad():
        torch._foreach_copy_(params, before)
    run(mine, params, 1, start=5)
    torch.testing.assert_close([param.detach() for param in params], expected, rtol=1e-12, atol=1e-14)


def test_mistakes_are_named():
    optimizer = torch.optim.AdamW(matrices((4, 6)), lr=0.05)
    with pytest.raises(ValueError, match="'gradient_norm' follows the gradients, which AdamW does not expose"):
        scale_weight_decay(optimizer, "gradient_norm")
    with pytest.raises(ValueError, match="did you mean 'scaled'"):
        scale_weight_decay(optimizer, ["scaled"])
    with pytest.raises(ValueError, match="'cosine' depends on the length of the run; pass total_steps"):
        scale_weight_decay(optimizer, "cosine")
    with pytest.raises(ValueError, match="is an optimizer of this library; pass decay= to it"):
        scale_weight_decay(MuonSW(matrices((4, 4)), lr=0.1))
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer, not a Linear"):
        scale_weight_decay(nn.Linear(2, 2))


def by_state_dict(both):
    params, optimizer = both
    resumed = clones(params)
    other = torch.optim.AdamW(resumed, lr=0.003, weight_decay=0.3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return resumed, other


@pytest.mark.parametrize("rule", ["scaled", "log_time"])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both)), by_state_dict])
def test_a_copy_continues_with_the_same_lambda_peak_and_count(copier, rule):
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    scale_weight_decay(optimizer, rule)
    run(optimizer, params, 5, scheduler=CosineAnnealingLR(optimizer, 10))
    copied, other = copier((params, optimizer))
    scale_weight_decay(other, rule)
    for each, weights in ((optimizer, params), (other, copied)):
        each.param_groups[0]["lr"] = 0.02
        run(each, weights, 1, start=5)
    assert torch.equal(params[0], copied[0])


def test_the_peak_is_checked_and_the_remedy_works():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    scale_weight_decay(optimizer)
    scheduler = CyclicLR(optimizer, base_lr=0.1, max_lr=0.4, step_size_up=3, cycle_momentum=False)
    run(optimizer, params, 1, scheduler=scheduler)
    with pytest.raises(PeakLRError, match=r"set optimizer\.param_groups\[0\]\['peak_lr'\] to it now"):
        run(optimizer, params, 1)
    optimizer.param_groups[0]["peak_lr"] = 0.4
    run(optimizer, params, 1)
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.3 * optimizer.param_groups[0]["lr"] / 0.4)


class Trusting(torch.optim.AdamW):
    """A trust ratio on top of decoupled decay, as in LAMB: its step is as long as the weight."""

    def step(self):
        for group in self.param_groups:
            before = [param.detach().clone() for param in group["params"]]
            super().step()
            for param, old in zip(group["params"], before, strict=True):
                move = param.detach() - old
                param.data = old + group["lr"] * move * old.norm() / move.norm()


DECOUPLED = {"Adam": True, "NAdam": True, "RAdam": True}
COUPLED = {"SGD": {"momentum": 0.9}, "Adam": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {}, "Adagrad": {}, "Adadelta": {}}


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor", *DECOUPLED])
def test_decoupled_decay_is_recognized_and_nothing_is_stepped(name):
    params = matrices((4, 6))
    options = {"decoupled_weight_decay": True} if name in DECOUPLED else {}
    optimizer = getattr(torch.optim, name)(params, lr=0.1, weight_decay=0.3, **options)
    CosineAnnealingLR(optimizer, 10)  # binds `step` to this optimizer
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("step"))
    set_gradients(params, 0)
    before, grads, random = clones(params), [p.grad.clone() for p in params], torch.get_rng_state()
    scale_weight_decay(optimizer)
    assert not seen
    assert not optimizer.state
    assert_same(params, before)
    assert_same([p.grad for p in params], grads)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(getattr(torch.optim, name), weight_decay=0.1, **options) for name, options in COUPLED.items()),
        Trusting,
        torch.optim.LBFGS,
    ],
)
def test_other_decay_is_refused(make):
    with pytest.raises(ValueError, match="does not shrink weights by lr"):
        scale_weight_decay(make([nn.Parameter(torch.ones(4, 4))], lr=0.1))


def test_a_load_of_an_unscaled_state_keeps_the_peak():
    """Its learning rate may be far below the peak; dividing by it would make decay many times too strong."""
    plain_params = matrices((4, 4))
    plain = torch.optim.AdamW(plain_params, lr=0.1, weight_decay=0.3)
    run(plain, plain_params, 2)
    plain.param_groups[0]["lr"] = 0.01  # a hand-written schedule leaves no record
    params = clones(plain_params)
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.7)
    scale_weight_decay(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    run(optimizer, params, 1, start=2)
    group = optimizer.param_groups[0]
    assert group["base_weight_decay"] == 0.3
    assert group["resolved_peak_lr"] == 0.1
    assert group["weight_decay"] == pytest.approx(0.3 * 0.01 / 0.1)


@pytest.mark.parametrize("order", ["scaled after the load", "scaled before the load"])
def test_an_explicit_peak_replaces_a_loaded_one(order):
    optimizer = torch.optim.AdamW(params := matrices((4, 4)), lr=0.1, weight_decay=0.3)
    scale_weight_decay(optimizer)
    run(optimizer, params, 2)
    other = torch.optim.AdamW(others := matrices((4, 4)), lr=0.1, weight_decay=0.3)
    if order == "scaled before the load":
        scale_weight_decay(other, peak_lr=0.4)
    other.load_state_dict(optimizer.state_dict())
    if order == "scaled after the load":
        scale_weight_decay(other, peak_lr=0.4)
    run(other, others, 1)
    assert other.param_groups[0]["weight_decay"] == pytest.approx(0.3 * 0.1 / 0.4)


class Wrapped(torch.optim.Optimizer):
    """An optimizer that keeps the real one in `optimizer`, as Accelerate's does."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


PEAK, LENGTH = 0.05, 40
SCHEDULES = {
    "cosine": lambda o: CosineAnnealingLR(o, LENGTH),
    "one_cycle": lambda o: OneCycleLR(o, max_lr=PEAK, total_steps=LENGTH + 1, cycle_momentum=False),
    "warmup": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=10), CosineAnnealingLR(o, LENGTH - 10)], [10]),
    "steps": lambda o: MultiStepLR(o, [10, 25], gamma=0.3),
}


def scheduled(kind, schedule, params):
    optimizer = kind(params, lr=PEAK, weight_decay=0.3)
    return optimizer, SCHEDULES[schedule](optimizer)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Muon])
@pytest.mark.parametrize("order", ["scaled after the load", "scaled before the load", "scaled before the save"])
@pytest.mark.parametrize("joined", [0, 5, 20])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_joins_a_resumed_run(schedule, joined, order, kind):
    params = matrices((4, 4))
    optimizer, scheduler = scheduled(kind, schedule, params)
    run(optimizer, params, joined // 2, scheduler=scheduler)
    if order == "scaled before the save":
        scale_weight_decay(optimizer)
    run(optimizer, params, joined - joined // 2, start=joined // 2, scheduler=scheduler)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))

    resumed = clones(params)
    other, other_scheduler = scheduled(kind, schedule, resumed)
    if order == "scaled before the load":
        scale_weight_decay(other)
    other.load_state_dict(saved[0])
    other_scheduler.load_state_dict(saved[1])
    if order != "scaled before the load":
        scale_weight_decay(other)
    for step in range(joined, LENGTH):
        group = other.param_groups[0]
        lr = group["lr"]
        run(other, resumed, 1, start=step)
        assert group["weight_decay"] == pytest.approx(0.3 * lr / PEAK), step
        other_scheduler.step()


@pytest.mark.parametrize("rule", ["cosine", "log_time"])
def test_a_late_start_counts_the_steps_before(rule):
    params, others = matrices((4, 4), (4, 4)), matrices((4, 4), (4, 4))
    early, late = (torch.optim.AdamW(p, lr=0.1, weight_decay=0.3) for p in (params[:1], others[:1]))
    scale_weight_decay(early, rule, total_steps=20)
    run(early, params[:1], 5)
    run(late, others[:1], 5)
    scale_weight_decay(late, rule, total_steps=20, peak_lr=0.1)
    for optimizer, weights in ((early, params), (late, others)):
        optimizer.add_param_group({"params": [weights[1]]})
        run(optimizer, weights, 2, start=5)
    decays = [[group["weight_decay"] for group in optimizer.param_groups] for optimizer in (early, late)]
    assert decays[0] == decays[1]
    assert decays[0][0] == decays[0][1]


def test_a_late_start_needs_a_peak_that_was_not_recorded():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    run(optimizer, params, 5, schedule=lambda t: 0.1 / (t + 1))  # by hand, so that no scheduler leaves a record
    with pytest.raises(ValueError, match=r"is now 0\.02; pass peak_lr="):
        scale_weight_decay(optimizer)
    scale_weight_decay(optimizer, "constant")


def test_a_weight_decay_set_later_becomes_lambda():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    group, keys = optimizer.param_groups[0], set(optimizer.param_groups[0])
    handle = scale_weight_decay(optimizer)
    group["weight_decay"] = 0.6  # before the first step
    for step, (lr, given, lam) in enumerate([(0.1, None, 0.6), (0.05, None, 0.6), (0.05, 0.2, 0.2), (0.02, None, 0.2)]):
        group["lr"] = lr
        if given is not None:
            group["weight_decay"] = given
        run(optimizer, params, 1, start=step)
        assert group["weight_decay"] == pytest.approx(lam * lr / 0.1), step
    resumed = clones(params)
    other = torch.optim.AdamW(resumed, lr=0.1, weight_decay=0.9)
    scale_weight_decay(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(other, resumed, 1, start=4)
    assert other.param_groups[0]["weight_decay"] == pytest.approx(0.2 * 0.02 / 0.1)
    handle.remove()
    assert group["weight_decay"] == 0.2
    assert set(group) == keys
    handle = scale_weight_decay(optimizer, peak_lr=0.1)
    group["weight_decay"] = 0.7
    handle.remove()
    assert group["weight_decay"] == 0.7


def test_a_second_call_is_refused_until_the_first_is_removed_also_through_a_wrapper():
    params = matrices((4, 4))
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.3)
    handle = scale_weight_decay(Wrapped(optimizer))
    assert handle.optimizer is Telemetry(Wrapped(optimizer)).optimizer is optimizer
    with pytest.raises(ValueError, match=r"already has scaled decay.*remove\(\)"):
        scale_weight_decay(Wrapped(optimizer), "cosine", total_steps=10)
    handle.remove()
    scale_weight_decay(optimizer, "cosine", total_steps=10)
    run(optimizer, params, 3)
    assert optimizer.param_groups[0]["step_count"] == 3


@pytest.mark.parametrize("peak_lr", [None, "running_max"])
def test_a_step_that_is_refused_changes_no_group(peak_lr):
    first, second = matrices((4, 4), (4, 4))
    groups = [{"params": [first], "weight_decay": 0.3}, {"params": [second], "weight_decay": 30.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scale_weight_decay(optimizer, peak_lr=peak_lr)
    optimizer.param_groups[0]["lr"] = 0.05
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match="3 times the weight"):
        run(optimizer, [first, second], 1)
    assert optimizer.param_groups == before


def test_state_made_before_the_first_step_is_not_a_step():
    """dion starts with zeros and no step count."""
    (param,) = matrices((4, 4))
    optimizer = torch.optim.Muon([param], lr=0.1, weight_decay=0.3)
    optimizer.state[param]["momentum"] = torch.zeros_like(param)
    scale_weight_decay(optimizer).remove()
    optimizer.state[param]["momentum"] += 1
    with pytest.raises(ValueError, match="has taken steps"):
        scale_weight_decay(optimizer)


def test_a_tensor_that_a_graph_reads_is_filled_in_place():
    params, lam = matrices((4, 4)), torch.tensor(0.3)
    optimizer = torch.optim.AdamW(params, lr=0.1, weight_decay=0.0)
    optimizer.param_groups[0]["weight_decay"] = lam
    handle = scale_weight_decay(optimizer)
    for multiple in (1.0, 0.5, 0.25):
        optimizer.param_groups[0]["lr"] = 0.1 * multiple
        run(optimizer, params, 1)
        assert float(lam) == pytest.approx(0.3 * multiple)
    assert optimizer.param_groups[0]["weight_decay"] is lam
    handle.remove()
    assert float(lam) == pytest.approx(0.3)


def test_a_graph_that_would_freeze_the_decay_is_refused(monkeypatch):
    optimizer = torch.optim.AdamW(matrices((4, 4)), lr=0.1, weight_decay=0.5)
    scale_weight_decay(optimizer)
    optimizer.param_groups[0]["params"] = [torch.ones(4, 4).as_subclass(OnAGPU)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a CUDA graph would freeze the weight_decay"):
        optimizer.step()
    assert optimizer.param_groups[0]["step_count"] == 0
