"""What rules know of a run: the step, its length, and the size of gradients; saved, loaded, counted in tensors."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from muonsw import SGDSW, AdamWSW, MuonSW, NonFiniteGradientWarning
from muonsw.decay import decay_factors
from muonsw.reference import ReferenceAdamWSW, ReferenceMuonSW, ReferenceSGDSW, ns5
from tests.common.problems import (
    POINTS,
    clones,
    cosine,
    eager_and_compiled,
    flag_on_device,
    follow,
    matrices,
    run,
    set_gradients,
)
from tests.common.reference_rules import Decay

OF_THE_RUN = {
    "cosine": {"total_steps": 30},
    "piecewise": {"total_steps": 30, "decay_points": POINTS},
    "log_time": {},
    "gradient_norm": {},
}
rules = pytest.mark.parametrize("rule", OF_THE_RUN)
CLASSES = {"muon": MuonSW, "adamw": AdamWSW, "sgd": SGDSW}
every = pytest.mark.parametrize("algorithm", CLASSES)


@every
def test_decay_by_the_size_of_gradients_is_the_reference(algorithm):
    """The other rules are held against it in `test_against_reference.py`, with several parameters in a group."""
    references = {
        "muon": lambda W, d: ReferenceMuonSW(W, d, nesterov=True, heavy_ball=False, orthogonalize=ns5),
        "adamw": ReferenceAdamWSW,
        "sgd": ReferenceSGDSW,
    }
    (param,) = matrices((5, 7), dtype=torch.float64)
    beta2 = 0.999 if algorithm == "adamw" else 0.95
    reference = references[algorithm](param.detach(), Decay("gradient_norm", 0.3, 0.05, beta2=beta2))
    optimizer = CLASSES[algorithm]([param], lr=0.05, weight_decay=0.3, decay="gradient_norm")
    assert follow(optimizer, [param], [reference], 30, cosine(0.05, 30)) < 1e-9


def test_the_average_over_steps_is_the_mean_of_adams_own():
    """Averages over entries and over steps commute, so that the rule needs no state of Adam's."""
    params = matrices((5, 7), (4,), dtype=torch.float64)
    optimizer = AdamWSW(params, lr=0.05, weight_decay=0.01, decay="gradient_norm")
    run(optimizer, params, 7)
    squares = sum(float(optimizer.state[p]["exp_avg_sq"].sum()) for p in params) / sum(p.numel() for p in params)
    total, weight = optimizer.param_groups[0]["gradient_average"]
    assert total == pytest.approx(squares, rel=1e-12)
    assert weight == pytest.approx(1 - 0.999**7, rel=1e-12)
    assert optimizer.summary().groups[0].decay == pytest.approx(0.01 * 0.05 / (squares / (1 - 0.999**7)) ** 0.5)


@rules
def test_a_snapshot_does_not_change_with_the_steps_that_follow(rule):
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    run(optimizer, params, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    other_params = clones(params)
    other = MuonSW(other_params, lr=0.05, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    other.load_state_dict(saved)
    run(other, other_params, 3, start=3)
    for key in ("step_count", "gradient_average"):
        assert saved["param_groups"][0].get(key) == optimizer.param_groups[0].get(key)


@rules
def test_a_learning_rate_in_a_tensor_is_a_number(rule):
    params, others = matrices((4, 6)), matrices((4, 6))
    options = {"weight_decay": 0.3, "decay": rule, **OF_THE_RUN[rule]}
    plain, tensor = MuonSW(params, lr=0.05, **options), MuonSW(others, lr=torch.tensor(0.05), **options)
    run(plain, params, 5)
    run(tensor, others, 5)
    torch.testing.assert_close(params[0].detach(), others[0].detach(), rtol=1e-5, atol=1e-7)
    assert tensor.param_groups[0]["step_count"] == 5


@torch._dynamo.config.patch(recompile_limit=4)  # pytest's own patching would delete the setting when it undoes it
@pytest.mark.parametrize(("rule", "dtype"), [("cosine", torch.float64), ("piecewise", torch.float32)], ids=str)
def test_compiled_steps_count(rule, dtype):
    """torch's compiler loses what is added to a float64 scalar of the host in place."""
    options = {"weight_decay": 0.3, "decay": rule, **OF_THE_RUN[rule], "total_steps": 12}
    eager, compiled, optimizer = eager_and_compiled(
        lambda params: AdamWSW(params, lr=torch.tensor(0.05), **options), (4, 6), steps=6, dtype=dtype
    )
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-7)
    assert optimizer.param_groups[0]["step_count"] == 6


@pytest.mark.parametrize("rule", ["cosine", "piecewise", "log_time"])
def test_skipped_steps_count(rule):
    """A scheduler moves on after a skipped step, and so does the rule."""
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    run(optimizer, params, 2)
    set_gradients(params, 2)
    params[0].grad[0, 0] = torch.inf
    with pytest.warns(NonFiniteGradientWarning, match="skipped"):
        optimizer.step()
    assert optimizer.param_groups[0]["step_count"] == 3


@pytest.mark.filterwarnings("ignore::muonsw.NonFiniteGradientWarning")
@pytest.mark.parametrize("known_by", ["host", "device"])
def test_an_infinite_gradient_does_not_enter_the_average(known_by, monkeypatch):
    if known_by == "device":
        monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.01, decay="gradient_norm")
    run(optimizer, params, 2)
    before = optimizer.param_groups[0]["gradient_average"]
    set_gradients(params, 2)
    params[0].grad[0, 0] = torch.inf
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert optimizer.param_groups[0]["gradient_average"] == before


