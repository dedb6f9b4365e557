"""What every algorithm with factors promises: its authors' steps, whatever the layout, precision and history."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn

from muonsw import MuonSW, NonFiniteGradientWarning
from muonsw.nonfinite import Flag
from muonsw.replay import obstacle
from muonsw.step import collect
from tests.common.problems import assert_same, clones, matrices, run, set_gradients
from tests.family.algorithms import OPTIONS
from tests.family.gradients import gradient, start
from tests.family.record import asgo, kl_shampoo, shampoo, soap

every_algorithm = pytest.mark.parametrize("name", OPTIONS)


def build(name, params, lr=0.05, weight_decay=0.1, chunk_bytes=None, **options):
    group = {"params": params, **OPTIONS[name], **options}
    return MuonSW([group], lr=lr, weight_decay=weight_decay, chunk_bytes=chunk_bytes)


def recorded_runs():
    """The options of each recorded run, its shape, and the weights after each step without decay."""
    renamed = {"frequency": "precondition_frequency"}
    for module in (soap, shampoo, kl_shampoo, asgo):
        data = json.loads(module.RECORDED.read_text(encoding="utf-8"))
        for recorded in data["runs"]:
            options = {renamed.get(key, key): value for key, value in recorded.items()}
            weights = options.pop("weights", None) or options.pop("float64")
            if "beta2" in options:
                options["betas"] = (options.pop("momentum", 0.9), options.pop("beta2"))
            if options.get("betas", (0, 0))[1] == 1:
                options |= {"betas": (options["betas"][0], 0.5), "shampoo_beta": 1.0}
            for kept in ("float16", "float64"):
                options.pop(kept, None)
            lr, name = options.pop("lr", data.get("lr")), module.RECORDED.stem
            yield pytest.param(name, options.pop("shape"), lr, options, weights, id=f"{name}-{len(weights[0])}")


@pytest.mark.parametrize(("name", "shape", "lr", "options", "weights"), list(recorded_runs()))
def test_steps_are_those_that_the_authors_code_took(name, shape, lr, options, weights):
    """Decay comes on top of their steps without decay: it is the same fraction at each, and in the first as well."""
    param, decayed = nn.Parameter(start(shape)), nn.Parameter(start(shape))
    optimizer, other = (
        MuonSW([{"params": [one], "algorithm": name, **options}], lr=lr, weight_decay=lam, decay="constant")
        for one, lam in ((param, 0.0), (decayed, 0.7))
    )
    expected = start(shape)
    for step, after in enumerate(torch.tensor(weights, dtype=torch.float64)):
        before = param.detach().clone()
        param.grad, decayed.grad = gradient(shape, step), gradient(shape, step)
        optimizer.step()
        other.step()
        torch.testing.assert_close(param.detach(), after, rtol=1e-8, atol=1e-10)
        expected = (1 - 0.7 * lr) * expected + (param.detach() - before)
        torch.testing.assert_close(decayed.detach(), expected, rtol=1e-9, atol=1e-12)


@every_algorithm
def test_it_repeats_and_resumes_bit_for_bit(name):
    def trained(steps):
        params = matrices((4, 6), (6, 6), (4, 6))
        optimizer = build(name, params)
        run(optimizer, params, steps)
        return params, optimizer

    (params, optimizer), (again, _) = trained(5), trained(5)
    assert_same(params, again)
    resumed = clones(params)
    other = build(name, resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 5, start=5)
    run(other, resumed, 5, start=5)
    assert_same(params, resumed)


def snapshot(optimizer):
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


@every_algorithm
@pytest.mark.parametrize("taken", [0, 1, 2, 3])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_step_that_is_skipped_leaves_weights_and_state(name, taken, on_device, monkeypatch):
    """Also the first one, and one that refreshes; on GPUs the host does not know of it."""
    params = matrices((4, 4), (6, 3))
    optimizer = build(name, params)
    run(optimizer, params, taken)
    weights, state = clones(params), snapshot(optimizer)
    set_gradients(params, taken)
    params[1].grad[0, 0] = torch.nan
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteGradientWarning)
        if on_device:
            patched.setattr("muonsw.step.finite_flag", lambda *_: Flag(torch.tensor(1.0)))
        optimizer.step()
    assert_same(params, weights)
    assert_same(snapshot(optimizer), state or [torch.zeros_like(value) for value in snapshot(optimizer)])
    run(optimizer, params, 3, start=taken + 1)
    assert all(param.isfinite().all() for param in params)
    assert not any(torch.equal(param, before) for param, before in zip(params, weights, strict=True))


@every_algorithm
def test_zero_gradients_move_nothing(name):
    params = matrices((4, 6), (6, 6))
    optimizer, before = build(name, params, weight_decay=0.0), clones(params)
    for _ in range(5):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    assert_same(params, before)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(name, values, grads, **options):
    """Parameters after a step with each of `grads`, a list for each step."""
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = build(name, params, **options)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def close(left, right):
    """Up to rounding: SOAP in the null space of a singular factor depends on how it is rounded."""
    return float((left - right).norm() / right.norm()) < 1e-9


@every_algorithm
@pytest.mark.parametrize("chunk_bytes", [None, 64])
def test_a_stack_is_its_matrices(name, chunk_bytes):
    value, grads = drawn(3, 2, 4, 4), [drawn(3, 2, 4, 4, seed=step) for step in range(1, 7)]
    (together,) = trained(name, [value], [[grad] for grad in grads], matrix="stack", chunk_bytes=chunk_bytes)
    alone = trained(name, value.reshape(-1, 4, 4).unbind(), [grad.reshape(-1, 4, 4).unbind() for grad in grads])
    assert close(together, torch.stack(alone).view_as(value))


@every_algorithm
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sizes", [{"split_sizes": (4, 2, 4)}, {"heads": 5}], ids=str)
def test_a_fused_projection_is_its_parts(name, axis, sizes):
    shape = (10, 4) if axis == 0 else (4, 10)
    parts = list(sizes.get("split_sizes", (2,) * 5))
    value, grads = drawn(*shape), [drawn(*shape, seed=step) for step in range(1, 7)]
    (together,) = trained(name, [value], [[grad] for grad in grads], split_dim=axis, **sizes)
    alone = trained(name, value.split(parts, axis), [grad.split(parts, axis) for grad in grads])
    assert close(together, torch.cat(alone, axis))


@every_algorithm
def test_transposed_storage_is_the_same_matrix(name):
    value, grads = drawn(5, 5), [drawn(5, 5, seed=step) for step in range(1, 7)]
    (together,) = trained(name, [value], [[grad] for grad in grads])
    (stored,) = trained(name, [value.mT.contiguous()], [[grad.mT.contiguous()] for grad in grads], transposed=True)
    assert close(stored.mT, together)


@every_algorithm
def test_a_convolution_is_one_matrix(name):
    value, grads = drawn(8, 2, 2, 2), [drawn(8, 2, 2, 2, seed=step) for step in range(1, 7)]
    (together,) = trained(name, [value], [[grad] for grad in grads], matrix="flatten")
    (flat,) = trained(name, [value.flatten(1)], [[grad.flatten(1)] for grad in grads])
    assert close(together.flatten(1), flat)


@every_algorithm
def test_parameters_without_a_gradient_keep_their_state(name):
    params = matrices((4, 6), (4, 6), (6, 4))
    optimizer = build(name, params)
    run(optimizer, params, 2)
    kept, before = params[1], {key: value.clone() for key, value in optimizer.state[params[1]].items()}
    value = kept.detach().clone()
    set_gradients(params, 2)
    kept.grad = None
    optimizer.step()
    assert torch.equal(kept, value)
    assert all(torch.equal(optimizer.state[kept][key], saved) for key, saved in before.items())


@every_algorithm
def test_a_first_gradient_may_come_late(name):
    params = matrices((4, 4), (4, 4), dtype=torch.float64)
    optimizer, before = build(name, params, weight_decay=0.0), params[1].detach().clone()
    for step in range(12):
        set_gradients(params, step)
        params[1].grad = params[1].grad if step > 4 else None
        optimizer.step()
    moved = (params[1].detach() - before).square().mean().sqrt()
    assert 0 < moved < 0.05 * 7 * 2


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_follow_the_rule_in_float32(name, dtype):
    """What rounding loses is at most an ulp a step; state is in float32."""
    params = matrices((6, 6), (4, 4), dtype=dtype)
    wide = [nn.Parameter(param.detach().float()) for param in params]
    low, high = build(name, params), build(name, wide)
    steps = 4
    for step in range(steps):
        set_gradients(params, step)
        for param, other in zip(params, wide, strict=True):
            other.grad = param.grad.float()
        low.step()
        high.step()
    for param, other in zip(params, wide, strict=True):
        assert {value.dtype for value in low.state[param].values()} == {torch.float32}
        ulp = torch.finfo(dtype).eps * float(other.detach().abs().max())
        assert float((param.detach().float() - other.detach()).abs().max()) <= steps * ulp


@every_algorithm
def test_averages_may_be_kept_in_bfloat16_and_factors_stay_in_float32(name):
    params = matrices((4, 4), (6, 6))
    optimizer = build(name, params, state_dtype="bfloat16")
    run(optimizer, params, 4)
    for state in optimizer.state.values():
        dtypes = {key: value.dtype for key, value in state.items()}
        assert dtypes.pop("exp_avg") == torch.bfloat16
        dtypes.pop("exp_avg_sq", None)
        assert set(dtypes.values()) == {torch.float32}
    assert all(param.isfinite().all() for param in params)


@every_algorithm
def test_maximizing_is_minimizing_the_opposite(name):
    up, down = matrices((4, 6)), matrices((4, 6))
    one, two = build(name, up, maximize=True), build(name, down)
    for step in range(4):
        set_gradients(up, step)
        set_gradients(down, step)
        down[0].grad.neg_()
        one.step()
        two.step()
    assert_same(up, down)


@every_algorithm
def test_only_a_rule_that_counts_no_steps_may_be_captured(name):
    params = matrices((4, 6))
    optimizer = build(name, params)
    set_gradients(params, 0)
    batch = collect(optimizer)[0]._replace(device=torch.device("cuda"))
    assert ("every few steps" in obstacle([batch], "skip")) == (name != "asgo")


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_size_of_state_is_known_before_it_is_made(name, dtype):
    params = matrices((6, 6), (4, 10), (3, 10, 4), dtype=dtype)
    optimizer = build(name, params[:2])
    optimizer.add_param_group({"params": params[2:], **OPTIONS[name], "matrix": "stack", "split_sizes": (4, 6)})
    announced = optimizer.summary().state
    set_gradients(params, 0)
    optimizer.step()
    made = [value.nbytes for state in optimizer.state.values() for value in state.values()]
    assert sum(announced.values()) == sum(made)


@every_algorithm
def test_parameters_that_were_flattened_are_shown_and_refused(name):
    """As DeepSpeed's ZeRO does."""
    params = matrices((4, 6))
    optimizer = build(name, params)
    params[0].data = params[0].data.flatten()
    assert "24" in optimizer.routing()
    set_gradients(params, 0)
    with pytest.raises(ValueError, match="something has flattened the parameters"):
        optimizer.step()


