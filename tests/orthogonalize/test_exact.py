"""The polar factor of matrices with given singular vectors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.orthogonalize import exact
from tests.orthogonalize.spectra import with_spectrum


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 30),
    extra=st.integers(0, 30),
    log_condition=st.floats(0, 6),
    scale=st.sampled_from([-300, -160, 0, 160, 300]),
    seed=st.integers(0, 99),
)
def test_the_factor_is_exact_at_any_condition_and_scale(rows, extra, log_condition, scale, seed):
    spectrum = torch.logspace(0, -log_condition, rows, dtype=torch.float64)
    matrix, factor = (with_spectrum(values, rows + extra, seed) for values in (spectrum, spectrum > 0))
    # rounding the elements perturbs the vectors of the smallest singular value by up to eps * 1e6
    assert torch.linalg.matrix_norm(exact(matrix * 10.0**scale) - factor, 2) < 2e-9


@pytest.mark.parametrize("rank", range(7))
def test_the_factor_has_the_rank_of_the_matrix(rank):
    spectrum = torch.zeros(6, dtype=torch.float64)
    spectrum[:rank] = torch.arange(1.0, rank + 1)
    result = exact(with_spectrum(spectrum, 9))
    torch.testing.assert_close(result, with_spectrum(spectrum > 0, 9), rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(result) == rank
