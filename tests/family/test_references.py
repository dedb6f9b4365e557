"""Rules take the steps of their references in float64."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw import MuonSW
from muonsw.algorithms.factors import fold
from muonsw.orthogonalize import COEFFICIENT_SETS
from muonsw.reference import Decay, ReferenceMuonSW
from tests.common.problems import RULE_OPTIONS, cosine, follow, matrices
from tests.family.members import OPTIONS, reference
from tests.family.references import (
    ReferenceASGO,
    ReferenceDion2,
    ReferenceKLShampoo,
    ReferenceLion,
    ReferenceMuonBP,
    ReferenceShampoo,
    ReferenceSOAP,
    aurora,
    orthogonalize,
)

PEAK, STEPS = 0.05, 25
SCHEDULE = cosine(PEAK, STEPS)
EXACT = {"orthogonalizer": "newton_schulz", "ns_dtype": "float64"}
every_member = pytest.mark.parametrize("name", OPTIONS)


def distance_from_reference(name, params, steps, **options):
    references = [reference(name, param.detach(), lam=0.3, peak=PEAK) for param in params]
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.3, **OPTIONS[name], **options)
    return follow(optimizer, params, references, steps, SCHEDULE)


def well_posed(name, shapes):
    """Shapes in which a member's rule is one: of a factor with a null space, rounding chooses the eigenvectors."""
    near = [(m, min(max(n, m - 1), m + 1) or 1) for m, n in shapes]
    return near if "soap" in name else shapes


@every_member
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "close"),
    [
        (torch.float64, "auto", 1e-9),
        (torch.float32, "auto", 2e-4),
        (torch.float64, "float32", 1e-3),
        (torch.float32, "float64", 2e-4),
    ],
)
def test_members(name, dtype, state_dtype, close):
    if "soap" in name and (dtype, state_dtype) != (torch.float64, "auto"):
        pytest.skip("rounding decides which of two near eigenvalues comes first")
    params = matrices(*well_posed(name, [(6, 6), (4, 10), (10, 4), (6, 6), (1, 5), (5, 1)]), dtype=dtype)
    options = {"orthogonalizer": "newton_schulz", "ns_dtype": dtype, "state_dtype": state_dtype}
    assert distance_from_reference(name, params, STEPS, **options) < close


