"""Every coefficient set equals its authors' function and has the documented interval."""

import pytest
import torch

from muonsw import MuonSW
from muonsw.orthogonalize import COEFFICIENT_SETS, ORTHOGONALIZERS
from tests.common.problems import matrices, run
from tests.family.references import recorded
from tests.orthogonalize.spectra import mapped

RECORD = recorded("coefficients")
INPUTS = [torch.tensor(matrix, dtype=torch.float64) for matrix in RECORD["inputs"]]
SIGMA = torch.logspace(-2.8239, 0, 200_001, dtype=torch.float64)


@pytest.mark.parametrize("name", RECORD["sets"])
def test_equal_to_the_authors(name):
    """In float64 exactly; in their dtype with errors of similar size, because both round at different places."""
    dtype = torch.float32 if name == "polar_express" else torch.bfloat16
    results = RECORD["sets"][name]
    for matrix, wide, narrow in zip(INPUTS, results["float64"], results["own_dtype"], strict=True):
        expected = torch.tensor(wide, dtype=torch.float64)
        torch.testing.assert_close(ORTHOGONALIZERS[name](matrix), expected, rtol=0, atol=1e-12)
        actual = ORTHOGONALIZERS[name](matrix.float(), dtype=dtype).double()
        theirs = (torch.tensor(narrow, dtype=torch.float64) - expected).norm()
        assert (actual - expected).norm() < 3 * theirs + torch.finfo(dtype).eps * expected.norm()


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
    values = mapped(COEFFICIENT_SETS[name], steps, SIGMA)
    assert low <= values.min() < low + 2e-4
    assert high - 2e-4 < values.max() <= high
    assert mapped(COEFFICIENT_SETS[name], steps, 1e-12) / 1e-12 == pytest.approx(slope, abs=0.05)


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 20])
def test_singular_values_stay_bounded_at_any_number_of_steps(name, steps):
    values = mapped(COEFFICIENT_SETS[name], steps, torch.linspace(0, 1, 20_001).double())
    assert values[0] == 0
    assert (values[1:] > 0).all()
    assert values.max() < 2.0


def test_the_optimizer_takes_the_authors_number_of_steps_by_default():
    """`simple_quintic` reaches the polar factor in 12 steps but not in 3."""

    def trained(**options):
        params = matrices((4, 6))
        run(MuonSW(params, lr=0.1, weight_decay=0.0, ns_dtype="float32", **options), params, 1)
        return params[0].detach()

    simple = trained(orthogonalizer="simple_quintic")
    assert torch.equal(simple, trained(orthogonalizer="simple_quintic", ns_steps=12))
    polar, short = trained(orthogonalizer="exact"), trained(orthogonalizer="simple_quintic", ns_steps=3)
    assert (simple - polar).abs().max() < 1e-4 < (short - polar).abs().max()
