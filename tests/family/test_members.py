"""What members of slots promise beside `test_every_rule.py`: the steps of their references."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muonsw import NORMALIZERS, PRECONDITIONERS, MuonSW
from muonsw.slots import NORMALIZE, PRECONDITION
from tests.common.problems import cosine, follow, matrices, run, set_gradients
from tests.family.members import OPTIONS, reference

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
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_it_follows_its_reference(name, dtype, close):
    if "soap" in name and dtype == torch.float32:
        pytest.skip("rounding decides which of two near eigenvalues comes first")
    shapes = well_posed(name, [(6, 6), (4, 10), (10, 4), (6, 6), (1, 5), (5, 1)])
    params = matrices(*shapes, dtype=dtype)
    assert distance_from_reference(name, params, STEPS, orthogonalizer="newton_schulz", ns_dtype=dtype) < close


@every_member
@pytest.mark.parametrize(("dtype", "state_dtype"), [(torch.float64, "float32"), (torch.float32, "float64")])
def test_state_may_be_wider_or_narrower_than_its_weight(name, dtype, state_dtype):
    params = matrices(*well_posed(name, [(6, 6), (4, 10), (10, 4)]), dtype=dtype)
    assert distance_from_reference(name, params, 5, state_dtype=state_dtype, **EXACT) < 1e-4


@every_member
@settings(max_examples=10, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_it_follows_its_reference_in_any_shape(name, shapes):
    assert distance_from_reference(name, matrices(*well_posed(name, shapes), dtype=torch.float64), 5, **EXACT) < 1e-9


def build(name, params, **options):
    return MuonSW(params, lr=PEAK, **{"weight_decay": 0.1, "ns_dtype": "float32", **OPTIONS[name], **options})


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
    assert (after - expected).norm() < 0.1 * (expected - before).norm()


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
    assert optimizer.param_groups[0]["normalize"] == OPTIONS[name].get("normalize")


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