@every_member
@settings(max_examples=10, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_members_in_any_shape(name, shapes):
    assert distance_from_reference(name, matrices(*well_posed(name, shapes), dtype=torch.float64), 5, **EXACT) < 1e-9


@pytest.mark.parametrize("name", [*COEFFICIENT_SETS, "aurora"])
def test_muon_with_every_orthogonalizer(name):
    params = matrices((7, 3), (3, 7), (5, 5), dtype=torch.float64)
    polar, decay = aurora if name == "aurora" else partial(orthogonalize, name), Decay("scaled", 0.3, PEAK)
    listing = {"orthogonalize": polar, "nesterov": True, "heavy_ball": False}
    references = [ReferenceMuonSW(param.detach(), decay, **listing) for param in params]
    optimizer = MuonSW(params, lr=PEAK, weight_decay=0.3, orthogonalizer=name, ns_dtype="float64")
    assert follow(optimizer, params, references, STEPS, SCHEDULE) < 1e-9


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("rule", ["constant", "scaled", "squared", "independent", "fixed", "cosine", "log_time"])
def test_lion(rule, cautious):
    params = matrices((7,), (4, 5), (), dtype=torch.float64)
    lam = {"squared": 2.0, "independent": 0.005, "fixed": 0.002}.get(rule, 0.3)
    decay = RULE_OPTIONS.get(rule, {})
    references = [
        ReferenceLion(p.detach(), Decay(rule, lam, PEAK, decay.get("total_steps", 1)), (0.8, 0.95), cautious)
        for p in params
    ]
    group = {"params": params, "algorithm": "lion", "betas": (0.8, 0.95), "cautious": cautious}
    optimizer = MuonSW([group], lr=PEAK, weight_decay=lam, decay=rule, **decay)
    assert follow(optimizer, params, references, 100, cosine(PEAK, 100)) < 1e-12


@pytest.mark.parametrize(("rule", "fraction"), [("constant", 0.25), ("scaled", 0.25), ("scaled", 1.0)])
def test_dion2(rule, fraction):
    params = matrices((7, 9), (8, 3), (5, 5), (1, 4), dtype=torch.float64)
    references = [ReferenceDion2(p.detach(), Decay(rule, 0.3, PEAK), fraction, 0.9) for p in params]
    group = {"params": params, "algorithm": "dion2", "fraction": fraction, "momentum": 0.9, "ns_dtype": "float64"}
    optimizer = MuonSW([group], lr=PEAK, weight_decay=0.3, decay=rule)
    assert follow(optimizer, params, references, 60, cosine(PEAK, 60)) < 1e-10


@pytest.mark.parametrize("period", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("blocks", "sizes", "axis"),
    [
        ({"heads": 2}, (4, 4), 0),
        ({"heads": 3, "split_dim": 1}, (2, 2, 2), 1),
        ({"split_sizes": (5, 3)}, (5, 3), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", ["match_rms_adamw", "spectral"])
def test_muonbp(period, blocks, sizes, axis, scale):
    params = matrices((8, 6), (8, 6), dtype=torch.float64)
    references = [ReferenceMuonBP(p.detach(), Decay("scaled", 0.3, PEAK), sizes, period, axis, scale) for p in params]
    paper = {"momentum_form": "heavy_ball", "nesterov": False, "weight_decay": 0.3, "ns_dtype": "float64"}
    optimizer = MuonSW(params, lr=PEAK, block_period=period, scale=scale, **paper, **blocks)
    assert follow(optimizer, params, references, 30, cosine(PEAK, 30)) < 1e-9


# Algorithms with factors, each against its references' directions; without decay, at a learning rate of one.


def weights_and_directions(shape, algorithm, steps, references, begun=(), **options):
    """The directions that three weights of this shape take from random gradients, beside those of their references."""
    params = matrices(*[shape] * 3, dtype=torch.float64)
    group = {"params": params, "algorithm": algorithm, **options}
    optimizer = MuonSW([group], lr=1.0, weight_decay=0.0)
    if begun:
        for param in params:
            optimizer.state[param].update({key: value.clone() for key, value in begun.items()})
    for _ in range(steps):
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.randn(shape, dtype=torch.float64)
        optimizer.step()
        found = torch.stack([old - param.detach() for old, param in zip(before, params, strict=True)])
        yield found, torch.stack([known.direction(p.grad) for known, p in zip(references, params, strict=True)])


@pytest.mark.parametrize("shape", [(4, 9), (8, 3), (5, 5)], ids=str)
def test_asgo(shape):
    """After ten steps of the iteration eigenvalues within a factor of a million are at one, to rounding times that."""
    references = [ReferenceASGO(shape) for _ in range(3)]
    for step, (found, expected) in enumerate(weights_and_directions(shape, "asgo", 20, references)):
        if step > 2:  # before that a square factor may be nearly singular
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (8, 3)], ids=str)
def test_kl_shampoo(shape):
    """To what ten steps of the iteration leave, 3e-5 a root for eigenvalues within a factor of a million, three roots
    in each direction; eps keeps them there."""
    references = [ReferenceKLShampoo(shape, 0.9, 0.8, 1e-4) for _ in range(3)]
    options = {"betas": (0.9, 0.8), "eps": 1e-4}
    for found, expected in weights_and_directions(shape, "kl_shampoo", 20, references, **options):
        assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("grafting", [None, "sgd", "adam"])
@pytest.mark.parametrize(("m", "n", "size", "height", "width"), [(4, 6, 9, 4, 6), (6, 9, 4, 3, 3), (5, 11, 4, 3, 4)])
def test_shampoo(m, n, size, height, width, grafting):
    rows, columns = (
        [slice(at, min(at + step, length)) for at in range(0, length, step)]
        for step, length in ((height, m), (width, n))
    )
    blocks = [(row, column) for row in rows for column in columns]
    shared = {"grafting": grafting, "eps": 1e-6}
    references = [ReferenceShampoo(blocks, 0.8, 0.9, 0.95, f=3, **shared) for _ in range(3)]
    options = {"block_size": size, "betas": (0.8, 0.9), "shampoo_beta": 0.95, "precondition_frequency": 3, **shared}
    for found, expected in weights_and_directions((m, n), "shampoo", 25, references, **options):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("m", "n", "longest"), [(5, 5, 9), (4, 9, 9), (8, 3, 9), (4, 9, 6), (9, 4, 6)])
@pytest.mark.parametrize("frequency", [1, 3])
def test_soap(m, n, longest, frequency):
    """The first gradient of a rectangular matrix leaves a factor singular, so factors begin with something else."""
    references = [ReferenceSOAP((m, n), 0.9, 0.8, 0.95, f=frequency, longest=longest) for _ in range(3)]
    begun = {}
    for axis, (side, length) in enumerate((("left", m), ("right", n))):
        if length <= longest:
            whole = torch.diag(torch.arange(1.0, length + 1, dtype=torch.float64))
            begun[f"factor_{side}"] = fold(whole[None])[0]
            for known in references:
                known.factors[axis] = whole
    options = {"betas": (0.9, 0.8), "shampoo_beta": 0.95, "precondition_frequency": frequency}
    options |= {"precondition_max_dim": longest}
    for found, expected in weights_and_directions((m, n), "soap", 25, references, begun, **options):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
