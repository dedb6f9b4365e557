"""The sets of coefficients by name: equal to the authors' functions, and to plain loops over one matrix."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.orthogonalize import COEFFICIENT_SETS, ORTHOGONALIZERS, CoefficientSet, singular_value_map
from tests.common.problems import matrices, run
from tests.family.references import coefficients as reference

RECORD = json.loads((Path(__file__).parent / "recorded/coefficients.json").read_text(encoding="utf-8"))
INPUTS = [torch.tensor(matrix, dtype=torch.float64) for matrix in RECORD["inputs"]]
every = pytest.mark.parametrize("name", COEFFICIENT_SETS)
recorded = pytest.mark.parametrize("name", RECORD["sets"])
SIGMA = torch.logspace(-2.8239, 0, 200_001, dtype=torch.float64)


def test_every_recorded_and_copied_set_is_one_of_ours():
    assert RECORD["sets"].keys() <= reference.SETS.keys() <= COEFFICIENT_SETS.keys()


def test_a_new_set_needs_its_own_line_alone(monkeypatch):
    monkeypatch.setitem(COEFFICIENT_SETS, "cubic", CoefficientSet(((1.5, -0.5, 0.0),), steps=9, divisor=1.1))
    U, S, Vh = torch.linalg.svd(INPUTS[0], full_matrices=False)
    mapped = singular_value_map(COEFFICIENT_SETS["cubic"].schedule(9))(S / S.norm())
    torch.testing.assert_close(reference.orthogonalize("cubic", INPUTS[0]), (U * mapped) @ Vh, rtol=0, atol=1e-12)


@recorded
def test_equal_to_the_authors_in_float64(name):
    for matrix, expected in zip(INPUTS, RECORD["sets"][name]["float64"], strict=True):
        found = ORTHOGONALIZERS[name](matrix)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@recorded
def test_in_the_authors_dtype_the_error_is_as_large_as_theirs(name):
    """Both round to bfloat16 (ASGO to float32), at other places: another draw of about as many roundings."""
    dtype = torch.float32 if name == "polar_express" else torch.bfloat16
    results = RECORD["sets"][name]
    for matrix, wide, narrow in zip(INPUTS, results["float64"], results["own_dtype"], strict=True):
        expected = torch.tensor(wide, dtype=torch.float64)
        found = ORTHOGONALIZERS[name](matrix.float(), dtype=dtype).double()
        theirs = (torch.tensor(narrow, dtype=torch.float64) - expected).norm()
        assert (found - expected).norm() < 3 * theirs + torch.finfo(dtype).eps * expected.norm()


@every
@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("steps", [None, 1, 3, 7])
def test_equal_to_the_reference(name, shape, steps):
    matrix = torch.randn(shape, dtype=torch.float64)
    expected = reference.orthogonalize(name, matrix, steps)
    torch.testing.assert_close(ORTHOGONALIZERS[name](matrix, steps=steps), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "steps", "low", "high", "slope"),
    [
        ("newton_schulz", 5, 0.6798, 1.2025, 484.9),
        ("newton_schulz", 8, 0.6818, 1.1344, 19815.7),
        ("polar_express", 5, 0.8702, 1.1236, 966.6),
        ("polar_express", 6, 0.9974, 1.0012, 1810.0),
        ("polar_express", 8, 1 - 1e-13, 1 + 1e-13, 6300.4),
        ("newton_schulz_you", 5, 0.6807, 1.1451, 492.7),
        ("polar_express_5", 5, 0.8588, 1.1412, 970.1),
        ("polar_express_nanochat", 5, 0.8588, 1.1412, 979.7),
        ("simple_quintic", 12, 1 - 1e-6, 1 + 1e-6, 4096.0),
    ],
)
def test_documented_interval_and_slope(name, steps, low, high, slope):
    apply = singular_value_map(COEFFICIENT_SETS[name].schedule(steps))
    values = apply(SIGMA)
    assert low <= values.min() < low + 2e-4
    assert high - 2e-4 < values.max() <= high
    assert apply(1e-12) / 1e-12 == pytest.approx(slope, abs=0.05)


@every
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 20])
def test_the_whole_range_stays_bounded_however_many_steps(name, steps):
    apply, sigma = singular_value_map(COEFFICIENT_SETS[name].schedule(steps)), torch.linspace(0, 1, 20_001).double()
    values = apply(sigma)
    assert torch.equal(apply(-sigma), -values)
    assert values[0] == 0
    assert (values[1:] > 0).all()
    assert values.max() < 2.0


@every
@pytest.mark.parametrize("exponent", [-30, 30])
def test_no_epsilon_so_the_scale_does_not_matter(name, exponent):
    matrix = torch.randn(4, 6)
    assert torch.equal(ORTHOGONALIZERS[name](matrix * 2.0**exponent), ORTHOGONALIZERS[name](matrix))


def test_the_optimizer_takes_the_authors_number_of_steps():
    """`simple_quintic` in 12 steps is the polar factor, in 5 it is far from it."""

    def trained(**options):
        params = matrices((4, 6))
        run(MuonSW(params, lr=0.1, weight_decay=0.0, ns_dtype="float32", **options), params, 1)
        return params[0].detach()

    simple = trained(orthogonalizer="simple_quintic")
    assert torch.equal(simple, trained(orthogonalizer="simple_quintic", ns_steps=12))
    polar = trained(orthogonalizer="exact")
    assert (
        (simple - polar).abs().max() < 1e-4 < (trained(orthogonalizer="simple_quintic", ns_steps=3) - polar).abs().max()
    )


def test_a_missing_name_lists_the_sets():
    with pytest.raises(ValueError, match="did you mean 'simple_quintic'"):
        MuonSW([nn.Parameter(torch.ones(2, 2))], orthogonalizer="simple_quintics")
