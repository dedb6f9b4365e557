"""What a step promises: order, atomicity, closures, hooks, missing and bad gradients."""

import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from muonsw import AdamWSW, MuonSW, NonFiniteGradientError, Telemetry, state
from muonsw.apply import apply_update
from muonsw.state import zeros
from muonsw.step import LOOK_FOR_UNFROZEN
from muonsw.work import named_params
from tests.common.problems import OPTIMIZERS, assert_same, matrices, run, set_gradients


def everything(optimizer, params):
    """All that a step may change, by value."""
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    tensors = {(n, key): t for n, p in enumerate(params) for key, t in {"": p, **optimizer.state.get(p, {})}.items()}
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}, repr(options)  # repr, for NaNs


def assert_nothing_changed(optimizer, params, before):
    tensors, options = everything(optimizer, params)
    assert_same(tensors, before[0])
    assert options == before[1]


def test_skipped_steps_are_reported_at_growing_intervals_at_the_users_line():
    (param,) = matrices((4, 4))
    optimizer = MuonSW([param], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1000)  # which wraps `step`
    param.grad = torch.full_like(param, float("nan"))
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(150):
            optimizer.step()
    assert [entry.filename for entry in caught] == [__file__] * 3
    assert [str(entry.message).split()[0] for entry in caught] == ["1", "10", "100"]
    assert "1 step has been skipped so far: the gradient of parameter 0" in str(caught[0].message)
    assert optimizer.skipped_steps == 150


def test_a_step_without_gradients_warns_once():
    params = matrices((4, 4))
    optimizer = MuonSW(params, lr=0.1)
    with pytest.warns(UserWarning, match="found no gradients, so nothing was changed"):
        optimizer.step()
    optimizer.step()


def test_a_parameter_unfrozen_later_warns_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = MuonSW.for_model(model, lr=0.1)

    def steps(count):
        for _ in range(count):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    steps(1)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [("0.weight", model[0].weight)]})
    before = model[0].weight.detach().clone()
    advice = r"0\.bias required no gradient when .* add_param_group with .* pairs, their algorithm and weight_decay"
    with pytest.warns(UserWarning, match=advice):
        steps(LOOK_FOR_UNFROZEN)
    assert not torch.equal(model[0].weight, before)
    steps(LOOK_FOR_UNFROZEN)


@pytest.mark.parametrize(("key", "value"), [("algorithm", "adamw"), ("state_dtype", "int8")])
def test_an_option_that_needs_other_state_cannot_change_during_a_run(key, value):
    params = matrices((64, 64), (64, 64))
    optimizer = MuonSW(params, lr=0.1)
    run(optimizer, params, 1)
    before = [param.detach().clone() for param in params]
    optimizer.param_groups[0][key] = value
    with pytest.raises((ValueError, KeyError), match="algorithm and state_dtype of param group 0 cannot change"):
        run(optimizer, params, 1)
    assert all(map(torch.equal, params, before))


def test_raise_names_the_parameter_and_changes_nothing():
    """A running peak that stayed would weaken decay for the rest of the run."""
    params = matrices((4, 4), (4, 4))
    named = list(zip(("a.weight", "b.weight"), params, strict=True))
    optimizer = AdamWSW(named, lr=0.1, weight_decay=0.1, nonfinite="raise", peak_lr="running_max")
    set_gradients(params, 0)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.2
    before = everything(optimizer, params)
    params[1].grad[0, 0] = float("inf")
    with pytest.raises(NonFiniteGradientError, match=r"the gradient of b\.weight holds infinities or NaNs"):
        optimizer.step()
    assert_nothing_changed(optimizer, params, before)


def test_propagate_lets_non_finite_gradients_through():
    (param,) = matrices((4, 4))
    optimizer = MuonSW([param], lr=0.1, nonfinite="propagate")
    param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert param.isnan().any()
    assert optimizer.skipped_steps == 0


def test_a_closure_runs_once_with_gradients_enabled():
    (param,) = matrices((4, 4))
    optimizer = MuonSW([param], lr=0.05)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == [True]


