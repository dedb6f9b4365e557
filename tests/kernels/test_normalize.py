"""Kernels of the `normalize` slot match its members, including their state."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.kernels.normalize import slice_factors
from muonsw.slots import NORMALIZE

SHAPES = [(33, 300), (40, 20), (20, 530)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"normalize": "normuon"},
        {"normalize": "normuon", "normalize_axis": "longer", "normalize_snap": True},
        {"normalize": "adamuon"},
        {"normalize": "muon_plus"},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_steps_equal_those_of_the_members(shape, options, dtype, transposed, device):
    """Three matrices whose rows have very different norms, one of them zero; the last matrix is zero."""
    U = torch.randn(3, *shape) / shape[1] ** 0.5 * torch.linspace(0.01, 2, shape[0])[:, None]
    U[0, 0], U[2] = 0, 0
    U, group = U.to(device, dtype), {**options, "transposed": transposed}
    state, averages, of_matrix = {}, [], (0, 0)
    for key, spec in NORMALIZE.specs(group).items():
        of_matrix = spec.shape(*(shape[::-1] if transposed else shape)) if spec.shape else shape
        state = {key: torch.rand(3, *of_matrix, device=device)}
        state[key][1] = 0
        averages = [state[key][:2].clone(), state[key][2].clone()]  # of a stack, and of a single matrix
    for _ in range(2):
        expected, state = NORMALIZE.apply(group, U.float(), state)
        actual = U.clone()
        factors = slice_factors(group, actual, averages, of_matrix, None)
        # only AdaMuon's divided elements are rounded
        torch.testing.assert_close(actual * factors, expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-5)
        assert options["normalize"] == "adamuon" or torch.equal(actual, U)
        for expected in state.values():
            torch.testing.assert_close(torch.cat([averages[0], averages[1][None]]), expected, rtol=1e-5, atol=1e-9)
