"""Kernels of the `normalize` slot match its members, including their state."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.kernels.momentum import advance_momenta, normalized_momentum
from muonsw.kernels.normalize import slice_factors
from muonsw.nonfinite import Flag
from muonsw.slots import NORMALIZE
from tests.kernels.test_momentum import GROUP

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
def test_two_steps(shape, options, dtype, transposed, device):
    """Three matrices with rows of very different lengths, one of them zero; the last is zero throughout."""
    U = torch.randn(3, *shape) / shape[1] ** 0.5 * torch.linspace(0.01, 2, shape[0])[:, None]
    U[0, 0], U[2] = 0, 0
    U, group = U.to(device, dtype), {**options, "transposed": transposed}
    state, kept, kept_shape = {}, [], (0, 0)
    for key, spec in NORMALIZE.specs(group).items():
        kept_shape = spec.shape(*(shape[::-1] if transposed else shape)) if spec.shape else shape
        state = {key: torch.rand(3, *kept_shape, device=device)}
        state[key][1] = 0
        kept = [state[key][:2].clone(), state[key][2].clone()]  # a stack, and a matrix by itself
    for _ in range(2):
        expected, state = NORMALIZE.apply(group, U.float(), state)
        actual = U.clone()
        factors = slice_factors(group, actual, kept, kept_shape, None)
        # only AdaMuon's divided elements are rounded
        torch.testing.assert_close(actual * factors, expected, rtol=max(1e-5, torch.finfo(dtype).eps), atol=1e-5)
        assert options["normalize"] == "adamuon" or torch.equal(actual, U)
        for average in state.values():
            torch.testing.assert_close(torch.cat([kept[0], kept[1][None]]), average, rtol=1e-5, atol=1e-9)


def test_a_skipped_step_leaves_all_state_and_gives_zeros(device):
    flag, group = Flag(torch.ones((), device=device)), {**GROUP, "precondition": "muon2"}
    grad, momentum, squares, target = (torch.rand(33, 40, device=device) for _ in range(4))
    grad[3, 3] = float("nan")
    rows = squares[:, :1].clone()
    before = momentum.clone(), squares.clone(), rows.clone()
    U = normalized_momentum(group, [grad], [momentum], [squares], (33, 40), torch.float16, flag)
    assert advance_momenta(group, [grad], [momentum], [squares], [target], flag)
    slice_factors({"normalize": "adamuon"}, U, [squares], (33, 40), flag)
    slice_factors({"normalize": "normuon"}, U, [rows], (33, 1), flag)
    assert not U.any()
    assert not target.any()
    assert all(torch.equal(*pair) for pair in zip((momentum, squares, rows), before, strict=True))
