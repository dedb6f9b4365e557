"""The polar factor: the fast route against the SVD, ranks, and cost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.orthogonalize import exact
from muonsw.orthogonalize.exact import polar_by_svd
from tests.orthogonalize.spectra import with_spectrum


def with_factor(spectrum, columns, seed=0):
    return with_spectrum(spectrum, columns, seed), with_spectrum(spectrum > 0, columns, seed)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 30),
    extra=st.integers(0, 30),
    log_condition=st.floats(0, 6),
    decaying=st.booleans(),
    seed=st.integers(0, 99),
)
def test_both_routes_agree_with_the_factor_by_construction(rows, extra, log_condition, decaying, seed):
    spectrum = torch.logspace(0, -log_condition, rows, dtype=torch.float64)
    if not decaying:
        spectrum[1:] = 10.0**-log_condition
    matrix, factor = with_factor(spectrum, rows + extra, seed)
    # Up to a condition number of 1e3 the Gram route, eps * 1e6; above it the SVD, eps * 1e6 from the entries.
    assert torch.linalg.matrix_norm(exact(matrix) - factor, 2) < 2e-9
    assert torch.linalg.matrix_norm(exact(matrix) - polar_by_svd(matrix), 2) < 1e-9


def test_svd_is_taken_for_the_ill_conditioned_matrices_only(monkeypatch):
    sizes, svd = [], torch.linalg.svd

    def counting_svd(matrices, **options):
        sizes.append(len(matrices))
        return svd(matrices, **options)

    monkeypatch.setattr(torch.linalg, "svd", counting_svd)
    good = [with_factor(torch.logspace(0, -2.9, 8, dtype=torch.float64), 12, seed) for seed in range(5)]
    bad = [with_factor(torch.logspace(0, -k, 8, dtype=torch.float64), 12, 9) for k in (3.1, 6)]
    exact(torch.stack([matrix for matrix, _ in good]))
    assert sizes == []
    result = exact(torch.stack([matrix for matrix, _ in [*good, *bad]]))
    assert sizes == [2]
    expected = torch.stack([factor for _, factor in [*good, *bad]])
    assert torch.linalg.matrix_norm(result - expected, 2).max() < 2e-9


@pytest.mark.parametrize("rank", range(7))
def test_rank_is_kept_and_the_rest_contributes_nothing(rank):
    spectrum = torch.zeros(6, dtype=torch.float64)
    spectrum[:rank] = torch.arange(1.0, rank + 1)
    matrix, factor = with_factor(spectrum, 9)
    result = exact(matrix)
    torch.testing.assert_close(result, factor, rtol=0, atol=1e-12)
    assert torch.linalg.matrix_rank(result) == rank
