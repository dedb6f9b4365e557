"""Properties of every orthogonalizer, of polynomial iterations and of their coefficient sets."""

import math
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from muonsw import MuonSW
from muonsw.orthogonalize import (
    COEFFICIENT_SETS,
    ORTHOGONALIZERS,
    Iteration,
    aurora,
    auto,
    exact,
    gram_newton_schulz,
    newton_schulz,
    polar_express,
)
from muonsw.orthogonalize.iterations import gram_saves
from tests.common.problems import matrices, run
from tests.family.references import recorded
from tests.orthogonalize.spectra import hard_spectra, mapped, with_spectrum

ITERATIONS = {
    "auto": auto,
    "newton_schulz": newton_schulz,
    "gram_newton_schulz": gram_newton_schulz,
    "polar_express": polar_express,
}
FUNCTIONS = {**ITERATIONS, "exact": exact, "aurora": aurora}
every = pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
polar = pytest.mark.parametrize("fn", [*ITERATIONS.values(), exact], ids=[*ITERATIONS, "exact"])
iterative = pytest.mark.parametrize("fn", ITERATIONS.values(), ids=ITERATIONS)
SHAPES = [(1, 1), (1, 7), (7, 1), (6, 6), (5, 12), (12, 5), (16, 64), (2, 3, 8, 4), (0, 4), (4, 0), (0, 3, 4)]
FP32_EPS = 2.0**-23


def random(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@iterative
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 24), columns=st.integers(1, 24), steps=st.integers(1, 9), seed=st.integers(0, 99))
def test_float64_applies_the_polynomial_exactly(fn, rows, columns, steps, seed):
    matrix = random(rows, columns, seed=seed)
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    expected = (U * mapped(fn.coefficients, steps, S / S.norm())) @ Vh
    # Each step multiplies small errors by the slope of the polynomial at zero: nine NS5 steps by 7e4.
    tolerance = 1e-10 if steps <= 5 else 1e-8
    torch.testing.assert_close(fn(matrix, steps=steps), expected, rtol=0, atol=tolerance)


@every
def test_powers_of_two_change_no_bit(fn):
    matrix = random(3, 6, 10, dtype=torch.float32)
    for exponent in (-100, -30, 30, 100):
        assert torch.equal(fn(matrix * 2.0**exponent, steps=5), fn(matrix, steps=5))


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_shape_and_dtype_are_preserved_and_zero_stays_zero(fn, dtype):
    for shape in SHAPES:
        result = fn(random(*shape, dtype=dtype), steps=3)
        assert (result.shape, result.dtype) == (shape, dtype)
        assert result.isfinite().all(), shape
        zero = torch.zeros(shape, dtype=dtype)
        assert torch.equal(fn(zero, steps=3), zero), shape


@polar
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_result_has_the_requested_dtype(fn, dtype):
    matrix = random(4, 10, dtype=torch.float32)
    result = fn(matrix, steps=5, dtype=dtype)
    assert result.dtype == dtype
    # Later steps amplify rounding errors by their slopes, which for singular values from 0.2 up add up to at most 38
    # (NS5) and 250 (Polar Express); over 50 seeds to 17 and 65.
    multiple = 100 if fn is polar_express and dtype not in (torch.bfloat16, torch.float16) else 25
    tolerance = multiple * max(torch.finfo(dtype).eps, FP32_EPS)
    torch.testing.assert_close(result.double(), fn(matrix.double(), steps=5), rtol=0, atol=tolerance)


def hard_matrices(rows, columns, conditions):
    return torch.stack([with_spectrum(s, columns) for condition in conditions for s in hard_spectra(rows, condition)])


def largest_norm(matrices):
    return torch.linalg.matrix_norm(matrices.double(), 2).max().item()


@polar
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bad_conditioning_stays_bounded(fn, dtype):
    """Even if one singular value dominates, which rounding pushes past the end of Polar Express's interval."""
    batch = hard_matrices(16, 40, (2, 4, 6)).to(dtype)
    for steps in (5, 8, 20):
        result = fn(batch, steps=steps)
        # The exact intervals end at 1.2025; the rest is rounding.
        assert largest_norm(result) < 1.2025 + 15 * torch.finfo(dtype).eps
        if dtype == torch.float64 and steps < 20:  # the rank does not grow
            assert torch.linalg.svdvals(result[3])[8] < 1e-10


@every
@pytest.mark.parametrize("shape", [(3, 2, 6, 14), (7, 8, 8), (11, 16, 5)], ids=str)
@pytest.mark.parametrize("piece_bytes", [1, 4000, 2**21])
def test_a_batch_equals_a_loop_over_matrices_however_it_is_cut(fn, shape, piece_bytes, monkeypatch):
    monkeypatch.setattr(import_module("muonsw.orthogonalize.iterations"), "_CPU_PIECE_BYTES", piece_bytes)
    batch = random(*shape, dtype=torch.float32)
    singles = [fn(matrix, steps=3) for matrix in batch.flatten(0, -3)]
    # Batched and single products may sum in different orders: float32 rounding times the slope of three steps.
    torch.testing.assert_close(fn(batch, steps=3).flatten(0, -3), torch.stack(singles), rtol=0, atol=100 * FP32_EPS)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_strides_do_not_matter_and_the_input_does_not_change(fn, dtype):
    base = random(6, 20, 10, dtype=dtype)
    views = [base[::2, ::3, 1::2], base.permute(2, 0, 1), base[:1].expand(4, 20, 10), base[0].T]
    before = base.clone()
    for view in views:
        tolerance = 100 * torch.finfo(dtype).eps if fn is not exact else 1e-7
        expected = fn(view.contiguous(), steps=3)
        torch.testing.assert_close(fn(view, steps=3), expected, rtol=0, atol=tolerance)
    assert torch.equal(base, before)


