"""Members of slots and orthogonalizers take the steps of their references in float64.

Other algorithms are compared with what their authors' code did (`test_recorded.py`).
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw import MuonSW
from muonsw.orthogonalize import COEFFICIENT_SETS
from muonsw.reference import Decay, ReferenceMuonSW
from tests.common.problems import cosine, follow, matrices
from tests.family.members import OPTIONS, reference
from tests.family.references import ReferenceMuonBP, aurora, orthogonalize

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
