"""SOAP: Adam in the eigenbasis of Shampoo's factors.

Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam" (2024). As in the authors' code, the first gradient
initializes the bases and moves nothing. Here, weights decay in the first step too, equal matrices are batched,
and momentum is rotated only when the basis changes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import matrix_algorithm, validate_matrices
from muonsw.algorithms.factors import eigenbasis, fold, folded_shape, power_iteration, rotate, rotate_back, unfold
from muonsw.machine import full_float32
from muonsw.matrices import MatrixView
from muonsw.slots import ELEMENTWISE, SQUARES, Specs, StateSpec
from muonsw.work import Group, State


@full_float32()
def soap(group: Group, G: Tensor, state: State) -> tuple[Tensor, State]:
    """Directions for gradients (count, m, n), and the state after them.

    `state` is `exp_avg` and `exp_avg_sq` (count, m, n), in the bases; `basis_left` (count, m, m) and `basis_right`
    (count, n, n), but (count, 1, 1) for a side that is not rotated; `factor_left` and `factor_right`, folded
    (`factors.py`); `moves` (count, 1, 1), the number of gradients so far. Bases of zeros are uninitialized.
    """
    (beta1, beta2), t = group["betas"], state["moves"]
    bases = _begun(state["basis_left"], t), _begun(state["basis_right"], t)
    rotated = rotate(G, *bases)
    exp_avg = state["exp_avg"].lerp(rotated, 1 - beta1)
    exp_avg_sq = state["exp_avg_sq"].lerp(rotated.square(), 1 - beta2)
    direction = rotate_back(exp_avg / (exp_avg_sq.sqrt() + group["eps"]), *bases)
    corrected = ((1 - beta2 ** t.double()).sqrt() / (1 - beta1 ** t.double().clamp(min=1))).to(G.dtype)
    averages = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "moves": t + 1}
    state = state | averages | {"basis_left": bases[0], "basis_right": bases[1]}
    beta = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
    step = group["update_count"]
    refresh = (step - 1) % group["precondition_frequency"] == 0
    return corrected * direction, advance_bases(G, state, beta, refresh=refresh, first=step == 1)


def _begun(basis: Tensor, moves: Tensor) -> Tensor:
    """Bases (count, d, d), with uninitialized ones set to the identity, or to zero if this is the first gradient."""
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    return torch.where(have_begun(basis), basis, identity * (moves > 0))


def have_begun(basis: Tensor) -> Tensor:
    """Whether bases (count, d, d) are initialized, by their first column, as (count, 1, 1)."""
    return basis[..., :1].any(-2, keepdim=True)


def advance_bases(G: Tensor, state: State, beta: float, *, refresh: bool, first: bool) -> State:
    """Add a gradient to the factors and, if `refresh`, update their bases; return the new state.

    The first refresh decomposes the factors, later ones improve the bases.
    """
    if state["basis_left"].shape[-1] == G.shape[-2]:
        state = state | {"factor_left": state["factor_left"].lerp(fold(G @ G.mT), 1 - beta)}
    if state["basis_right"].shape[-1] == G.shape[-1]:
        state = state | {"factor_right": state["factor_right"].lerp(fold(G.mT @ G), 1 - beta)}
    if not refresh:
        return state
    # Averages are in the old bases: rotate momentum, and reorder squares like the columns.
    bases, squares = {}, state["exp_avg_sq"]
    for side, axis in (("left", -2), ("right", -1)):
        factor, basis = state[f"factor_{side}"], state[f"basis_{side}"]
        rotated = basis.shape[-1] == squares.shape[axis]
        if rotated and first:
            basis = eigenbasis(unfold(factor), basis)
        elif rotated:
            basis, order = power_iteration(unfold(factor), basis)
            squares = squares.gather(axis, order.unsqueeze(-3 - axis).expand_as(squares))
        bases[f"basis_{side}"] = basis
    after = state | bases | {"exp_avg_sq": squares}
    if "exp_avg" in state:
        momentum = rotate_back(state["exp_avg"], state["basis_left"], state["basis_right"])
        after["exp_avg"] = rotate(momentum, bases["basis_left"], bases["basis_right"])
    return after


def sides(longest: int) -> Specs:
    """A factor and its basis for each side; a side longer than `longest` has one element of each."""

    def size(length: int) -> int:
        return length if length <= longest else 1

    return {
        "factor_left": StateSpec(lambda m, _: folded_shape(size(m))),
        "factor_right": StateSpec(lambda _, n: folded_shape(size(n))),
        "basis_left": StateSpec(lambda m, _: (size(m), size(m))),
        "basis_right": StateSpec(lambda _, n: (size(n), size(n))),
    }


def state(group: Group) -> Specs:
    averages = {"exp_avg": ELEMENTWISE, "exp_avg_sq": SQUARES}
    return {**averages, **sides(group["precondition_max_dim"]), "moves": StateSpec(lambda *_: (1, 1))}


def validate(group: Group, name: str, param: Tensor) -> None:
    validate_matrices(group, name, param)
    if group["eps"] == 0:
        raise ValueError("eps=0: SOAP would divide by averages that start at zero; use an eps above zero")
    longest = group["precondition_max_dim"]
    for cell in MatrixView.of(group).cells(param.shape):
        if min(cell.rows, cell.columns) > longest:
            raise ValueError(
                f"precondition_max_dim={longest} rotates neither side of {name}, a matrix of {cell.rows} x "
                f"{cell.columns}; raise it, or give the parameter a group with algorithm='adamw'"
            )


SOAP = matrix_algorithm(
    defaults={
        "betas": (0.95, 0.95),
        "shampoo_beta": None,
        "eps": 1e-8,
        "precondition_frequency": 10,
        "precondition_max_dim": 10000,
    },
    state=state,
    directions=soap,
    validate=validate,
    counts_steps=True,
    scale_free=False,
)
