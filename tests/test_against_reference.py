"""The library equals the float64 reference."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw import SGDSW, AdamWSW, MuonSW
from muonsw.reference import Decay, ReferenceAdamWSW, ReferenceMuonSW, ReferenceSGDSW, ns5, polar
from tests.common.problems import cosine, follow, matrices, set_gradients

RULES = ["constant", "scaled", "squared", "independent", "fixed", "cosine", "log_time", "none"]
LAMBDA = {"squared": 2.0, "independent": 0.005, "fixed": 0.002}
PEAK, STEPS = 0.05, 60
SCHEDULE = cosine(PEAK, STEPS)


RULES_IN_DTYPES = [(rule, torch.float64) for rule in RULES] + [(rule, torch.float32) for rule in ("constant", "scaled")]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize(("form", "nesterov"), [("heavy_ball", False), ("heavy_ball", True), ("ema", False)])
def test_muon_is_algorithm_one(form, nesterov, cautious):
    """Algorithm 1 is heavy-ball without Nesterov and an exact polar factor."""
    params, shared = matrices((5, 5), (3, 8), (8, 3), dtype=torch.float64), {"nesterov": nesterov, "cautious": cautious}
    decay, heavy_ball = partial(Decay, "scaled", 0.3, PEAK), form == "heavy_ball"
    references = [
        ReferenceMuonSW(p.detach(), decay(), heavy_ball=heavy_ball, orthogonalize=polar, **shared) for p in params
    ]
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.3, momentum_form=form, orthogonalizer="exact", **shared)
    assert follow(optimizer, params, references, STEPS, SCHEDULE) < 1e-7


VECTORS, MATRICES = [(7,), (4, 5), ()], [(6, 6), (4, 10), (10, 4), (6, 6)]
CASES = {
    # the paper's listing: average, Nesterov, five Newton-Schulz steps
    "muon": (MuonSW, {}, partial(ReferenceMuonSW, nesterov=True, heavy_ball=False, orthogonalize=ns5), MATRICES),
    "adamw": (AdamWSW, {}, ReferenceAdamWSW, VECTORS),
    "cautious adamw": (AdamWSW, {"cautious": True}, partial(ReferenceAdamWSW, cautious=True), VECTORS),
    "sgd": (SGDSW, {}, ReferenceSGDSW, VECTORS),
    "sgd, ema": (
        SGDSW,
        {"momentum": 0.9, "momentum_form": "ema", "nesterov": True},
        partial(ReferenceSGDSW, beta=0.9, nesterov=True, heavy_ball=False),
        VECTORS,
    ),
}


@pytest.mark.parametrize(("rule", "dtype"), RULES_IN_DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_decay_rule_matches_the_reference_over_a_cosine(name, rule, dtype):
    build, options, reference, shapes = CASES[name]
    params, lam = matrices(*shapes, dtype=dtype), LAMBDA.get(rule, 0.3)
    references = [reference(p.detach(), Decay(rule, lam, PEAK, STEPS)) for p in params]
    options = {**options, "ns_dtype": dtype} if build is MuonSW else options
    optimizer = build(params, lr=PEAK, weight_decay=lam, decay=rule, **options, total_steps=STEPS)
    assert follow(optimizer, params, references, STEPS, SCHEDULE) < TOLERANCE[dtype]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    experts=st.integers(0, 3),
    rule=st.sampled_from(RULES),
    lam=st.floats(0, 0.9),
    beta=st.floats(0, 0.99),
    nesterov=st.booleans(),
    form=st.sampled_from(["ema", "heavy_ball"]),
    cautious=st.booleans(),
    chunk_bytes=st.sampled_from([1, 500, None]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_option_matches_the_reference(
    shape, experts, rule, lam, beta, nesterov, form, cautious, chunk_bytes, seed
):
    """Any shape, stack, option and chunking gives what one matrix at a time gives."""
    full = (experts, *shape) if experts else shape
    (param,) = matrices(full, dtype=torch.float64, seed=seed)
    slices = param.detach().reshape(-1, *shape)
    references = [
        ReferenceMuonSW(
            W, Decay(rule, lam, PEAK, STEPS), beta, nesterov, heavy_ball=form == "heavy_ball",
            orthogonalize=ns5, cautious=cautious,
        )
        for W in slices
    ]  # fmt: skip
    optimizer = MuonSW(
        [param], lr=PEAK, weight_decay=lam, decay=rule, momentum=beta, nesterov=nesterov, momentum_form=form,
        cautious=cautious, matrix="stack" if experts else None, chunk_bytes=chunk_bytes, total_steps=STEPS,
    )  # fmt: skip
    for step in range(20):
        optimizer.param_groups[0]["lr"] = SCHEDULE(step * STEPS // 20)
        set_gradients([param], step, seed)
        for reference, grad in zip(references, param.grad.reshape(-1, *shape), strict=True):
            reference.step(grad, SCHEDULE(step * STEPS // 20))
        optimizer.step()
    expected = torch.stack([r.W for r in references])
    torch.testing.assert_close(param.detach().reshape(-1, *shape), expected, rtol=1e-7, atol=1e-9)
