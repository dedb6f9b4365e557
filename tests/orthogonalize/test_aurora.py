"""Aurora equals its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw import MuonSW
from muonsw.orthogonalize import aurora
from tests.family import references


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    iterations=st.integers(1, 4),
    beta=st.floats(0, 1),
    zero_row=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_equals_the_reference(rows, columns, iterations, beta, zero_row, seed):
    """Zero rows stay zero."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    batch *= torch.randn(2, rows, 1, generator=generator, dtype=torch.float64).exp()
    batch[:, -1] *= not zero_row
    expected = torch.stack([references.aurora(matrix, iterations, beta) for matrix in batch])
    actual = aurora(batch, iterations=iterations, beta=beta)
    # each round multiplies rounding errors of singular values below one by up to 4096
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_a_saved_state_with_other_constants_is_refused():
    optimizer = MuonSW([torch.nn.Parameter(torch.ones(4, 3))], orthogonalizer="aurora")
    saved = optimizer.state_dict()
    saved["param_groups"][0]["aurora_beta"] = 0.25
    with pytest.raises(ValueError, match="'aurora_beta' is not an option: register"):
        optimizer.load_state_dict(saved)
