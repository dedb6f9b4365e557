"""What the ranks that hold a model together must agree on before a step: their plans, their settings, whether to skip.

Each step begins with one small reduction over all of them. It carries the finite flag, a digest of parameters and
settings, the options that are held in tensors, and which parameters lack a gradient. Its length hardly depends on the
plan, so ranks with different plans find out instead of waiting for each other for ever. Every rank reads the result
before it sends anything else; that one read is all that a step waits for on a GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.decay import DECAY_RULES
from muonsw.distributed.layout import mesh_ranks
from muonsw.distributed.shards import as_dtensor, is_dtensor, local, shard_misfit
from muonsw.work import Group, copied_to, label_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Lengths of the reduction are multiples of this, so that plans which differ by a few parameters still meet in it.
_BLOCK = 1024


class Member(NamedTuple):
    """A parameter of the optimizer, and what to call it."""

    group: Group
    name: str
    param: Tensor


class StepAgreement(NamedTuple):
    """Whether every rank may take the step, and the parameters that lack a gradient on this rank alone."""

    ok: bool
    absent: list[Tensor]


class Agreement:
    """The reduction that begins a step, over all ranks that hold parts or copies of the parameters."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self._process_group = process_group
        self._seen: Any = None
        self._param_lines: list[str] = []
        self._digest = b""
        self._groups: list[ProcessGroup] = []

    def reach(
        self,
        groups: Sequence[Group],
        members: Sequence[Member],
        ok: Tensor | bool,
        *,
        options: Sequence[Group],
        announced: Sequence[str],
    ) -> StepAgreement:
        """Tell the others whether the gradients here are finite and complete, and hear the same from them.

        Args:
            groups: the param groups.
            members: all parameters of the optimizer.
            ok: whether the gradients on this rank are finite, and it can take the step.
            options: plain options of the optimizer, then of each group, which must be the same on all ranks.
            announced: what hooks of this step will do, in words; it must be the same on all ranks.

        Raises:
            RuntimeError: if the ranks have different parameters, shapes or settings, or have announced something else.
            ValueError: if copies of a parameter differ, or have gradients on some ranks only.
        """
        # of which other ranks hold parts, or copies that must stay the same
        watched = [member for member in members if self._process_group is not None or is_dtensor(member.param)]
        is_new = self._look(members, watched)
        digest = _number(self._digest + repr([options, announced]).encode())
        missing = [int(member.param.grad is None) for member in watched]
        header = [1, digest, -digest, int(is_new)]
        values = [*header, *missing, *(-lack for lack in missing)]
        values = self._reduced(ok, values, local(watched[0].param).device)
        # where the smallest value and the smallest negative value are not opposite, ranks differ
        if values[1] != -values[2]:
            self._refuse([*_described(options, groups), *self._param_lines, *announced])
        if values[3]:
            self._compare_copies(watched)
        return StepAgreement(bool(values[0]), _absent(watched, missing, values[len(header) :]))

    def _reduced(self, ok: Tensor | bool, values: list[int], device: torch.device) -> list[int]:
        """The smallest of all ranks for each value; the first is whether the step may be taken."""
        values[0] = 1 if isinstance(ok, Tensor) else int(ok)
        message = torch.zeros(math.ceil(len(values) / _BLOCK) * _BLOCK, dtype=torch.int64, device=device)
        message[: len(values)] = torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        if isinstance(ok, Tensor):
            message[0] = copied_to(ok, device)
        for group in self._groups:
            dist.all_reduce(message, dist.ReduceOp.MIN, group=group)
        return message[: len(values)].tolist()

    def _look(self, members: Sequence[Member], watched: Sequence[Member]) -> bool:
        """Notice whether parameters have changed since the last step."""
        seen = [(id(member.param), member.param.requires_grad, member.group["algorithm"]) for member in members]
        if seen == self._seen:
            return False
        self._seen = seen
        self._param_lines = [_describe(member) for member in members]
        self._digest = hashlib.sha256("\n".join(self._param_lines).encode()).digest()
        self._groups = self._circles([member.param for member in watched])
        return True

    def _circles(self, params: Sequence[Tensor]) -> list[ProcessGroup]:
        """Process groups that reach, one after another, every rank that holds parts or copies of the parameters."""
        ranks = mesh_ranks(params)
        if self._process_group is not None and ranks <= set(dist.get_process_group_ranks(self._process_group)):
            return [self._process_group]
        if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
            return [dist.group.WORLD]
        meshes = list(dict.fromkeys(as_dtensor(param).device_mesh for param in params if is_dtensor(param)))
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups += [] if self._process_group is None else [self._process_group]
        return groups if len(meshes) == 1 and self._process_group is None else groups * 2

    def _refuse(self, lines: list[str]) -> NoReturn:
        """Say what this rank would do otherwise than another; all ranks are here."""
        theirs: list[list[str]] = [[] for _ in range(dist.get_world_size(self._groups[0]))]
        dist.all_gather_object(theirs, lines, group=self._groups[0])
        for rank, others in zip(dist.get_process_group_ranks(self._groups[0]), theirs, strict=True):
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

    def _compare_copies(self, watched: Sequence[Member]) -> None:
        """Plain parameters under a process group must be the same on all its ranks."""
        if self._process_group is None:
            return
        plain = [member for member in watched if not is_dtensor(member.param)]
        if not plain:
            return
        sums = torch.stack([_checksum(member.param) for member in plain])
        both = torch.cat([sums, -sums])
        dist.all_reduce(both, dist.ReduceOp.MIN, group=self._process_group)
        low, high = both.chunk(2)
        for member, differs in zip(plain, (low != -high).tolist(), strict=True):
            if differs:
                raise ValueError(
                    f"{member.name} has other values on another rank of process_group, which is for parameters that "
                    f"every rank holds alike; wrap the model in DistributedDataParallel or broadcast it first, and "
                    f"leave process_group out where ranks hold different parameters"
                )


