"""Norm rules against the float64 reference, and what they promise about norms."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from muonsw import ALGORITHMS, NORM_RULES, SGDSW, MuonSW
from muonsw.addons.norm_rules import NormRule
from muonsw.reference import Decay, ReferenceSGDSW
from tests.common.problems import (
    WITH_REFERENCE,
    assert_resumes,
    assert_same,
    cosine,
    follow,
    matrices,
    run,
    set_gradients,
    step_with_nan,
)

PEAK, STEPS = 0.05, 30
SCHEDULE = cosine(PEAK, STEPS)
ACTING = [name for name in NORM_RULES if name != "free"]
norm_rules = pytest.mark.parametrize("norm", ACTING)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
CLASSES = {**WITH_REFERENCE, "sgd": (SGDSW, partial(ReferenceSGDSW, beta=0.9))}
OPTIONS = {"sgd": {"momentum": 0.9}}
every = pytest.mark.parametrize("algorithm", CLASSES)


@every
@norm_rules
@pytest.mark.parametrize(("dtype", "rule", "chunk_bytes"), [
    (torch.float64, "constant", None), (torch.float64, "scaled", 16),
    (torch.float32, "constant", 16), (torch.float32, "scaled", None),
])  # fmt: skip
def test_it_matches_the_reference(algorithm, norm, dtype, rule, chunk_bytes):
    """Norms are of whole weights, even if the algorithm works in smaller chunks."""
    build, reference = CLASSES[algorithm]
    params = matrices((6, 6), (4, 10), dtype=dtype)
    references = [reference(p.detach(), Decay(rule, 0.5, PEAK, norm=norm)) for p in params]
    options = {"lr": PEAK, "weight_decay": 0.5, "decay": rule, "norm": norm, "chunk_bytes": chunk_bytes}
    optimizer = build(params, **options, **{**OPTIONS, "muon": {"ns_dtype": dtype}}.get(algorithm, {}))
    assert follow(optimizer, params, references, STEPS, SCHEDULE) < TOLERANCE[dtype]


@norm_rules
def test_target_norm_is_the_root_mean_square_of_the_elements(norm):
    params = matrices((6, 6), (4, 10), dtype=torch.float64)
    references = [
        CLASSES["muon"][1](p.detach(), Decay("constant", 0.5, PEAK, norm=norm, R=0.3 * p.numel() ** 0.5))
        for p in params
    ]
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.5, decay="constant", norm=norm, target_norm=0.3)
    assert follow(optimizer, params, references, 20, lambda _: PEAK) < 1e-9
    assert "radius" not in optimizer.state[params[0]]


def assert_moves_as_its_parts(together, apart, cut):
    (whole,), parts = together.param_groups[0]["params"], apart.param_groups[0]["params"]
    for step in range(8):
        set_gradients([whole], step)
        for part, grad in zip(parts, cut(whole.grad), strict=True):
            part.grad = grad.clone()
        together.step()
        apart.step()
    for part, alone in zip(cut(whole.detach()), parts, strict=True):
        torch.testing.assert_close(part, alone.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("algorithm", "stacked"),
    [*((name, {"matrix": "stack"}) for name in CLASSES), ("adamw", {"role": "experts"})],
    ids=str,
)
@norm_rules
def test_every_expert_of_a_stack_has_its_own_norm(algorithm, stacked, norm):
    """A stack moves as its matrices would as separate parameters."""
    (stack,) = matrices((3, 4, 5), dtype=torch.float64)
    stack.data *= torch.tensor([1.0, 2.0, 5.0]).view(3, 1, 1)
    single = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    options = {"lr": 0.05, "weight_decay": 0.5, "norm": norm, **OPTIONS.get(algorithm, {})}
    build = CLASSES[algorithm][0]
    assert_moves_as_its_parts(
        build([{"params": [stack], **stacked}], **options), build(single, **options), Tensor.unbind
    )


@norm_rules
@pytest.mark.parametrize(("split_dim", "shape"), [(0, (9, 5)), (1, (5, 9)), (0, (2, 9, 5)), (1, (2, 5, 9))])
def test_each_part_of_a_fused_projection_has_its_own_norm(norm, split_dim, shape):
    (fused,) = matrices(shape, dtype=torch.float64)
    axis = len(shape) - 2 + split_dim
    fused.data.narrow(axis, 0, 2).mul_(7)
    parts = [nn.Parameter(part.clone()) for part in fused.detach().split([2, 7], axis)]
    options = {"lr": 0.05, "weight_decay": 0.5, "norm": norm, "matrix": "stack", "scale": "none"}
    together = MuonSW([fused], split_sizes=(2, 7), split_dim=split_dim, chunk_bytes=64, **options)
    assert_moves_as_its_parts(together, MuonSW(parts, **options), lambda whole: whole.split([2, 7], axis))


def test_groups_that_a_rule_cannot_act_on_are_refused():
    for options, message in (
        ({"dtype": torch.bfloat16}, "needs float32 weights, but parameter 0 of group 0 is"),  # would round the change
        ({"cautious": True}, "acts on whole weights"),
        ({"heads": 2, "block_period": 2}, "blocks have no norm"),
    ):
        params = matrices((4, 6), dtype=options.pop("dtype", torch.float32))
        with pytest.raises(ValueError, match=message):
            MuonSW(params, norm="target", **options)
    params = [*matrices((4, 6)), nn.Parameter(torch.zeros(4, 6))]
    before = params[0].detach().clone()
    optimizer = MuonSW([{"params": [p]} for p in params], lr=0.1, norm="target")
    with pytest.raises(ValueError, match="parameter 0 of group 1 holds a weight of norm zero"):
        run(optimizer, params, 1)
    assert not optimizer.state[params[0]]
    assert torch.equal(params[0], before)
    run(MuonSW(params, lr=0.1, norm="target", target_norm=0.1), params, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_leaves_its_update_to_the_rule(algorithm, monkeypatch):
    """The user's rule here scales each update to the norm of its weight."""
    rule = NormRule(lambda norms, eta, phi: (1 - phi, eta * norms.W / norms.U.clamp(min=1e-300)))
    monkeypatch.setitem(NORM_RULES, "relative", rule)
    params = matrices((6, 6), (4, 10), dtype=torch.float64)
    groups = [{"params": params, "algorithm": algorithm}]
    optimizer = MuonSW(groups, lr=0.05, weight_decay=0.1, decay="none", norm="relative")
    for step in range(5):
        before = [p.detach().clone() for p in params]
        run(optimizer, params, 1, start=step)
        for now, then in zip(params, before, strict=True):
            moved = float((now.detach() - then).norm() / then.norm())
            # SOAP's first step only makes its bases
            assert moved == pytest.approx(0.05, rel=1e-9) or (moved == 0 and step == 0)


