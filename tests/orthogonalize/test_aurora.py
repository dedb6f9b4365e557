"""Aurora: equal to a reference, and rows of equal length."""

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
    found = aurora(batch, iterations=iterations, beta=beta)
    # 12 steps multiply rounding in directions that are not yet at one by up to 4096, once for each iteration
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("iterations", "beta", "spread"), [(1, 0.5, 0.06), (2, 0.5, 0.017), (3, 0.5, 0.006)])
def test_rows_become_equally_long(iterations, beta, spread):
    """The bounds are the values of 512 x 128 with log-normal rows, less than a fifth above what is measured."""
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


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5), (2, 3, 6, 2), (0, 3), (1, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_shape_dtype_zero_rows_and_scale(shape, dtype):
    matrix = torch.randn(shape).to(dtype)
    result = aurora(matrix)
    assert result.shape == shape
    assert result.dtype == dtype
    assert not aurora(torch.zeros(shape, dtype=dtype)).any()
    assert torch.equal(aurora(matrix * 2.0**-40), result)
    matrix = matrix.clone()
    matrix[..., :1, :] = 0
    found = aurora(matrix)
    assert found.isfinite().all()
    assert not found[..., :1, :].any()


def test_square_matrices_are_the_polars():
    square = torch.randn(3, 6, 6)
    assert torch.equal(aurora(square, polar=newton_schulz, steps=5), newton_schulz(square))


def test_an_undefined_entry_stays_in_its_matrix():
    batch = torch.randn(3, 6, 4, dtype=torch.float64)
    batch[1, 0, 0] = torch.nan
    result = aurora(batch)
    assert result[1].isnan().any()
    torch.testing.assert_close(result[[0, 2]], aurora(batch[[0, 2]]), rtol=0, atol=1e-12)
