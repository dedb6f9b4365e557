"""The symmetric product equals the dense product at any size, layout and tile size."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.kernels import symmetric
from muonsw.kernels.symmetric import symmetric_product
from muonsw.orthogonalize import NS5, gram_newton_schulz, newton_schulz
from tests.orthogonalize.spectra import hard_spectra, with_spectrum

pytestmark = pytest.mark.usefixtures("small_tiles")
# One rounding to float16, after sums in float32.
ONE_ROUNDING = 2.0**-11


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("size", "inner"), [(64, 64), (70, 40), (33, 7), (1, 1)])
def test_products_equal_dense_ones(engine, turned, size, inner, device, monkeypatch):
    monkeypatch.setattr(symmetric, "best_tiles", lambda _: symmetric.Tiles(32, 16, 4, 2, engine))
    torch.manual_seed(size)
    shape = (2, inner, size) if turned else (2, size, inner)
    X = torch.randn(shape).to(device, torch.float16)
    X = X.mT if turned else X
    R = symmetric_product(X, X)
    expected = X.double() @ X.double().mT
    assert (R.double() - expected).abs().max() <= ONE_ROUNDING * expected.abs().max()
    # Tiles off the diagonal are written twice. The interpreter multiplies by BLAS, whose product of a tile with itself
    # is exactly symmetric only on some CPUs.
    tile = torch.arange(size, device=device) // 32
    mirrored = (tile[:, None] != tile[None]) | (device.type == "cuda")
    assert torch.equal(R[:, mirrored], R.mT[:, mirrored])

    a, b, c = NS5
    R = R / 16
    Z = symmetric_product(R, R, alpha=c, term=R, beta=b, diagonal=a)
    R = R.double()
    expected = a * torch.eye(size, device=device, dtype=torch.float64) + b * R + c * R @ R
    assert (Z.double() - expected).abs().max() <= 2 * ONE_ROUNDING * expected.abs().max()


def test_every_element_is_written_whatever_the_strides(device):
    base = torch.randn(6, 70, 90).to(device, torch.float16)
    for view in (base[::2, :33, 1:80:3], base.permute(2, 0, 1)[:4, :, :20], base[:1].expand(3, 70, 90)):
        actual = symmetric_product(view, view)
        again = symmetric_product(view.contiguous(), view.contiguous())
        assert torch.equal(actual, again)


def test_a_nan_stays_in_its_matrix(device):
    X = torch.randn(3, 40, 40).to(device, torch.float16)
    X[1, 3, 3] = float("nan")
    R = symmetric_product(X, X)
    assert R[1].isnan().any()
    assert R[[0, 2]].isfinite().all()


@pytest.mark.parametrize("log_condition", [0, 6])
@pytest.mark.parametrize(("columns", "tall"), [(40, False), (96, False), (96, True)])
def test_iterations_with_kernels_are_as_good_as_without(columns, tall, log_condition, device, kernels_on):
    spectra = hard_spectra(40, log_condition)
    spectra = spectra if device.type == "cuda" else spectra[:2]  # the interpreter takes seconds for each
    batch = torch.stack([with_spectrum(s, columns) for s in spectra]).to(device)
    batch = batch.mT if tall else batch
    expected = newton_schulz(batch)
    fn = gram_newton_schulz if columns > 40 else newton_schulz
    kernels_on(False)
    plain = torch.linalg.matrix_norm(fn(batch, dtype=torch.float16).double() - expected, 2).max()
    kernels_on(True)
    actual = fn(batch, dtype=torch.float16).double()
    # Both round each product once, at different places; errors in directions of singular value zero grow 485 times.
    assert torch.linalg.matrix_norm(actual - expected, 2).max() < max(3 * float(plain), 0.1)
    assert torch.linalg.matrix_norm(actual, 2).max() < 1.22