@every
@norm_rules
def test_it_resumes_bit_for_bit_with_the_first_norm(algorithm, norm):
    options = {"lr": 0.05, "weight_decay": 0.3, "norm": norm, **OPTIONS.get(algorithm, {})}
    build = partial(CLASSES[algorithm][0], **options)
    params = matrices((4, 6), (6, 6))
    optimizer = build(params)
    run(optimizer, params, 6)
    other = assert_resumes(build, params, optimizer, start=6)
    resumed = other.param_groups[0]["params"]
    assert torch.equal(other.state[resumed[0]]["radius"], optimizer.state[params[0]]["radius"])


@norm_rules
def test_groups_without_decay_are_left_alone(norm):
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8))
    optimizer = MuonSW.for_model(model, lr=0.05, norm=norm)
    model(torch.arange(7)).square().mean().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        for param in group["params"]:
            assert ("radius" in optimizer.state[param]) == (group["weight_decay"] != 0)


@every
@norm_rules
@pytest.mark.usefixtures("known_by")
def test_skipped_steps_and_steps_at_rate_zero_leave_the_weights(algorithm, norm):
    params = matrices((4, 6))
    optimizer = CLASSES[algorithm][0](params, lr=0.05, weight_decay=0.3, norm=norm, **OPTIONS.get(algorithm, {}))
    run(optimizer, params, 2)
    before = [p.detach().clone() for p in params]
    step_with_nan(optimizer, params, 2)
    assert_same([p.detach() for p in params], before)
    run(optimizer, params, 1, start=3, schedule=lambda _: 0.0)
    assert_same([p.detach() for p in params], before)


def test_an_update_that_cancels_a_weight_leaves_it_finite():
    """Rounding takes the squared norm of the remainder below zero for some of these weights."""
    for param in matrices(*[(4, 5)] * 20, dtype=torch.float64):
        param.grad = param.detach().clone()
        SGDSW([param], lr=1.0, weight_decay=1.0, norm="hyperball").step()
        assert param.isfinite().all()


@every
@norm_rules
def test_weights_without_elements_are_stepped_with_the_others(algorithm, norm):
    params, alone = matrices((4, 6), (0, 6), (4, 0)), matrices((4, 6))
    for given in (params, alone):
        run(CLASSES[algorithm][0](given, lr=0.05, weight_decay=0.1, norm=norm), given, 3)
    assert_same(params[:1], alone)
