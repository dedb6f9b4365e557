"""Every value of a record against the same value computed in float64 from saved weights."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from muonsw import ALGORITHMS, DECAY_RULES, AdamWSW, MuonSW, ScheduleFree, Telemetry, scale_weight_decay
from muonsw.telemetry.observe import condition_numbers
from tests.common.problems import RULE_OPTIONS, matrices, mean_square, phi_of, set_gradients
from tests.telemetry.float64_telemetry import Step, assert_values, defects, directions

LAMBDA = {"squared": 3.0, "independent": 0.02}
PEAK, LR = 0.05, 0.02

# Every algorithm under one rule, and every rule under one algorithm.
PAIRS = dict.fromkeys([(name, "scaled") for name in ALGORITHMS] + [("muon", rule) for rule in DECAY_RULES])


@pytest.mark.parametrize(("algorithm", "decay"), PAIRS)
def test_values_of_our_optimizers_are_those_of_float64(algorithm, decay):
    params = matrices((12, 8), (8, 8), (3, 6, 4))
    lam = LAMBDA.get(decay, 0.3)
    groups = [
        {"params": params[:2], "role": "hidden"},
        {"params": params[2:], "role": "experts", "matrix": "stack", "weight_decay": 0.0},
    ]
    betas = {"betas": (0.9, 0.95)} if "betas" in ALGORITHMS[algorithm].defaults else {}
    shared = {"algorithm": algorithm, "momentum": 0.9, **betas}
    groups = [{**group, **shared} for group in groups]
    options = RULE_OPTIONS.get(decay, {})
    optimizer = MuonSW(groups, lr=PEAK, weight_decay=lam, decay=decay, ns_dtype="float32", **options)
    telemetry, squares = Telemetry(optimizer, every=2), []
    for number in range(4):
        for group in optimizer.param_groups:
            group["lr"] = LR if number else PEAK
        set_gradients(params, number)
        squares.append(mean_square(params[:2]))
        step = Step(optimizer, params)
    record = telemetry.last
    phi = phi_of(decay, lam, LR, PEAK, 4, squares)
    phis = [phi, phi, 0.0]
    assert record["step"] == 4
    assert_values(record["all"], {**step.expected(phis), "lr": LR})
    assert_values(record["decayed"], step.expected(phis, [0, 1]))
    assert_values(record["roles"]["experts"], step.expected(phis, [2]))
    for number, name in enumerate(("parameter 0 of group 0", "parameter 1 of group 0", "parameter 0 of group 1")):
        assert_values(record["parameters"][name], step.expected(phis, [number]))
    for name, others in (("update", step.updates(phis)), ("gradient", step.grads), ("momentum", step.momenta)):
        assert record["all"][f"alignment_{name}_mean"] == pytest.approx(step.mean_cosine(others), abs=1e-6)
    uses_peak = DECAY_RULES[decay].uses_peak
    assert record["decayed"]["peak_lr"] == (pytest.approx(PEAK) if uses_peak else None)
    assert record["roles"]["experts"]["peak_lr"] is None
    assert ("defect" in record["all"]) == (algorithm == "muon")  # other directions need not be orthogonal


@pytest.mark.parametrize("lam", [0.3, 0.0])
def test_coupled_decay_is_unknown_and_overwritten_gradients_are_measured_before(lam):
    """torch's SGD adds decay to the gradient; without decay it looks ahead into the gradients themselves."""
    params = matrices((12, 8), (8, 8))
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, nesterov=True, weight_decay=lam, foreach=True)
    telemetry = Telemetry(optimizer, every=1)
    for number in range(2):
        set_gradients(params, number)
        step = Step(optimizer, params)
    overwritten = any(not torch.equal(p.grad.double(), g) for p, g in zip(params, step.grads, strict=True))
    assert overwritten == (lam == 0)
    expected = step.expected([0.0, 0.0])
    assert telemetry.last["all"]["decay"] == (None if lam else expected["decay"])
    del expected["decay"]
    assert_values(telemetry.last["all"], expected)
    assert telemetry.last["all"]["peak_lr"] is None
    assert telemetry.last["decayed"]["numel"] == (160 if lam else 0)


