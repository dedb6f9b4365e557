"""One rank's view of the others: what they must agree on before a step, and what they exchange.

Each step begins with one small reduction over all ranks that hold a model together. It carries the finite flag, a
digest of parameters and settings, and which parameters lack a gradient. Its length hardly depends on the plan, so ranks
with different plans find out instead of hanging. Every rank reads the result before it sends anything else; that one
read is all that a step waits for on a GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.decay import DECAY_RULES
from muonsw.distributed.exchange import Round, make_rounds
from muonsw.distributed.layout import Layout, Layouts, mesh_ranks
from muonsw.distributed.shards import as_dtensor, is_dtensor, local, shard_misfit
from muonsw.matrices import MatrixView
from muonsw.work import Batch, Group, Item, copied_to, label_of, names_of

# Lengths of the reduction are multiples of this, so that plans which differ by a few parameters still meet in it.
_BLOCK = 1024

# Plans that are remembered: parameters that have gradients now and then make several.
_REMEMBERED = 8

# Not compared: what is held by each rank in its own way, and counts of steps, which a rank that failed has not taken.
_NOT_COMPARED = ("params", "param_names", "step_count", "gradient_average")


class _Known(NamedTuple):
    """What follows from the parameters alone: a key that shows a change, lines about them, a digest, process groups."""

    key: Any = None
    lines: Sequence[str] = ()
    digest: str = ""
    groups: Sequence[dist.ProcessGroup] = ()


class Ranks:
    """What an optimizer knows of the other ranks.

    Args:
        process_group: ranks that hold plain parameters alike; None where every rank is on its own.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group, the ranks that hold its parameters too; give each "
                f"rank a group that it is in, or None where it trains alone"
            )
        self.process_group = process_group
        self.announced: list[str] = []  # what a hook will do around this step together with all other ranks
        self.layouts = Layouts(process_group)
        self._known = _Known()
        self._rounds: dict[Any, list[Round]] = {}

    def agree(self, groups: Sequence[Group], settings: Group, *, ok: Tensor | bool) -> tuple[bool, list[Tensor]]:
        """Whether every rank may take the step, and the parameters that lack a gradient on this rank alone.

        Args:
            groups: the param groups.
            settings: options of the optimizer, which must be the same on all ranks, as those of its groups.
            ok: whether the gradients on this rank are finite, and it can take the step.

        Raises:
            RuntimeError: if the ranks have different parameters, shapes or settings, or have announced something else.
            ValueError: if copies of a parameter differ, or have gradients on some ranks only.
        """
        members = [
            (group, name, param)
            for number, group in enumerate(groups)
            for name, param in zip(names_of(group, number), group["params"], strict=True)
        ]
        # Other ranks hold parts of these, or copies that must stay the same.
        has_copies = self.process_group is not None
        watched = [(name, param) for _, name, param in members if has_copies or is_dtensor(param)]
        key = [(id(param), param.requires_grad, group["algorithm"]) for group, _, param in members]
        is_new = key != self._known.key
        if is_new:
            lines = [_describe(*member) for member in members]
            digest_of_lines = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            circles = _circles(self.process_group, [param for _, param in watched])
            self._known = _Known(key, lines, digest_of_lines, circles)
        known, options = self._known, [settings, *map(_plain_options, groups)]
        # a digest that fits into a signed number of eight bytes, as does its negative
        digest = int.from_bytes(hashlib.sha256(repr([known.digest, options, self.announced]).encode()).digest()[:7])
        lacks = [int(param.grad is None) for _, param in watched]
        values = [digest, -digest, int(is_new), *lacks, *(-lack for lack in lacks)]
        can_step, low, high, news, *both = _reduced(known.groups, ok, values, local(watched[0][1]).device)
        # where the smallest value and the smallest negative value are not opposite, ranks differ
        if low != -high:
            labels = ["the optimizer", *(label_of(group, number) for number, group in enumerate(groups))]
            settings_of = zip(labels, options, strict=True)
            lines = [f"{label}: {key}={value!r}" for label, chosen in settings_of for key, value in chosen.items()]
            _refuse(known.groups[0], [*lines, *known.lines, *self.announced])
        if news and self.process_group is not None:
            _compare_copies([(name, param) for name, param in watched if not is_dtensor(param)], self.process_group)
        absent = []
        columns = zip(watched, lacks, both[: len(lacks)], both[len(lacks) :], strict=True)
        for (name, param), lack, everywhere, somewhere in columns:
            # On a mesh of some of the ranks, others may lack its gradient.
            if everywhere != -somewhere and (
                not is_dtensor(param)
                or (
                    all(placement.is_replicate() for placement in as_dtensor(param).placements)
                    and mesh_ranks([param]) == mesh_ranks(other for _, other in watched)
                )
            ):
                raise ValueError(
                    f"{name} has a gradient on some ranks only, and all hold copies of it; average gradients over all "
                    f"ranks before the step, as DistributedDataParallel does (find_unused_parameters=True)"
                )
            if lack and not everywhere:
                absent.append(param)
        return bool(can_step), absent

    def sort(self, batch: Batch) -> tuple[list[Item], list[Item], list[Layout]]:
        """The items whose matrices are whole on this rank, and those that are exchanged, with their layouts."""
        if batch.view is None:
            return batch.items, [], []
        here, exchanged, layouts = [], [], []
        for item in batch.items:
            layout = self.layouts.of(item.parameter, batch.view.stack_axes(item.parameter.dim()))
            if layout.grid is None:
                here.append(item)
            else:
                exchanged.append(item)
                layouts.append(layout)
        return here, exchanged, layouts

    def rounds(self, batches: Sequence[Batch], layouts: Sequence[Sequence[Layout]], chunk_bytes: int) -> list[Round]:
        """The rounds of an exchange, remembered while layouts and settings stay the same."""
        key: list[Any] = [chunk_bytes]
        for batch, places in zip(batches, layouts, strict=True):
            known = {*ALGORITHMS[batch.group["algorithm"]].defaults, "state_dtype"}
            slots = ("precondition_", "normalize_")
            key += [(name, str(v)) for name, v in batch.group.items() if name in known or name.startswith(slots)]
            key += [batch.device, batch.dtype, batch.view, tuple(map(id, places))]  # `layouts` keeps them alive
        if tuple(key) not in self._rounds:
            if len(self._rounds) == _REMEMBERED:
                self._rounds.clear()
            self._rounds[tuple(key)] = make_rounds(batches, layouts, chunk_bytes, self.layouts)
        return self._rounds[tuple(key)]


