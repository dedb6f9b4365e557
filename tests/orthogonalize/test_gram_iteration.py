"""The Gram iteration equals the plain one where it saves work, and never blows up."""

import pytest
import torch

from muonsw.orthogonalize import auto, gram_newton_schulz, newton_schulz
from muonsw.orthogonalize.iterations import LONGEST_SEGMENT, cost, gram_pays
from tests.orthogonalize.spectra import with_spectrum


def hard_spectra(rows, log_condition):
    """Spectra on which an iteration without restarts fails: decaying, one large, a few levels."""
    decaying = torch.logspace(0, -log_condition, rows, dtype=torch.float64)
    one_large = torch.full((rows,), 10.0**-log_condition, dtype=torch.float64)
    one_large[0] = 1
    one_larger = one_large.sqrt()
    half_zero = torch.ones(rows, dtype=torch.float64)
    half_zero[rows // 2 :] = 0
    return [decaying, one_large, one_larger, half_zero]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("log_condition", [1, 3, 6])
@pytest.mark.parametrize(
    # Rounding of the input and of the first products, eps / 2 in directions of singular value zero, grows 485
    # times in five steps of either iteration: 3e-5 in float32. Three more steps make that 41 times as much.
    ("dtype", "bound"),
    [(torch.float64, 1e-12), (torch.float32, 5e-5)],
    ids=str,
)
def test_equals_the_plain_iteration(steps, log_condition, dtype, bound):
    batch = torch.stack([with_spectrum(s, 96) for s in hard_spectra(24, log_condition)])
    result = gram_newton_schulz(batch.to(dtype), steps=steps).double()
    expected = newton_schulz(batch, steps=steps)
    growth = 1.0 if steps <= 5 else 41.0
    assert torch.linalg.matrix_norm(result - expected, 2).max() < bound * growth


@pytest.mark.parametrize("log_condition", [0, 2, 4, 6])
def test_float16_is_as_good_as_the_plain_iteration(log_condition):
    batch = torch.stack([with_spectrum(s, 96) for s in hard_spectra(24, log_condition)])
    expected = newton_schulz(batch)
    plain = torch.linalg.matrix_norm(newton_schulz(batch, dtype=torch.float16).double() - expected, 2)
    result = gram_newton_schulz(batch, dtype=torch.float16).double()
    # Rounding noise in directions of singular value zero grows 485 times on both ways: 2^-11 * 485 = 0.24. The
    # segment of three steps adds at most as much again; plain bfloat16 is off by up to 0.5 here.
    assert torch.linalg.matrix_norm(result - expected, 2).max() < max(2 * plain.max().item(), 0.1)
    assert torch.linalg.matrix_norm(result, 2).max() < 1.22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_does_not_blow_up_on_a_large_ill_conditioned_matrix(dtype):
    matrix = with_spectrum(torch.logspace(0, -4, 256, dtype=torch.float64), 1024)
    values = torch.linalg.svdvals(gram_newton_schulz(matrix, dtype=dtype).double())
    assert values.max() < 1.2025 + 2.0 * torch.finfo(dtype).eps


def test_bfloat16_is_asked_of_the_result_only():
    matrix = with_spectrum(torch.logspace(0, -4, 24, dtype=torch.float64), 96).float()
    for shaped in (matrix, matrix.mT, matrix[:, :24]):
        expected = gram_newton_schulz(shaped).bfloat16()
        assert torch.equal(gram_newton_schulz(shaped, dtype=torch.bfloat16), expected)


@pytest.mark.parametrize(("long", "gains"), [(64, False), (96, False), (100, True), (256, True)])
def test_gain_begins_at_one_and_a_half_times_longer(long, gains):
    assert gram_pays(64, long, 5) == gains


@pytest.mark.parametrize("shape", [(8, 8), (8, 12), (12, 8)], ids=str)
def test_near_square_matrices_fall_back_bit_for_bit(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gram_newton_schulz(matrix), newton_schulz(matrix))


def count_multiply_adds(fn, matrix):
    """Run with every matrix product counted."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        fn(matrix)
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_the_cost_is_what_is_executed(steps):
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    plain = count_multiply_adds(lambda X: newton_schulz(X, steps=steps), matrix)
    gram = count_multiply_adds(lambda X: gram_newton_schulz(X, steps=steps), matrix)
    assert plain == cost(16, 64, steps)
    assert gram == cost(16, 64, steps, LONGEST_SEGMENT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_auto_is_the_faster_of_the_two(dtype):
    wide, square = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((16, 64), (16, 16)))
    assert torch.equal(auto(wide, dtype=dtype), gram_newton_schulz(wide, dtype=dtype))
    assert torch.equal(auto(square, dtype=dtype), newton_schulz(square, dtype=dtype))


def test_auto_multiplies_bfloat16_where_a_cpu_was_asked_to():
    wide = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(auto(wide, dtype=torch.bfloat16), newton_schulz(wide, dtype=torch.bfloat16))
