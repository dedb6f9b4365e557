"""Shampoo: equal to a float64 reference, in one block and in many."""

import pytest
import torch

from muonsw.algorithms.factors import average_first, finite_or, inverse_root, pack, unpack
from muonsw.algorithms.shampoo import Grid, shampoo
from tests.family.references.shampoo import ReferenceShampoo

OPTIONS = {
    "betas": (0.9, 0.999),
    "shampoo_beta": None,
    "eps": 1e-12,
    "grafting": "adam",
    "grafting_eps": 1e-8,
    "block_size": 1024,
    "precondition_frequency": 1,
}


def fresh(count, m, n, block_size=1024, dtype=torch.float64):
    grid = Grid.of(m, n, block_size)
    shapes = {
        "exp_avg": (m, n),
        "exp_avg_sq": (m, n),
        "factors_left": (grid.blocks * grid.height, grid.height + 1),
        "factors_right": (grid.blocks * grid.width, grid.width + 1),
        "moves": (1, 1),
    }
    return {key: torch.zeros(count, *shape, dtype=dtype) for key, shape in shapes.items()}


def directions(gradients, **options):
    """The direction of every step from gradients (steps, count, m, n), and the state at the end."""
    group, seen = OPTIONS | options, []
    state = fresh(*gradients[0].shape, group["block_size"], gradients[0].dtype)
    for step, G in enumerate(gradients, start=1):
        direction, after = shampoo(group | {"update_count": step}, G, state)
        assert {key: tensor.shape for key, tensor in after.items()} == {key: state[key].shape for key in after}
        state = state | after
        seen.append(direction)
    return seen, state


@pytest.mark.parametrize("grafting", [None, "sgd", "adam"])
@pytest.mark.parametrize(("m", "n", "size", "height", "width"), [(4, 6, 9, 4, 6), (6, 9, 4, 3, 3), (5, 11, 4, 3, 4)])
def test_it_equals_the_reference_over_many_steps(m, n, size, height, width, grafting):
    gradients = torch.randn(25, 3, m, n, dtype=torch.float64)
    rows, columns = (
        [slice(at, min(at + step, length)) for at in range(0, length, step)]
        for step, length in ((height, m), (width, n))
    )
    blocks = [(row, column) for row in rows for column in columns]
    options = {"grafting": grafting, "eps": 1e-6}
    references = [ReferenceShampoo(blocks, 0.8, 0.9, 0.95, f=3, **options) for _ in range(3)]
    found = directions(
        gradients, block_size=size, betas=(0.8, 0.9), shampoo_beta=0.95, precondition_frequency=3, **options
    )[0]
    for step, direction in enumerate(found):
        expected = torch.stack([reference.direction(gradients[step, i]) for i, reference in enumerate(references)])
        torch.testing.assert_close(direction, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("m", "n", "size"), [(7, 5, 3), (8, 8, 4), (3, 10, 4), (6, 6, 100)])
def test_cut_matrices_are_joined_again(m, n, size):
    X, grid = torch.randn(2, m, n), Grid.of(m, n, size)
    assert max(grid.height, grid.width) <= size
    assert torch.equal(grid.join(grid.cut(X), m, n), X)


def test_roots_of_what_rounding_has_left_below_zero_and_of_what_is_not_finite():
    """All eigenvalues are raised until the smallest is eps; a matrix with one bad element is another one's."""
    eps, otherwise = 1e-4, torch.full((2, 2, 2), 7.0)
    root = inverse_root(torch.tensor([[[1.0, 0.0], [0.0, -0.01]]]), 0.5, eps, otherwise[:1])
    torch.testing.assert_close(root[0].diagonal(), torch.tensor([1.01 + eps, eps]).rsqrt())
    X = torch.ones(2, 2, 2)
    X[1, 0, 1] = torch.nan
    assert torch.equal(finite_or(X, otherwise), torch.stack([X[0], otherwise[1]]))


def test_two_symmetric_matrices_share_the_room_of_one_and_a_column():
    first, second, new = (A + A.mT for A in torch.randn(3, 2, 5, 5))
    packed = pack(first, second)
    assert packed.shape == (2, 5, 6)
    assert all(torch.equal(a, b) for a, b in zip(unpack(packed), (first, second), strict=True))
    averaged, same = unpack(average_first(packed, new, 0.9, 0.1))
    torch.testing.assert_close(averaged, 0.9 * first + 0.1 * new)
    assert torch.equal(same, second)


def test_before_the_first_refresh_it_is_the_graft():
    gradients = torch.randn(4, 2, 5, 3, dtype=torch.float64)
    weight, adam_weight = torch.zeros(5, 3, dtype=torch.float64), torch.nn.Parameter(torch.zeros(5, 3).double())
    adam = torch.optim.Adam([adam_weight], lr=1.0, betas=(0.9, 0.999))
    for direction, G in zip(directions(gradients, precondition_frequency=5)[0], gradients, strict=True):
        weight = weight - direction[0]
        adam_weight.grad = G[0]
        adam.step()
    torch.testing.assert_close(weight, adam_weight.detach())