def _circles(process_group: dist.ProcessGroup | None, params: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """Process groups that reach, one after another, every rank that holds parts or copies of the parameters."""
    ranks = mesh_ranks(params)
    if process_group is not None and ranks <= set(dist.get_process_group_ranks(process_group)):
        return [process_group]
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return [dist.group.WORLD]
    meshes = list(dict.fromkeys(as_dtensor(param).device_mesh for param in params if is_dtensor(param)))
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    groups += [] if process_group is None else [process_group]
    return groups if len(meshes) == 1 and process_group is None else groups * 2


def _reduced(
    groups: Sequence[dist.ProcessGroup], ok: Tensor | bool, values: list[int], device: torch.device
) -> list[int]:
    """The smallest of all ranks for each value; before them, whether all are ok."""
    values = [1 if isinstance(ok, Tensor) else int(ok), *values]
    message = torch.zeros(math.ceil(len(values) / _BLOCK) * _BLOCK, dtype=torch.int64, device=device)
    message[: len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    if isinstance(ok, Tensor):
        message[0] = copied_to(ok, device)
    for group in groups:
        dist.all_reduce(message, dist.ReduceOp.MIN, group=group)
    return message[: len(values)].tolist()


def _refuse(group: dist.ProcessGroup, lines: list[str]) -> NoReturn:
    theirs: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(theirs, lines, group=group)
    for rank, others in zip(dist.get_process_group_ranks(group), theirs, strict=True):
        for here, there in zip_longest(lines, others, fillvalue="nothing"):
            if here != there:
                raise RuntimeError(
                    f"the ranks would take different steps, so none is taken: rank {dist.get_rank()} has\n  {here}"
                    f"\nwhere rank {rank} has\n  {there}\nbuild model and optimizer alike on every rank, and "
                    f"change options on all of them"
                )
    raise RuntimeError(
        "the ranks would take different steps, so none is taken; compare optimizer.routing() and the options of "
        "every rank, and build model and optimizer alike on each"
    )


def _compare_copies(copies: Sequence[tuple[str, Tensor]], process_group: dist.ProcessGroup) -> None:
    """Refuse plain parameters that are not the same on all ranks of a process group."""
    if not copies:
        return
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [param.detach().contiguous().view(-1).view(integers[param.element_size()]) for _, param in copies]
    sums = torch.stack([numbers.sum(dtype=torch.int64) for numbers in bits])  # in any order of summation
    both = torch.cat([sums, -sums])
    dist.all_reduce(both, dist.ReduceOp.MIN, group=process_group)
    low, high = both.chunk(2)
    for (name, _), differs in zip(copies, (low != -high).tolist(), strict=True):
        if differs:
            raise ValueError(
                f"{name} has other values on another rank of process_group, which is for parameters that every rank "
                f"holds alike; wrap the model in DistributedDataParallel or broadcast it first, and leave "
                f"process_group out where ranks hold different parameters"
            )


def _plain_options(group: Group) -> Group:
    """The options of a group that are plain data; a rate or lambda in any form is a float."""
    options: Group = {}
    for key in sorted(group.keys() - set(_NOT_COMPARED)):
        value: Any = group[key]
        if key in ("lr", "weight_decay"):
            with suppress(TypeError, ValueError, RuntimeError):  # the plan refuses what is not a number
                value = float(value)
        if value is None or isinstance(value, bool | int | float | str | tuple | list):
            options[key] = value
    rule = DECAY_RULES.get(group["decay"])  # the plan refuses an unknown one, and the others must hear of it
    if rule is not None and rule.uses_step:
        options["step_count"] = group["step_count"]
    return options


def _describe(group: Group, name: str, param: Tensor) -> str:
    """A line about a parameter: what it is, how it lies over ranks, and in which precision it is orthogonalized."""
    sharded = f" {as_dtensor(param).placements} over {as_dtensor(param).device_mesh.shape}" if is_dtensor(param) else ""
    frozen = "" if param.requires_grad else " frozen"
    rule, where, misfit = ALGORITHMS.get(group["algorithm"]), str(param.device.type), ""
    if rule is not None and rule.matrices is not None:
        where = str(rule.matrices.result_dtype(group, param.dtype, param.device))
        misfit = shard_misfit(param, MatrixView.of(group).stack_axes(param.dim())) if sharded else ""
    return f"{name} {tuple(param.shape)} {param.dtype}{sharded}{frozen}: {group['algorithm']} in {where}{misfit}"
