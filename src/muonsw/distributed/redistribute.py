"""The slow way that is always right, for placements without an exchange: every rank gets every matrix whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from muonsw.algorithms.base import Update
from muonsw.algorithms.whole import state_keys
from muonsw.distributed.rounds import GRADIENT, ExchangeBatch
from muonsw.distributed.shards import as_dtensor, shard_like
from muonsw.matrices import WHOLE, MatrixCell, Part
from muonsw.slots import ELEMENTWISE, State
from muonsw.work import Item


def redistributed_updates(batch: ExchangeBatch) -> Iterator[Update]:
    """Updates of parameters, each rank's part of directions that all of them compute."""
    for item in batch.items:
        direction, scale = _directions(batch, item)
        yield Update([Part(item, WHOLE)], [_mine(direction, item.parameter)], scale)


def _directions(batch: ExchangeBatch, item: Item) -> tuple[Tensor, float]:
    """The direction of a whole parameter, and the scale of its first matrices; others are multiplied in."""
    ahead = torch.empty_like(item.param, dtype=batch.rule.sent_dtype(batch.group, item.param.dtype))
    batch.rule.advance(batch.group, [Part(item, WHOLE)], [ahead])
    whole, state = _whole(item, ahead), WholeState(batch, item)
    direction = torch.zeros_like(whole, dtype=item.param.dtype)
    scales = []
    for number, cell in enumerate(batch.view.cells(whole.shape)):
        scales.append(batch.rule.scale(batch.group, cell.rows, cell.columns))
        target = cell.region.of(direction)
        X = cell.region.of(whole).reshape(-1, cell.rows, cell.columns)
        result, new = batch.rule.directions(batch.group, X, state.of(number, cell), item.param.dtype)
        state.advance(new, number, cell)
        target.copy_(result.reshape(target.shape) * (scales[-1] / scales[0]))
    state.keep()
    return direction, scales[0]


def _whole(item: Item, shard: Tensor) -> Tensor:
    """The tensor of which each rank has a shard that is placed like the parameter."""
    return as_dtensor(shard_like(item.parameter, shard)).full_tensor()


def _mine(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that all ranks have, placed like a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = as_dtensor(like).device_mesh, as_dtensor(like).placements
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim)
    return everywhere.redistribute(mesh, placements).to_local()


class WholeState:
    """What a rule keeps of the matrices of one parameter, whole on every rank; each keeps its part of what is new."""

    def __init__(self, batch: ExchangeBatch, item: Item) -> None:
        self._state = cast("Any", item.state)  # of a DTensor, as it is kept or as it is computed with
        self._view, self._specs = batch.view, batch.rule.state(batch.group)
        keys = state_keys(batch.view, self._specs)
        self._own = {key: as_dtensor(self._state.kept(key)).full_tensor() for key in keys}
        self._given: Mapping[str, Tensor] = {}
        if batch.rule.sends_gradient(batch.group):
            self._given = {GRADIENT: _whole(item, -item.grad if batch.group["maximize"] else item.grad)}

    def of(self, number: int, cell: MatrixCell) -> State:
        """The state of the matrices of one cell, (count, r, c) by key, and the gradient if the rule asks for it."""
        found = {key: self._part(key, number, cell) for key in self._specs}
        found |= {key: cell.region.of(tensor) for key, tensor in self._given.items()}
        return {key: tensor.reshape(-1, *self._axes(key, tensor, cell)) for key, tensor in found.items()}

    def advance(self, new: State, number: int, cell: MatrixCell) -> None:
        """Put the new state of a cell in its place."""
        for key in self._specs:
            part = self._part(key, number, cell)
            part.copy_(new[key].reshape(part.shape))

    def keep(self) -> None:
        """Keep this rank's part."""
        for key, tensor in self._own.items():
            self._state[key].copy_(_mine(tensor, self._state.kept(key)))

    def _part(self, key: str, number: int, cell: MatrixCell) -> Tensor:
        if self._specs[key].shape is None:
            return cell.region.of(self._own[key])
        return self._own[self._view.cell_keys(key)[number]]

    def _axes(self, key: str, tensor: Tensor, cell: MatrixCell) -> tuple[int, int]:
        if self._specs.get(key, ELEMENTWISE).shape is None:
            return cell.rows, cell.columns
        return tensor.shape[-2], tensor.shape[-1]
