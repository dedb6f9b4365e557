"""Shampoo: momentum between the inverse fourth roots of the gradients' factors, in blocks, with grafted norms.

Gupta et al. (2018), with the blocks and the grafting of Anil et al. (2020). The rule follows Meta's
`distributed_shampoo` with bias correction and roots from eigendecompositions. Here, blocks along an axis are
equally long (1100 rows are 550 and 550, not 1024 and 76), all blocks are decomposed in one batch, and a factor and its
root are packed into one square matrix.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from muonsw.algorithms.base import matrix_algorithm
from muonsw.algorithms.factors import average_first, inverse_root, pack, unpack_first, unpack_second
from muonsw.machine import full_float32
from muonsw.slots import ELEMENTWISE, SQUARES, Specs, StateSpec
from muonsw.work import Group, State

# From Meta's code: keeps the grafted direction finite if it is zero.
_TINY = 1e-16


class Tiling(NamedTuple):
    """A matrix cut into blocks of one shape; the last ones are padded with zeros."""

    down: int
    across: int
    height: int
    width: int

    @classmethod
    def of(cls, m: int, n: int, block_size: int) -> Tiling:
        """The fewest equal blocks of at most `block_size` along each axis.

        Examples:
            >>> Tiling.of(1100, 300, 1024)
            Tiling(down=2, across=1, height=550, width=300)
        """
        down, across = max(1, math.ceil(m / block_size)), max(1, math.ceil(n / block_size))
        return cls(down, across, math.ceil(m / down), math.ceil(n / across))

    def cut(self, X: Tensor) -> Tensor:
        missing = self.down * self.height - X.shape[-2], self.across * self.width - X.shape[-1]
        X = torch.nn.functional.pad(X, (0, missing[1], 0, missing[0])) if any(missing) else X
        X = X.reshape(-1, self.down, self.height, self.across, self.width)
        return X.transpose(-3, -2).reshape(-1, self.height, self.width)

    def join(self, blocks: Tensor, m: int, n: int) -> Tensor:
        X = blocks.view(-1, self.down, self.across, self.height, self.width).transpose(-3, -2)
        return X.reshape(-1, self.down * self.height, self.across * self.width)[..., :m, :n]


@full_float32()
def shampoo(group: Group, G: Tensor, state: State) -> tuple[Tensor, State]:
    """Directions for gradients (count, m, n), and the state after them.

    `state` is `exp_avg` (count, m, n), and `exp_avg_sq` of that shape with Adam grafting; `factors_left` and
    `factors_right` (count, blocks * d, d + 1), factors packed with their roots; `moves` (count, 1, 1), the number of
    steps. While roots are zero, thus uninitialized, the graft is the direction.
    """
    (_, m, n), (beta1, beta2), moves = G.shape, group["betas"], state["moves"] + 1
    tiling = Tiling.of(m, n, group["block_size"])
    after = {"moves": moves, "exp_avg": state["exp_avg"].lerp(G, 1 - beta1)}
    graft = momentum = after["exp_avg"] / _correction(beta1, moves)
    if group["grafting"] == "adam":
        after["exp_avg_sq"] = state["exp_avg_sq"].lerp(G.square(), 1 - beta2)
        root = (after["exp_avg_sq"] / _correction(beta2, moves)).sqrt()
        graft = momentum / (root + group["grafting_eps"])
    # Factors packed with their roots, which are recomputed every `precondition_frequency` steps.
    blocks, roots = tiling.cut(G), []
    beta = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
    gain = 1 - beta if beta < 1 else 1.0
    correction = _correction(beta, moves).repeat_interleave(len(blocks) // len(moves), 0)
    for key, gram in (("factors_left", blocks @ blocks.mT), ("factors_right", blocks.mT @ blocks)):
        packed = average_first(state[key].reshape(*gram.shape[:-1], -1), gram, beta, gain)
        root = unpack_second(packed)
        if group["update_count"] % group["precondition_frequency"] == 0:
            factor = unpack_first(packed)
            root = inverse_root(factor / correction, 0.25, group["eps"], otherwise=root)
            packed = pack(factor, root)
        after[key] = packed.reshape(state[key].shape)
        roots.append(root)
    direction, graft = roots[0] @ tiling.cut(momentum) @ roots[1], tiling.cut(graft)
    if group["grafting"] is not None:
        length = torch.linalg.matrix_norm(graft, keepdim=True)
        direction = direction * (length / (torch.linalg.matrix_norm(direction, keepdim=True) + _TINY))
    begun = roots[0][..., :1, :1] != 0  # a positive definite matrix has no zero on its diagonal
    return tiling.join(torch.where(begun, direction, graft), m, n), after


def _correction(beta: float, moves: Tensor) -> Tensor:
    """The bias correction of an average that started at zero; 1 for a sum."""
    return (1 - beta ** moves.double()).to(moves.dtype) if beta < 1 else torch.ones_like(moves)


def state(group: Group) -> Specs:
    def packed(m: int, n: int, side: str) -> tuple[int, int]:
        tiling = Tiling.of(m, n, group["block_size"])
        size: int = getattr(tiling, side)
        return tiling.down * tiling.across * size, size + 1

    return {
        "exp_avg": ELEMENTWISE,
        **({"exp_avg_sq": SQUARES} if group["grafting"] == "adam" else {}),
        "factors_left": StateSpec(partial(packed, side="height")),
        "factors_right": StateSpec(partial(packed, side="width")),
        "moves": StateSpec(lambda *_: (1, 1)),
    }


SHAMPOO = matrix_algorithm(
    defaults={
        "betas": (0.9, 0.999),
        "shampoo_beta": None,
        "eps": 1e-12,
        "precondition_frequency": 10,
        "block_size": 1024,
        "grafting": "adam",
        "grafting_eps": 1e-8,
    },
    state=state,
    directions=shampoo,
    counts_steps=True,
    scale_free=False,
)