class Subclass(MuonSW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("cls", [MuonSW, Subclass])
def test_hooks_run_once_in_order(cls):
    (param,) = matrices((4, 4))
    optimizer = cls([param], lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(optimizer, [param], 2)
    assert seen == ["before", "after"] * 2


def test_sparse_gradients_are_refused_with_nothing_changed():
    dense = nn.Parameter(torch.ones(4, 4))
    table = nn.Embedding(4, 4, sparse=True)
    optimizer = MuonSW([("dense", dense), ("table.weight", table.weight)], lr=0.1)
    dense.grad = torch.ones_like(dense)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"table\.weight has .*make a sparse gradient dense"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(4, 4))
    assert not any(optimizer.state.values())


def test_matrices_flattened_after_construction_are_refused():
    """ZeRO replaces a group's parameters by one long vector and keeps their names."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = MuonSW.for_model(model, lr=0.05)
    for group in optimizer.param_groups:
        group["params"] = [nn.Parameter(torch.cat([param.detach().flatten() for param in group["params"]]))]
    set_gradients([group["params"][0] for group in optimizer.param_groups], 0)
    with pytest.raises(ValueError, match="ZeRO"):
        optimizer.step()


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_state_and_gradients_of_another_shape_are_refused_with_nothing_changed(algorithm):
    """Kernels of torch read and write as many elements as the parameter has."""
    params = matrices((4, 4), (4, 4))
    options = {"momentum": 0.9} if algorithm == "sgd" else {}
    optimizer = OPTIMIZERS[algorithm]([("a", params[0]), ("b", params[1])], lr=0.05, **options)
    set_gradients(params, 0)
    optimizer.step()
    params[1].data = torch.ones(6, 4)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"b has shape \(6, 4\) and a gradient of shape \(4, 4\)"):
        optimizer.step()
    params[1].grad = None
    set_gradients(params, 1)
    if optimizer.state[params[1]]:
        with pytest.raises(ValueError, match=r"of b has shape \(4, 4\), but the parameter now has \(6, 4\)"):
            optimizer.step()
    assert_same(before, [param.detach() for param in params])
    optimizer.state[params[1]].clear()
    optimizer.step()
    assert not torch.equal(params[1], before[1])


def test_a_mixed_optimizer_steps_each_group_by_its_own_algorithm():
    shapes = [(4, 4), (5,), (3, 3)]
    params, apart = matrices(*shapes), matrices(*shapes)
    groups = [
        {"params": [params[0]]},
        {"params": [params[1]], "algorithm": "adamw", "weight_decay": 0.0},
        {"params": [params[2]], "algorithm": "sgd", "momentum": 0.5},
    ]
    together = MuonSW(groups, lr=0.05, weight_decay=0.3)
    separate = [
        MuonSW([apart[0]], lr=0.05, weight_decay=0.3),
        OPTIMIZERS["adamw"]([apart[1]], lr=0.05, weight_decay=0.0, betas=(0.9, 0.95)),
        OPTIMIZERS["sgd"]([apart[2]], lr=0.05, weight_decay=0.3, momentum=0.5),
    ]
    for step in range(5):
        for tensors in (params, apart):
            set_gradients(tensors, step)
        together.step()
        for optimizer in separate:
            optimizer.step()
    assert_same(params, apart)


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_tensor_learning_rate_and_decay_give_the_same(algorithm):
    plain, held = matrices((4, 6), dtype=torch.float64), matrices((4, 6), dtype=torch.float64)
    lr, lam = torch.tensor(0.05, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    cls = OPTIMIZERS[algorithm]
    a, b = cls(plain, lr=0.05, weight_decay=0.3), cls(held, lr=lr, weight_decay=lam)
    for step in range(6):
        a.param_groups[0]["lr"] = 0.05 / (1 + step)
        lr.fill_(0.05 / (1 + step))
        run(a, plain, 1, start=step)
        run(b, held, 1, start=step)
    torch.testing.assert_close(plain[0], held[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "in_one_group", "expected"),
    [({}, {}, 1), ({"weight_decay": 0.0}, {}, 0), ({"decay": "none"}, {}, 0), ({}, {"weight_decay": 0.1}, 0)],
)
def test_a_run_without_decay_warns_once(options, in_one_group, expected):
    """A framework's groups may set 0.0; no warning if the user chose that or a group decays."""
    params = matrices((4, 6), (6,))
    groups = [{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:], "weight_decay": 0.0, **in_one_group}]
    with warnings.catch_warnings(record=True, action="always") as caught:
        run(AdamWSW(groups, lr=0.1, **options), params, 3)
    assert len(caught) == expected