def test_options_that_decide_the_shape_of_state_cannot_change_in_mid_run():
    params = matrices((4, 6), (6, 6))
    optimizer = build("shampoo", params)
    run(optimizer, params, 2)
    weights = clones(params)
    optimizer.param_groups[0]["block_size"] = 8
    with pytest.raises(ValueError, match=r"factors_left of parameter 0 .* has shape \(8, 5\), .* ask for \(4, 5\)"):
        run(optimizer, params, 1, start=2)
    assert_same(params, weights)
    for param in params:
        optimizer.state[param].clear()
    run(optimizer, params, 3, start=2)


def test_a_side_that_is_too_long_has_no_factor_and_two_are_refused():
    param = nn.Parameter(torch.randn(3, 12))
    optimizer = MuonSW([{"params": [param], "algorithm": "soap", "max_precond_dim": 8}], lr=0.01)
    param.grad = torch.randn_like(param)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[param].items()}
    assert shapes["basis_left"] == (3, 3)
    assert shapes["basis_right"] == shapes["factor_right"] == (1, 1)
    with pytest.raises(ValueError, match=r"max_precond_dim=2 leaves both sides of .* a matrix of 3 x 12"):
        MuonSW([{"params": [param], "algorithm": "soap", "max_precond_dim": 2}], lr=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "sopa"}, "did you mean 'soap'"),
        ({"algorithm": "soap", "precondition_frequncy": 3}, "did you mean 'precondition_frequency'"),
        ({"algorithm": "soap", "precondition_frequency": 0}, "a whole number of at least 1"),
        ({"algorithm": "soap", "eps": 0.0}, "eps=0: SOAP begins with averages of zero"),
        ({"algorithm": "kl_shampoo", "eps": 0.0}, "eps=0: KL-Shampoo takes roots"),
        ({"algorithm": "soap", "shampoo_beta": 1.5}, r"shampoo_beta=1.5: must be in \[0, 1\]"),
        ({"algorithm": "shampoo", "grafting": "adm"}, "must be one of None, 'adam', 'sgd'"),
        ({"algorithm": "shampoo", "block_size": 2.5}, "a whole number of at least 1"),
        ({"algorithm": "kl_shampoo", "ns_dtype": "bfloat16"}, "ns_dtype='bfloat16' is too coarse"),
    ],
    ids=str,
)
def test_errors_name_the_option_and_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        MuonSW([{"params": matrices((4, 6)), **options}], lr=0.01)
