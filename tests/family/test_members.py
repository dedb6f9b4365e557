"""What every member of the family promises: its reference's steps, whatever the layout, precision and history."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muonsw import NORMALIZERS, PRECONDITIONERS, MuonSW
from muonsw.nonfinite import Flag, NonFiniteGradientWarning, all_finite
from muonsw.normalize import NORMALIZE
from muonsw.precondition import PRECONDITION
from tests.common.problems import assert_same, clones, cosine, matrices, run, set_gradients
from tests.family.members import OPTIONS, reference

PEAK, STEPS = 0.05, 25
SCHEDULE = cosine(PEAK, STEPS)
EXACT = {"orthogonalizer": "newton_schulz", "ns_dtype": "float64"}
every_member = pytest.mark.parametrize("name", OPTIONS)


def follow(name, params, steps, **options):
    """The largest relative distance from the references after some steps."""
    references = [reference(name, param.detach(), lam=0.3, peak=PEAK) for param in params]
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.3, **OPTIONS[name], **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = SCHEDULE(step)
        set_gradients(params, step)
        for param, one in zip(params, references, strict=True):
            one.step(param.grad, SCHEDULE(step))
        optimizer.step()
    return max(float((p.detach().double() - r.W).norm() / r.W.norm()) for p, r in zip(params, references, strict=True))


def well_posed(name, shapes):
    """Shapes in which a member's rule is one: of a factor with a null space, rounding chooses the eigenvectors."""
    near = [(m, min(max(n, m - 1), m + 1) or 1) for m, n in shapes]
    return near if "soap" in name else shapes


@every_member
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_it_follows_its_reference(name, dtype, close):
    if "soap" in name and dtype == torch.float32:
        pytest.skip("rounding decides which of two near eigenvalues comes first")
    shapes = well_posed(name, [(6, 6), (4, 10), (10, 4), (6, 6), (1, 5), (5, 1)])
    params = matrices(*shapes, dtype=dtype)
    assert follow(name, params, STEPS, orthogonalizer="newton_schulz", ns_dtype=dtype) < close


@every_member
@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.float64, "float32"), (torch.float32, "float64")])
def test_state_may_be_wider_or_narrower_than_its_weight(name, dtype, state_dtype):
    params = matrices(*well_posed(name, [(6, 6), (4, 10), (10, 4)]), dtype=dtype)
    assert follow(name, params, 5, state_dtype=state_dtype, **EXACT) < 1e-4


@every_member
@settings(max_examples=10, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_it_follows_its_reference_in_any_shape(name, shapes):
    assert follow(name, matrices(*well_posed(name, shapes), dtype=torch.float64), 5, **EXACT) < 1e-9


def build(name, params, **options):
    return MuonSW(params, lr=PEAK, **{"weight_decay": 0.1, "ns_dtype": "float32", **OPTIONS[name], **options})


@every_member
def test_it_repeats_and_resumes_bit_for_bit(name):
    def trained(steps):
        params = matrices((4, 6), (6, 6), (4, 6))
        optimizer = build(name, params)
        run(optimizer, params, steps)
        return params, optimizer

    (params, optimizer), (again, _) = trained(6), trained(6)
    assert_same(params, again)
    resumed = clones(params)
    other = build(name, resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 4, start=6)
    run(other, resumed, 4, start=6)
    assert_same(params, resumed)


def snapshot(optimizer):
    return [value.clone() for state in optimizer.state.values() for value in state.values()]


def flag_on_device(work, *_):
    return Flag((~all_finite([grad for batch in work for grad in batch.grads])).float())


@every_member
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("known_by", ["host", "device"])
def test_a_step_that_is_skipped_leaves_weights_and_state(name, bad, known_by, monkeypatch):
    if known_by == "device":
        monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    params = matrices((4, 6), (6, 3))
    optimizer = build(name, params)
    run(optimizer, params, 2)
    weights, state = clones(params), snapshot(optimizer)
    set_gradients(params, 2)
    params[1].grad[0, 0] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonFiniteGradientWarning)
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same(params, weights)
    assert_same(snapshot(optimizer), state)


@every_member
def test_zero_gradients_move_nothing_but_decay(name):
    param = matrices((4, 6))[0]
    optimizer, before = build(name, [param], weight_decay=0.0), param.detach().clone()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert torch.equal(param, before)


def distance(left, right):
    return float((left - right).norm() / right.norm())


def trained_alone(name, values, grads, **options):
    """Each matrix as a parameter of its own."""
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.1, **EXACT, **OPTIONS[name], **options)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


