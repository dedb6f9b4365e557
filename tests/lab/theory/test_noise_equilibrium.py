"""The equilibrium on noise against exact moments."""

import math

import pytest

from muonsw.lab.theory.noise_equilibrium import noise_equilibrium


@pytest.mark.parametrize(("phi", "beta"), [(0.02, 0.95), (0.1, 0.5), (0.3, 0.0)])
def test_the_closed_forms_are_the_stationary_moments(phi, beta):
    """Updates u of size 1 with the cosine beta between steps, and `w <- (1 - phi) w - u`."""
    ww = wu = 0.0  # E w^2 and E w u, for the weight before the update
    for _ in range(3000):
        ww, wu = (1 - phi) ** 2 * ww - 2 * (1 - phi) * wu + 1, beta * ((1 - phi) * wu - 1)
    norm, alignment, rotation = noise_equilibrium(phi=phi, beta=beta)
    assert norm == pytest.approx(math.sqrt(ww), rel=1e-9)
    assert alignment == pytest.approx(wu / math.sqrt(ww), rel=1e-9)
    assert rotation == pytest.approx(math.sqrt(1 - wu**2 / ww) / math.sqrt(ww), rel=1e-9)