REFUSED = {
    "unknown decay rule 'scale'": {"decay": "scale"},
    "above its peak nan": {"peak_lr": math.nan},
    "depends on the length of the run": {"decay": "cosine"},
    "above its peak": {"lr": 5.0},
    "times the weight": {"weight_decay": 50.0},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_step_that_a_later_group_refuses_changes_nothing(message):
    params = matrices((4, 6), (6, 6))
    optimizer = MuonSW([{"params": [p]} for p in params], lr=0.05, weight_decay=0.1)
    run(optimizer, params, 2)
    optimizer.param_groups[0]["lr"] = 0.04
    optimizer.param_groups[1].update(REFUSED[message])
    set_gradients(params, 2)
    before = everything(optimizer, params)
    for _ in range(2):  # refused every time
        with pytest.raises(ValueError, match=message):
            optimizer.step()
        assert_nothing_changed(optimizer, params, before)


def fail_at(number, function):
    """Wrap the function so that this call, counted from 1, runs out of memory."""
    calls = itertools.count(1)

    def failing(*args, **kwargs):
        if next(calls) == number:
            raise torch.OutOfMemoryError
        return function(*args, **kwargs)

    return failing


def test_a_step_without_memory_for_its_state_changes_nothing(monkeypatch):
    params = matrices((4, 6), (6, 6), (5,))
    groups = [{"params": [p], "algorithm": name} for p, name in zip(params, ("soap", "muon", "adamw"), strict=True)]
    optimizer = MuonSW(groups, lr=torch.tensor(0.05), decay="log_time")
    params[2].requires_grad_(False)
    run(optimizer, params[:2], 1)
    params[2].requires_grad_(True)
    set_gradients(params, 1)
    before = everything(optimizer, params)
    monkeypatch.setattr("muonsw.state.zeros", fail_at(1, zeros))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert_nothing_changed(optimizer, params, before)


def test_a_step_without_memory_for_a_later_chunk_is_not_counted(monkeypatch):
    """Earlier chunks stay moved: undoing them would take a copy of everything."""
    params = matrices((4, 6), (6, 6))
    groups = [{"params": params[:1], "algorithm": "soap"}, {"params": params[1:]}]
    optimizer = MuonSW(groups, lr=torch.tensor(0.05), decay="log_time")
    run(optimizer, params, 1)
    set_gradients(params, 1)
    before = everything(optimizer, params)
    monkeypatch.setattr("muonsw.step.apply_update", fail_at(2, apply_update))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    assert everything(optimizer, params)[1] == before[1]


def test_options_may_change_within_their_bounds():
    """As under OneCycleLR, which cycles momentum, and under schedules of the weight decay."""
    params = matrices((4, 6), dtype=torch.float64)
    optimizer, average = MuonSW(params, lr=0.05, weight_decay=0.1), torch.zeros(4, 6, dtype=torch.float64)
    for step in range(3):
        beta, lam = 0.85 + 0.05 * step, 0.1 * (step + 1)
        optimizer.param_groups[0].update(momentum=beta, weight_decay=lam, betas=[0.9, 0.9])
        run(optimizer, params, 1, start=step)
        average = beta * average + (1 - beta) * params[0].grad
        torch.testing.assert_close(optimizer.state[params[0]]["momentum_buffer"], average)
        assert optimizer.summary().groups[0].decay == pytest.approx(lam * 0.05)


def test_a_scheduler_that_cycles_betas_but_not_momentum_warns_once():
    """torch's OneCycleLR cycles either betas or momentum, in all groups alike."""
    params = matrices((4, 6), (6,))
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "adamw"}]
    optimizer = MuonSW(groups, lr=0.05)
    scheduler = OneCycleLR(optimizer, max_lr=0.05, total_steps=10)
    with pytest.warns(UserWarning, match=r"momentum.*stays at 0\.95; pass cycle_momentum=False"):
        run(optimizer, params, 1)
    scheduler.step()
    run(optimizer, params, 1, start=1)  # without a warning, which would be an error
    for part, options, cycle in ((params[:1], {}, False), (params[1:], {"algorithm": "adamw"}, True)):
        optimizer = MuonSW([{"params": part, **options}], lr=0.05)
        OneCycleLR(optimizer, max_lr=0.05, total_steps=10, cycle_momentum=cycle)
        run(optimizer, part, 1)


def test_a_training_step_compiles_around_it():
    """The usual form: forward, backward and step in one compiled function."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        optimizer = MuonSW.for_model(model, lr=0.05, ns_dtype="float32")

        def train(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(train, backend="eager") if compiled else train
        for _ in range(4):
            step(torch.ones(3, 4))
        results.append([param.detach() for param in model.parameters()])
    assert_same(*results)


OPTIONS = [{}, {"norm": "hyperball"}, {"decay": "gradient_norm"}, {"dtype": torch.bfloat16}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_torchs_default_dtype_and_device_change_nothing(algorithm, options):
    """LLM code sets the default dtype, notebooks the device."""

    def trained(default_device, default_dtype, dtype=torch.float32, **options):
        params, grads = matrices((12, 8), (8, 16), (3, 6, 8), dtype=dtype), []
        for step in range(3):
            set_gradients(params, step)
            grads.append([param.grad for param in params])
        torch.set_default_device(default_device)
        torch.set_default_dtype(default_dtype)
        try:
            group = {"params": params, "algorithm": algorithm, "momentum": 0.9, "matrix": "stack"}
            optimizer = MuonSW([group], lr=0.05, ns_dtype="float32", weight_decay=0.01, peak_lr=0.05, **options)
            telemetry = Telemetry(optimizer, every=2, spectral_norm=True)
            for step in grads:
                for param, grad in zip(params, step, strict=True):
                    param.grad = grad
                optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        return [t.detach() for p in params for t in (p, *optimizer.state[p].values())], telemetry.last["all"]

    expected, actual = trained(None, torch.float32, **options), trained("meta", torch.bfloat16, **options)
    assert {tensor.device.type for tensor in actual[0]} == {"cpu"}
    assert_same(actual[0], expected[0])
    assert actual[1] == expected[1]


def test_the_first_step_names_each_parameter_once(monkeypatch):
    """Naming all parameters for each of them took minutes for a model of ten thousand."""
    named = []
    monkeypatch.setattr(state, "named_params", lambda *given: named.append(given) or named_params(*given))
    optimizer = AdamWSW(matrices(*[(2, 2)] * 20), lr=0.1)
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    assert len(named) == len(optimizer.param_groups)