def _absent(watched: Sequence[Member], missing: Sequence[int], values: Sequence[int]) -> list[Tensor]:
    """Parameters that lack a gradient here, where it counts as zero, and have one elsewhere."""
    absent = []
    for place, member in enumerate(watched):
        missing_everywhere, missing_somewhere = values[place], -values[place + len(watched)]
        if missing_everywhere != missing_somewhere and _has_copies_only(member.param, watched):
            raise ValueError(
                f"{member.name} has a gradient on some ranks only, and all hold copies of it; average gradients over "
                f"all ranks before the step, as DistributedDataParallel does (find_unused_parameters=True)"
            )
        if missing[place] and not missing_everywhere:
            absent.append(member.param)
    return absent


def _has_copies_only(param: Tensor, watched: Sequence[Member]) -> bool:
    """Whether all ranks that agree hold a whole parameter; on a mesh of some of them, others may lack its gradient."""
    if not is_dtensor(param):
        return True
    replicated = all(placement.is_replicate() for placement in as_dtensor(param).placements)
    return replicated and mesh_ranks([param]) == mesh_ranks(member.param for member in watched)


# Not compared: what is held by each rank in its own way, and counts of steps, which a rank that failed has not taken.
_NOT_COMPARED = ("params", "param_names", "step_count", "gradient_average")


def plain_options(group: Group) -> Group:
    """The options of a group that are plain data; a rate or lambda in any form is a float."""
    options: Group = {}
    for key in sorted(group.keys() - set(_NOT_COMPARED)):
        value: Any = group[key]
        if key in ("lr", "weight_decay"):
            with suppress(TypeError, ValueError, RuntimeError):  # the plan refuses what is not a number
                value = float(value)
        if value is None or isinstance(value, bool | int | float | str | tuple | list):
            options[key] = value
    if DECAY_RULES[group["decay"]].uses_step:
        options["step_count"] = group["step_count"]
    return options


def _described(options: Sequence[Group], groups: Sequence[Group]) -> list[str]:
    """A line for each setting, of the optimizer and of its groups."""
    labels = ["the optimizer", *(label_of(group, number) for number, group in enumerate(groups))]
    return [
        f"{label}: {key}={value!r}"
        for label, chosen in zip(labels, options, strict=True)
        for key, value in chosen.items()
    ]


def _describe(member: Member) -> str:
    """A line about a parameter: what it is, how it lies over ranks, and in which precision it is orthogonalized."""
    group, name, param = member
    sharded = f" {as_dtensor(param).placements} over {as_dtensor(param).device_mesh.shape}" if is_dtensor(param) else ""
    rule = ALGORITHMS[group["algorithm"]]
    frozen = "" if param.requires_grad else " frozen"
    where = param.device.type if rule.matrices is None else rule.matrices.result_dtype(group, param.dtype, param.device)
    view = rule.view(group)
    misfit = shard_misfit(param, view.stack_axes(param.dim())) if sharded and view is not None else ""
    return f"{name} {tuple(param.shape)} {param.dtype}{sharded}{frozen}: {group['algorithm']} in {where}{misfit}"


def _number(data: bytes) -> int:
    """A digest that fits into a signed number of eight bytes, as does its negative."""
    return int.from_bytes(hashlib.sha256(data).digest()[:7])


def _checksum(param: Tensor) -> Tensor:
    """The sum of a tensor's bits, which does not depend on the order of summation."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return param.detach().contiguous().view(-1).view(integers[param.element_size()]).sum(dtype=torch.int64)