def test_a_step_at_zero_leaves_no_gradient_in_the_average():
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=0.01, decay="gradient_norm")
    run(optimizer, params, 1, schedule=lambda _: 0.0)
    assert optimizer.param_groups[0]["gradient_average"] == [0.0, 0.0]


def test_a_step_that_raises_is_not_counted():
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05, weight_decay=3.0, decay="log_time")
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="decay would take 3 times the weight"):
        optimizer.step()
    assert optimizer.param_groups[0]["step_count"] == 0
    optimizer = MuonSW(params, lr=0.05, weight_decay=1e3, decay="gradient_norm")
    with pytest.raises(ValueError, match="times the weight in one step"):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.step()
    mean = float(params[0].grad.square().mean())
    assert optimizer.param_groups[0]["gradient_average"] == pytest.approx([0.05 * mean, 0.05])


def test_the_length_must_be_known_where_a_rule_ends_with_the_run():
    params = matrices((4, 6))
    with pytest.raises(ValueError, match="decay='cosine' of param group 0 ends with the run; pass total_steps="):
        MuonSW(params, decay="cosine")
    run(MuonSW(params, decay="cosine", weight_decay=0.0), params, 1)  # nothing decays, so no rule asks
    optimizer = MuonSW(params)
    optimizer.param_groups[0]["decay"] = "cosine"
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="ends with the run"):
        optimizer.step()
    with pytest.raises(ValueError, match="total_steps=0: must be a whole number of at least 1"):
        MuonSW(params, decay="cosine", total_steps=0)


def test_the_points_must_be_known_where_a_rule_goes_through_them():
    params = matrices((4, 6))
    with pytest.raises(ValueError, match="decay='piecewise' of param group 0 goes through points; pass decay_points="):
        MuonSW(params, decay="piecewise", total_steps=30)
    with pytest.raises(ValueError, match="ends with the run; pass total_steps="):
        MuonSW(params, decay="piecewise", decay_points=POINTS)
    MuonSW(params, decay="piecewise", weight_decay=0.0)
    optimizer = MuonSW(params, decay="piecewise", total_steps=30, decay_points=[[0, 1], [1, 2]])
    assert optimizer.param_groups[0]["decay_points"] == ((0.0, 1.0), (1.0, 2.0))
    optimizer.param_groups[0]["decay_points"] = None
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="goes through points; pass decay_points="):
        optimizer.step()


@pytest.mark.parametrize(
    "points", [(), 0.5, ((0.0,),), ((0, 1), (0, 2)), ((0, 1), (1.5, 2)), ((0, -1.0),), ((0, float("nan")),), "ab"]
)
def test_points_that_mean_nothing_are_refused(points):
    with pytest.raises(ValueError, match=r"decay_points=.*must be pairs"):
        MuonSW(matrices((4, 6)), decay="piecewise", total_steps=30, decay_points=points)


