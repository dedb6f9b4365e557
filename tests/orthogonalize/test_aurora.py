"""Aurora equals its reference and makes rows equally long."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.orthogonalize import aurora, exact, newton_schulz
from tests.family import references


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    iterations=st.integers(1, 4),
    beta=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_equal_to_the_reference(rows, columns, iterations, beta, seed):
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    batch *= torch.randn(2, rows, 1, generator=generator, dtype=torch.float64).exp()
    expected = torch.stack([references.aurora(matrix, iterations, beta) for matrix in batch])
    actual = aurora(batch, iterations=iterations, beta=beta)
    # each round multiplies rounding errors of singular values below one by up to 4096
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("iterations", "beta", "spread"), [(1, 0.5, 0.06), (2, 0.5, 0.017), (3, 0.5, 0.006)])
def test_rows_become_equally_long(iterations, beta, spread):
    """The bounds are at most a fifth above the values measured for this matrix."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(512, 128, generator=generator) * torch.randn(512, 1, generator=generator).exp()
    excess = {
        shape: (result.square().sum(axis) * 4).std()
        for shape, result, axis in (
            ("muon", exact(matrix), 1),
            ("tall", aurora(matrix, iterations=iterations, beta=beta), 1),
            ("wide", aurora(matrix.mT, iterations=iterations, beta=beta), 0),
        )
    }
    assert excess["muon"] > 1
    assert excess["tall"] < spread
    assert excess["wide"] < spread


def test_square_matrices_go_straight_to_the_polar_function_and_zero_rows_stay_zero():
    square = torch.randn(3, 6, 6)
    assert torch.equal(aurora(square, polar=newton_schulz, steps=5), newton_schulz(square))
    tall = torch.randn(2, 9, 4)
    tall[:, 3] = 0
    actual = aurora(tall)
    assert actual.isfinite().all()
    assert not actual[:, 3].any()
