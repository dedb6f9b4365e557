"""Fits of the late alignment: what they recover, how often their intervals cover, which limits follow."""

import numpy as np
import pytest

from muonsw.lab.diagnose.fits import fit_alignment, independent_samples, late_fits
from tests.lab.diagnose.runs import make_history

K, A0 = 40.5, 7.4e-3
ETA = np.linspace(8e-4, 4.8e-4, 60)


def residuals(generator, n, rho, size):
    noise = np.empty(n)
    noise[0] = generator.standard_normal()
    for place in range(1, n):
        noise[place] = rho * noise[place - 1] + (1.0 - rho**2) ** 0.5 * generator.standard_normal()
    return size * noise


@pytest.mark.parametrize("offset", [False, True])
def test_a_line_without_noise_is_recovered(offset):
    a0 = A0 if offset else 0.0
    fit = fit_alignment(ETA, -a0 - K * ETA, offset=offset)
    assert fit.k == pytest.approx(K, rel=1e-9)
    assert fit.a0 == pytest.approx(a0, rel=1e-9, abs=1e-12)
    assert fit.residual < 1e-12
    assert fit.at(ETA) == pytest.approx(-a0 - K * ETA, rel=1e-9)


def test_the_fit_is_that_of_numpy():
    observed = -A0 - K * ETA + residuals(np.random.default_rng(0), len(ETA), 0.3, 1e-3)
    slope, height = np.polyfit(ETA, observed, 1)
    fit = fit_alignment(ETA, observed, offset=True)
    assert (-fit.k, -fit.a0) == pytest.approx((slope, height), rel=1e-9)


def coverage(offset, rho, n, repeats=400):
    generator, eta = np.random.default_rng(1), np.linspace(2e-3, 4.8e-4, n)
    hits = {"k": 0, "a0": 0}
    for _ in range(repeats):
        a0 = A0 if offset else 0.0
        fit = fit_alignment(eta, -a0 - K * eta + residuals(generator, n, rho, 3e-3), offset=offset)
        hits["k"] += K in fit.k_interval
        hits["a0"] += fit.a0_interval is not None and A0 in fit.a0_interval
    return {key: hit / repeats for key, hit in hits.items()}


@pytest.mark.parametrize("offset", [False, True])
def test_intervals_cover_at_their_nominal_rate(offset):
    found = coverage(offset, 0.0, 60)
    # 400 trials at 95% have a standard deviation of 1.1%; counting fewer samples than there are errs upwards.
    assert 0.95 - 0.033 <= found["k"] <= 0.99
    assert not offset or 0.95 - 0.033 <= found["a0"] <= 0.99


def test_intervals_allow_for_neighbours_that_resemble_each_other():
    found = coverage(True, 0.7, 120)
    # Taken for independent, such samples count (1 + 0.7)/(1 - 0.7) = 5.7 times too much: coverage would be near 60%.
    assert found["k"] >= 0.9
    assert found["a0"] >= 0.9


def test_correlated_samples_count_for_less():
    generator = np.random.default_rng(2)
    white, red = (independent_samples(residuals(generator, 4000, rho, 1.0)) for rho in (0.0, 0.8))
    assert white == pytest.approx(4000, rel=0.1)
    assert red == pytest.approx(4000 * 0.2 / 1.8, rel=0.2)
    assert independent_samples(np.zeros(10)) == 10.0


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="at least 5 samples, got 4"):
        fit_alignment(ETA[:4], -K * ETA[:4], offset=False)
    flat = np.full(10, 1e-3)
    with pytest.raises(ValueError, match="does not vary"):
        fit_alignment(flat, -K * flat, offset=True)
    assert fit_alignment(flat, -K * flat, offset=False).k == pytest.approx(K)


def paper_alignment(rule):
    """Alignments on the paper's own fits, updates of 0.2 eta."""

    def change(_role, record):
        lr = record["lr"]
        return record | {"alignment_update": -A0 - K * lr if rule == "constant" else -20.8 * lr, "update_rms": 0.2 * lr}

    return change


@pytest.mark.parametrize(
    ("rule", "fit", "limit"), [("scaled", "origin", 0.204), ("constant", "offset", 0.0148)], ids=["scaled", "constant"]
)
def test_the_papers_fits_give_the_papers_limits(tmp_path, rule, fit, limit):
    history = make_history(
        tmp_path / rule, rule=rule, lr=4.8e-3, lam=0.1, steps=1000, every=5, change=paper_alignment(rule)
    )
    fits = late_fits(history)
    assert fits is not None
    assert fits.limit is not None
    assert fits.limit.fit == fit
    assert fits.limit.value == pytest.approx(limit, rel=5e-3)
    assert fits.limit.interval.low <= fits.limit.value <= fits.limit.interval.high
    assert fits.last_step - fits.first_step <= 1000 * 50 / 376
    assert history.lam == pytest.approx(0.1, rel=1e-9)
    assert history.update == pytest.approx(0.2, rel=1e-9)


def test_a_constant_learning_rate_supports_one_fit_only(tmp_path):
    fits = late_fits(make_history(tmp_path / "flat", rule="constant", final=1.0, steps=500, every=5))
    assert fits is not None
    assert fits.origin is not None
    assert fits.offset is None
    assert fits.limit is None


def test_too_little_telemetry_is_not_fitted(tmp_path):
    assert late_fits(make_history(tmp_path / "few", steps=200, every=50)) is None