def test_a_scheduler_and_the_step_go_together():
    """Over a run with warmup, decay alone takes what the factors of the schedule say."""
    params = [nn.Parameter(torch.ones(3, 3, dtype=torch.float64))]
    optimizer = SGDSW(params, lr=0.05, weight_decay=0.9, decay="log_time")
    scheduler = LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 5))
    kept = 1.0
    for phi in decay_factors("log_time", 0.9, [0.05 * min(1.0, (t + 1) / 5) for t in range(12)], 0.05):
        kept *= 1 - phi
        params[0].grad = torch.zeros_like(params[0])
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(params[0].detach(), torch.full((3, 3), kept, dtype=torch.float64))


def test_a_group_that_joins_counts_on():
    params = matrices((4, 6), (6, 6))
    optimizer = MuonSW(params[:1], lr=0.05, decay="cosine", total_steps=30)
    run(optimizer, params[:1], 7)
    optimizer.add_param_group({"params": params[1:]})
    assert optimizer.param_groups[1]["step_count"] == 7
    run(optimizer, params, 1, start=7)
    assert [group["step_count"] for group in optimizer.param_groups] == [8, 8]


def test_adamcs_own_form_is_a_matter_of_patterns():
    """Scaled where a normalization follows, constant elsewhere."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = AdamWSW.for_model(
        model, lr=0.05, weight_decay=0.1, decay="constant", patterns={"0.weight": {"decay": "scaled"}}
    )
    rule_of = {name: g["decay"] for g in optimizer.param_groups for name in g["param_names"] if g["weight_decay"]}
    assert rule_of["0.weight"] == "scaled"
    assert rule_of["2.weight"] == "constant"
    for group in optimizer.param_groups:
        group["lr"], group["peak_lr"], group["resolved_peak_lr"] = 0.01, 0.05, 0.05
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    for name, phi in (("0.weight", 0.1 * 0.01**2 / 0.05), ("2.weight", 0.1 * 0.01)):
        torch.testing.assert_close(model.get_parameter(name).detach(), (1 - phi) * before[name])


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
@pytest.mark.parametrize("rule", ["cosine", "piecewise", "log_time"])
@pytest.mark.parametrize("before", ["scaled", "none"])
def test_a_rule_that_is_chosen_on_resume_knows_the_step(before, rule, lr):
    """Steps count under every rule, so that changing `decay` is as if the run had had the new rule's position."""
    (param,), (other,) = matrices((4, 6)), matrices((4, 6))
    optimizer = SGDSW([param], lr=0.05, weight_decay=0.3, decay=before, **OF_THE_RUN[rule])
    run(optimizer, [param], 20)
    resumed = SGDSW([other], lr=lr, weight_decay=0.3, **OF_THE_RUN[rule])
    resumed.load_state_dict(optimizer.state_dict())
    resumed.param_groups[0]["decay"] = rule
    was, other.grad = other.detach().clone(), torch.zeros_like(other)
    resumed.step()
    phi = decay_factors(rule, 0.3, [0.05] * 30, 0.05, OF_THE_RUN[rule].get("decay_points"))[20]
    torch.testing.assert_close(other.detach(), (1 - phi) * was, rtol=1e-6, atol=0)


def test_rules_that_do_not_ask_average_no_gradient():
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=0.05)
    run(optimizer, params, 3)
    assert optimizer.param_groups[0]["step_count"] == 3
    assert "gradient_average" not in optimizer.param_groups[0]


@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
@rules
def test_a_saved_state_holds_the_same_kinds_before_and_after_the_first_step(rule, lr):
    """What a checkpoint is read into may be a state that has not been stepped; and no step changes what was saved."""
    params = matrices((4, 6))
    optimizer = MuonSW(params, lr=lr, weight_decay=0.3, decay=rule, **OF_THE_RUN[rule])
    before = optimizer.state_dict()["param_groups"][0]
    run(optimizer, params, 2)
    after = optimizer.state_dict()["param_groups"][0]
    for key in ("step_count", "gradient_average"):
        assert type(before.get(key)) is type(after.get(key)), key
    kept = copy.deepcopy(after)
    run(optimizer, params, 2, start=2)
    assert kept["step_count"] == after["step_count"]
    assert kept.get("gradient_average") == after.get("gradient_average")