@every
def test_zeros_nan_and_infinities_stay_in_their_matrix(fn):
    batch = random(5, 3, 8)
    batch[1, 0, 0], batch[2, 1, 1], batch[4] = math.nan, math.inf, 0
    result = fn(batch, steps=5)
    assert result[1].isnan().any()
    assert result[2].isnan().any()
    assert not result[4].any()
    torch.testing.assert_close(result[[0, 3]], fn(batch[[0, 3]], steps=5), rtol=0, atol=1e-12)


@every
def test_unfit_arguments_are_refused(fn):
    with pytest.raises(ValueError, match=r"\(\.\.\., m, n\).*\(5,\)"):
        fn(torch.ones(5), steps=5)
    with pytest.raises(ValueError, match="real floating-point"):
        fn(torch.ones(2, 2).to(torch.int64), steps=5)
    if fn is not exact:
        with pytest.raises(ValueError, match="steps=0"):
            fn(torch.ones(2, 3), steps=0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    extra=st.integers(0, 30),
    missing=st.integers(0, 30),
    log_condition=st.floats(0, 6),
    scale=st.sampled_from([-300, -160, 0, 160, 300]),
    seed=st.integers(0, 99),
)
def test_the_polar_factor_is_exact_at_any_rank_condition_and_scale(rows, extra, missing, log_condition, scale, seed):
    spectrum = torch.logspace(0, -log_condition, rows, dtype=torch.float64)
    spectrum[max(rows - missing, 0) :] = 0
    matrix, factor = (with_spectrum(values, rows + extra, seed) for values in (spectrum, spectrum > 0))
    # rounding the elements perturbs the vectors of the smallest singular value by up to eps * 1e6
    assert torch.linalg.matrix_norm(exact(matrix * 10.0**scale) - factor, 2) < 2e-9


# The Gram form.


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_the_gram_form_matches_the_plain_one(name, dtype, steps):
    """Within twice eps / 2, the rounding of the input and of the first products, times the slope at zero.

    A few steps do not converge, and their terms cancel: over eight seeds the largest error of three steps was 431 eps.
    """
    matrices, coefficients = hard_matrices(24, 96, (1, 3, 6)), COEFFICIENT_SETS[name]
    expected = Iteration(coefficients, "plain")(matrices, steps=steps)
    result = Iteration(coefficients, "gram")(matrices.to(dtype), steps=steps)
    slope = mapped(coefficients, steps, 1e-12) / 1e-12
    assert largest_norm(result - expected) < max(slope, 900.0) * torch.finfo(dtype).eps


@pytest.mark.parametrize(("rows", "columns", "conditions"), [(24, 96, (0, 2, 4, 6)), (128, 384, (4,))])
@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_the_gram_form_is_as_accurate_in_half_precision(name, rows, columns, conditions):
    """If segments were too long, errors in directions of singular value zero would be ten times larger, or diverge."""
    matrices, coefficients = hard_matrices(rows, columns, conditions), COEFFICIENT_SETS[name]
    plain, gram = Iteration(coefficients, "plain"), Iteration(coefficients, "gram")
    expected, result = plain(matrices), gram(matrices, dtype=torch.float16)
    assert largest_norm(result - expected) < 2 * largest_norm(plain(matrices, dtype=torch.float16) - expected)
    assert largest_norm(result) < largest_norm(expected) + 0.005


def test_the_gram_form_computes_bfloat16_results_in_float32():
    matrix = with_spectrum(torch.logspace(0, -4, 24, dtype=torch.float64), 96).float()
    for shaped in (matrix, matrix.mT, matrix[:, :24]):
        expected = gram_newton_schulz(shaped).bfloat16()
        assert torch.equal(gram_newton_schulz(shaped, dtype=torch.bfloat16), expected)


@pytest.mark.parametrize("name", ["newton_schulz", "polar_express"])
def test_the_gram_form_saves_the_expected_products(name):
    coefficients, matrix, products = COEFFICIENT_SETS[name], random(16, 64), []
    for form in ("plain", "gram"):
        with FlopCounterMode(display=False) as counter:
            Iteration(coefficients, form)(matrix, steps=8)
        products.append(counter.get_total_flops() // 2)
    assert products[0] - products[1] == gram_saves(16, 64) * (8 - len(coefficients.segments(8)))


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_auto_is_the_faster_form(name):
    plain, gram, fastest = (Iteration(COEFFICIENT_SETS[name], form) for form in ("plain", "gram", "auto"))
    wide = random(16, 64, dtype=torch.float32)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert torch.equal(fastest(wide, dtype=dtype), gram(wide, dtype=dtype))
        for small in (wide[:, :16], wide[:, :24].mT, wide[:8, :40]):  # nearly square, or few rows
            assert torch.equal(fastest(small, dtype=dtype), plain(small, dtype=dtype))
            assert torch.equal(gram(small, dtype=dtype), plain(small, dtype=dtype))
    assert torch.equal(fastest(wide, dtype=torch.bfloat16), plain(wide, dtype=torch.bfloat16))
    assert [fastest.inner(torch.bfloat16, torch.device(d)) for d in ("cuda", "mps")] == [torch.float16, torch.float32]


# Coefficient sets.

RECORD = recorded("coefficients")
INPUTS = [torch.tensor(matrix, dtype=torch.float64) for matrix in RECORD["inputs"]]
SIGMA = torch.logspace(-2.8239, 0, 200_001, dtype=torch.float64)


@pytest.mark.parametrize("name", RECORD["sets"])
def test_coefficient_sets_give_the_authors_results(name):
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
def test_singular_values_end_in_the_documented_interval(name, steps, low, high, slope):
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