FOREIGN = [torch.optim.AdamW, torch.optim.Muon, partial(torch.optim.Adam, decoupled_weight_decay=True)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("build", FOREIGN, ids=["AdamW", "Muon", "Adam, decoupled"])
def test_values_of_torchs_decoupled_optimizers_are_those_of_float64(build, scaled):
    params = matrices((12, 8), (8, 8))
    optimizer = build(params, lr=0.05, weight_decay=0.3)
    telemetry = Telemetry(optimizer, every=1)
    if scaled:
        scale_weight_decay(optimizer, "scaled")
    for number, lr in enumerate((0.05, 0.02)):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(params, number)
        step = Step(optimizer, params)
    phi, peak = (0.3 * 0.02**2 / 0.05, 0.05) if scaled else (0.3 * 0.02, None)
    assert_values(telemetry.last["all"], {**step.expected([phi, phi]), "lr": 0.02})
    assert telemetry.last["all"]["peak_lr"] == peak


def test_stacked_experts_equal_separate_matrices():
    """Pooled values are the same; the mean over experts equals the mean over parameters; split parts count too."""
    (stack,) = matrices((4, 6, 8))
    separate = [nn.Parameter(part.detach().clone()) for expert in stack for part in expert.split((2, 4))]
    ours = MuonSW([stack], lr=0.02, matrix="stack", split_sizes=(2, 4), ns_dtype="float32")
    theirs = MuonSW(separate, lr=0.02, ns_dtype="float32")
    telemetries = [Telemetry(optimizer, every=1, spectral_norm=True) for optimizer in (ours, theirs)]
    for number in range(3):
        set_gradients([stack], number)
        parts = [part for expert in stack.grad for part in expert.split((2, 4))]
        for param, grad in zip(separate, parts, strict=True):
            param.grad = grad.clone()
        ours.step()
        theirs.step()
    left, right = (telemetry.last["all"] for telemetry in telemetries)
    assert left.keys() == right.keys()
    assert all(left[name] == pytest.approx(right[name], rel=1e-5, abs=1e-6) for name in left if left[name] is not None)
    single = telemetries[0].last["parameters"]["parameter 0 of group 0"]
    assert single["alignment_update_mean"] == left["alignment_update_mean"] != left["alignment_update"]


def test_the_defect_is_that_of_the_direction_before_its_scale():
    params = matrices((12, 8), (8, 8), (3, 6, 4), (8, 2, 3))
    groups = [{"params": params[:2]}, {"params": params[2:3], "matrix": "stack"}]
    groups.append({"params": params[3:], "matrix": "flatten", "scale": "spectral"})
    optimizer = MuonSW(groups, lr=0.02, ns_dtype="float32")
    telemetry = Telemetry(optimizer, every=1)
    for number in range(2):
        set_gradients(params, number)
        moved = directions(optimizer, params)
        optimizer.step()
    views = [None, None, "stack", "flatten"]
    expected = [defects(d, view) for d, view in zip(moved, views, strict=True)]
    for values, each in zip(telemetry.last["parameters"].values(), expected, strict=True):
        assert values["defect"] == pytest.approx(sum(each) / len(each), rel=1e-5)
    pooled = [value for each in expected for value in each]
    assert telemetry.last["all"]["defect"] == pytest.approx(sum(pooled) / len(pooled), rel=1e-5)


def test_whole_matrix_steps_of_muonbp_are_measured_as_whole_matrices():
    params = matrices((8, 6))
    optimizer = MuonSW(params, lr=0.02, ns_dtype="float32", heads=2, block_period=2)
    telemetry = Telemetry(optimizer, every=1)
    for number, views in enumerate([lambda x: x.split(4), lambda x: [x]]):
        set_gradients(params, number)
        (moved,) = directions(optimizer, params)
        optimizer.step()
        expected = [value for part in views(moved) for value in defects(part)]
        assert telemetry.last["all"]["defect"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_updates_of_low_precision_weights_are_measured_before_rounding(algorithm):
    """They equal those of float32 weights with the same gradients."""

    def record(dtype):
        params = matrices((12, 8), (3, 6, 4), dtype=torch.bfloat16)
        params = [nn.Parameter(p.detach().to(dtype)) for p in params]
        groups = [{"params": params[:1]}, {"params": params[1:], "matrix": "stack"}]
        groups = [{**group, "algorithm": algorithm, "momentum": 0.9} for group in groups]
        optimizer = MuonSW(groups, lr=1e-4, weight_decay=0.1, ns_dtype="float32", cautious=True)
        telemetry = Telemetry(optimizer, every=3)
        for number in range(3):
            set_gradients(params, number)
            for param in params:
                param.grad = param.grad.bfloat16().to(dtype)
            step = Step(optimizer, params)
        applied = step.expected([0.0, 0.0])["applied_rms"]
        assert telemetry.last["all"]["applied_rms"] == pytest.approx(applied, rel=1e-5)
        return telemetry.last["parameters"]

    rounded, expected = record(torch.bfloat16), record(torch.float32)
    for name, values in expected.items():
        assert rounded[name]["update_rms"] == pytest.approx(values["update_rms"], rel=1e-3)
        # weights have moved by an eps of bfloat16 at most
        assert rounded[name]["alignment_update"] == pytest.approx(values["alignment_update"], abs=0.01)
        assert rounded[name]["decay"] == pytest.approx(values["decay"], rel=0.05)


def test_schedule_free_is_measured_at_z():
    params = matrices((12, 8), dtype=torch.float64)
    inside = AdamWSW(params, lr=0.02, weight_decay=0.5, decay="constant")
    optimizer = ScheduleFree(inside)
    optimizer.train()
    telemetry = Telemetry(optimizer, every=1)
    for number in range(3):
        set_gradients(params, number)
        y, z = (t.detach().clone() for t in (params[0], inside.state[params[0]].get("z", params[0])))
        optimizer.step()
    after = inside.state[params[0]]["z"]
    values = telemetry.last["all"]
    assert values["weight_rms"] == pytest.approx(z.square().mean().sqrt().item())
    assert values["applied_rms"] == pytest.approx((after - z).square().mean().sqrt().item())
    assert values["decay"] == pytest.approx(0.01)
    assert not torch.equal(y, z)


def test_cautious_decay_is_measured_along_the_weight():
    params = matrices((16, 8), dtype=torch.float64)
    optimizer = MuonSW(params, lr=0.02, weight_decay=0.5, cautious=True)
    telemetry = Telemetry(optimizer, every=1)
    set_gradients(params, 1)
    (direction,) = directions(optimizer, params)
    step = Step(optimizer, params)
    w = step.before[0]
    inward = torch.where(w * direction >= 0, w, 0)
    expected = 0.01 * inward.square().sum() / w.square().sum()
    assert 0.002 < expected < 0.008
    assert telemetry.last["all"]["decay"] == pytest.approx(expected.item(), rel=1e-9)
    update = 0.02 * 0.2 * 16**0.5 * direction
    assert telemetry.last["all"]["update_rms"] == pytest.approx(update.square().mean().sqrt().item(), rel=1e-9)


@pytest.mark.parametrize("large", ["weight", "gradient"])
def test_overflowing_values_are_none(large):
    """Squares of 1e25 are infinite in float32, and a product over infinity is zero."""
    param = nn.Parameter(torch.full((4, 4), 1e25 if large == "weight" else 1.0))
    optimizer = AdamWSW([param], lr=0.1, weight_decay=0.1)
    telemetry = Telemetry(optimizer, every=1)
    param.grad = torch.full_like(param, 1e25 if large == "gradient" else 1.0)
    optimizer.step()
    values = telemetry.last["all"]
    assert values[f"{large}_rms"] is values["alignment_gradient"] is values["alignment_gradient_mean"] is None
    assert (values["relative_update"] is None) == (large == "weight")


@pytest.mark.parametrize("build", [MuonSW, torch.optim.AdamW])
def test_matrices_have_spectral_norms_and_condition_numbers_and_vectors_have_none(build):
    params = matrices((40, 24), (30, 30), (24, 64), (5,))
    optimizer = build([{"params": params[:3]}, {"params": params[3:], "algorithm": "adamw"}], lr=0.02)
    telemetry = Telemetry(optimizer, every=1, spectral_norm=True, condition=True)
    for number in range(2):
        set_gradients(params, number)
        step = Step(optimizer, params)
    *of_matrices, of_vector = telemetry.last["parameters"].values()
    norms = [torch.linalg.matrix_norm(weight, ord=2).item() for weight in step.before[:3]]
    for values, weight, norm in zip(of_matrices, step.before, norms, strict=False):
        assert values["spectral_norm"] == pytest.approx(norm, rel=1e-4)
        assert values["condition"] == pytest.approx(torch.linalg.cond(weight).item(), rel=1e-7)
    assert telemetry.last["all"]["spectral_norm"] == pytest.approx(sum(norms) / 3, rel=1e-4)
    assert not {"spectral_norm", "condition"} & of_vector.keys()


def test_a_singular_weight_has_no_condition_number():
    """Rounding moves the smallest eigenvalue of its Gram matrix slightly above or below zero."""
    singular = torch.randn(20, 8, 5, dtype=torch.float64) @ torch.randn(20, 5, 6, dtype=torch.float64)
    assert not condition_numbers(singular).isfinite().any()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_diverged_weights_have_no_spectrum(value):
    """Other weights keep their spectrum, and these get theirs back once they are finite."""
    params = matrices((8, 6), (6, 6))
    optimizer = torch.optim.SGD(params, lr=1e-6)
    telemetry = Telemetry(optimizer, every=1, spectral_norm=True, condition=True)
    good = params[0].detach().clone()
    for weight in (good, torch.full_like(good, value), good):
        set_gradients(params, 0)
        params[0].data.copy_(weight)
        optimizer.step()
    before, bad, after = (record["parameters"] for record in telemetry.records)
    first, second = before
    assert bad[first]["spectral_norm"] is None
    assert bad[first]["condition"] is None
    for key in ("spectral_norm", "condition"):
        assert after[first][key] == pytest.approx(before[first][key], rel=1e-2)
        assert bad[second][key] == pytest.approx(before[second][key], rel=1e-2)