def trained_together(name, value, grads, **options):
    param = nn.Parameter(value.clone())
    optimizer = MuonSW([param], lr=PEAK, weight_decay=0.1, **EXACT, **OPTIONS[name], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@every_member
@pytest.mark.parametrize("chunk_bytes", [None, 64])
def test_a_stack_is_its_matrices(name, chunk_bytes):
    value, grads = drawn(3, 2, 4, 5), [drawn(3, 2, 4, 5, seed=step) for step in range(1, 4)]
    together = trained_together(name, value, grads, matrix="stack", chunk_bytes=chunk_bytes)
    alone = trained_alone(name, value.reshape(-1, 4, 5).unbind(), [grad.reshape(-1, 4, 5).unbind() for grad in grads])
    assert distance(together, torch.stack(alone).view_as(value)) < 1e-12


@every_member
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("sizes", [{"split_sizes": (4, 2, 4)}, {"heads": 5}], ids=str)
def test_a_fused_projection_is_its_parts(name, axis, sizes):
    shape = (10, 6) if axis == 0 else (6, 10)
    parts = list(sizes.get("split_sizes", (2,) * 5))
    value, grads = drawn(*shape), [drawn(*shape, seed=step) for step in range(1, 4)]
    together = trained_together(name, value, grads, split_dim=axis, **sizes)
    alone = trained_alone(name, value.split(parts, axis), [grad.split(parts, axis) for grad in grads])
    assert distance(together, torch.cat(alone, axis)) < 1e-12


@every_member
def test_transposed_storage_is_the_same_matrix(name):
    value, grads = drawn(5, 8), [drawn(5, 8, seed=step) for step in range(1, 4)]
    together = trained_together(name, value, grads)
    stored = trained_together(name, value.mT.contiguous(), [g.mT.contiguous() for g in grads], transposed=True)
    assert distance(stored.mT, together) < 1e-9


@every_member
def test_a_convolution_is_one_matrix(name):
    value, grads = drawn(6, 2, 3, 3), [drawn(6, 2, 3, 3, seed=step) for step in range(1, 4)]
    together = trained_together(name, value, grads, matrix="flatten")
    flat = trained_together(name, value.flatten(1), [grad.flatten(1) for grad in grads])
    assert distance(together.flatten(1), flat) < 1e-12


@every_member
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


@every_member
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_follow_the_rule_in_float32(name, dtype):
    """What rounding loses is at most an ulp a step; state is in float32."""
    params = matrices((8, 6), (4, 10), dtype=dtype)
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


@every_member
def test_averages_may_be_kept_in_bfloat16(name):
    """Of single elements; what has a shape of its own stays in float32, and a direction is computed in float32."""
    narrow, wide = matrices((8, 8), (6, 6)), matrices((8, 8), (6, 6))
    low, high = build(name, narrow, state_dtype="bfloat16"), build(name, wide)
    run(low, narrow, 1)
    run(high, wide, 1)
    group = low.param_groups[0]
    own = {key for slot in (PRECONDITION, NORMALIZE) for key, spec in slot.specs(group).items() if spec.shape}
    for param in narrow:
        dtypes = {key: value.dtype for key, value in low.state[param].items()}
        assert dtypes == {key: torch.float32 if key in (*own, "step") else torch.bfloat16 for key in dtypes}
    after, expected = (torch.cat([param.detach().flatten() for param in params]) for params in (narrow, wide))
    before = torch.cat([param.detach().flatten() for param in matrices((8, 8), (6, 6))])
    assert distance(after - before, expected - before) < 0.1


@every_member
def test_maximizing_is_minimizing_the_opposite(name):
    up, down = matrices((4, 6)), matrices((4, 6))
    one, two = build(name, up, maximize=True), build(name, down)
    for step in range(3):
        set_gradients(up, step)
        set_gradients(down, step)
        down[0].grad.neg_()
        one.step()
        two.step()
    assert_same(up, down)


@every_member
def test_a_state_of_plain_muon_goes_on(name):
    """A state of torch's Muon has no state of slots, which begins anew."""
    param = matrices((4, 6))[0]
    muon = torch.optim.Muon([param], lr=PEAK)
    set_gradients([param], 0)
    muon.step()
    optimizer = build(name, [param])
    optimizer.load_state_dict(copy.deepcopy(muon.state_dict()))
    assert list(optimizer.state[param]) == ["momentum_buffer"]
    optimizer.step()
    adopted = build(name, [param])
    adopted.adopt(muon, peak_lr=PEAK)
    assert adopted.param_groups[0]["normalize"] == OPTIONS[name].get("normalize")
    set_gradients([param], 1)
    adopted.step()


@pytest.mark.parametrize("ns_dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("slot", ["precondition", "normalize"])
def test_members_take_directions_of_every_dtype(slot, ns_dtype):
    """Wider and narrower ones than the weights and the state."""
    for name in {"precondition": PRECONDITIONERS, "normalize": NORMALIZERS}[slot]:
        weight = nn.Parameter(torch.randn(8, 4))
        weight.grad = torch.randn(8, 4)
        optimizer = MuonSW([weight], lr=0.1, ns_dtype=ns_dtype, **{slot: name})
        optimizer.step()
        assert bool(weight.isfinite().all()), name
