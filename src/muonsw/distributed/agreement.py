"""What the ranks that hold a model together must agree on before a step: that they do the same, and whether they do it.

Each step begins with one small reduction over all of them. It carries the finite flag, a digest of the plan, and which
parameters lack a gradient. Its length hardly depends on the plan, so ranks with different plans find out instead of
waiting for each other for ever. A GPU is asked for the result only when the plan is new or a gradient is missing here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import Group
from muonsw.distributed.layout import spread_ranks
from muonsw.distributed.shards import as_spread, is_spread, local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Lengths of the reduction are multiples of this, so that plans which differ by a few parameters still meet in it.
_BLOCK = 1024

# Settings of a group that may differ from rank to rank without harm, or that are no settings.
_OWN_BUSINESS = ("params", "param_names", "role", "resolved_peak_lr", "peak_record", "constructor_lr", "highest_lr")


class Member(NamedTuple):
    """A parameter of the optimizer, and what to call it."""

    group: Group
    name: str
    param: Tensor


class Agreed(NamedTuple):
    """Whether every rank may take the step, and the parameters that lack a gradient on this rank alone."""

    ok: Tensor | bool
    absent: list[Tensor]


class Agreement:
    """The reduction that begins a step, over all ranks that hold parts or copies of the parameters."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self._process_group = process_group
        self._seen: Any = None
        self._plan: list[str] = []
        self._digest = 0
        self._groups: list[ProcessGroup] = []

    def concerns(self, param: Tensor) -> bool:
        """Whether other ranks hold parts of a parameter, or copies of it that must stay the same."""
        return self._process_group is not None or is_spread(param)

    def reach(
        self, members: Sequence[Member], ok: Tensor | bool, *, settings: str = "", measured: bool = False
    ) -> Agreed:
        """Tell the others whether the gradients here are finite and complete, and hear the same from them.

        Args:
            members: all parameters of the optimizer.
            ok: whether the gradients on this rank are finite.
            settings: settings of the whole optimizer, which must be the same on all ranks.
            measured: whether telemetry measures this step together with other ranks.

        Raises:
            RuntimeError: if the ranks have different parameters, shapes or settings, or some measure and some do not.
            ValueError: if copies of a parameter differ, or have gradients on some ranks only.
        """
        watched = [member for member in members if self.concerns(member.param)]
        is_new = self._look(members, watched, settings)
        missing = [int(member.param.grad is None) for member in watched]
        lacking = any(lack and member.param.requires_grad for lack, member in zip(missing, watched, strict=True))
        header = [1, self._digest, -self._digest, int(measured), -int(measured), int(is_new)]
        message = self._reduced(ok, [*header, *missing, *(-lack for lack in missing)], local(watched[0].param).device)
        if not (message.is_cpu or is_new or lacking or measured):
            return Agreed(message[0] > 0, [])
        values = message.tolist()
        self._check(values)
        if values[5]:
            self._compare_copies(watched)
        absent = _absent(watched, missing, values[len(header) :])
        return Agreed(bool(values[0]) if message.is_cpu else message[0] > 0, absent)

    def _reduced(self, ok: Tensor | bool, values: list[int], device: torch.device) -> Tensor:
        """The smallest of all ranks for each value; the first is whether gradients are finite."""
        values[0] = 1 if isinstance(ok, Tensor) else int(ok)
        values += [0] * (math.ceil(len(values) / _BLOCK) * _BLOCK - len(values))
        message = torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)
        if isinstance(ok, Tensor):
            message[0] = ok.to(device, non_blocking=True)
        for group in self._groups:
            dist.all_reduce(message, dist.ReduceOp.MIN, group=group)
        return message

    def _check(self, values: Sequence[int]) -> None:
        """Where the smallest value and the smallest negative value are not opposite, ranks differ."""
        _, digest, minus_digest, measured, minus_measured, *_ = values
        if digest != -minus_digest:
            self._refuse()
        if measured != -minus_measured:
            raise RuntimeError(
                "telemetry would measure this step on some ranks only; attach it on every rank, with the same `every` "
                "and `start_step`, and give the sink to one of them"
            )

    def _look(self, members: Sequence[Member], watched: Sequence[Member], settings: str) -> bool:
        """Notice whether parameters or groups have changed since the last step, and with them the plan."""
        seen = (settings, [(id(member.param), member.param.requires_grad) for member in members])
        if seen == self._seen:
            return False
        self._seen = seen
        self._plan = [settings, *(_describe(member) for member in members)]
        self._digest = int.from_bytes(hashlib.sha256("\n".join(self._plan).encode()).digest()[:7])
        self._groups = self._circles([member.param for member in watched])
        return True

    def _circles(self, params: Sequence[Tensor]) -> list[ProcessGroup]:
        """Process groups that reach, one after another, every rank that holds parts or copies of the parameters."""
        ranks = spread_ranks(params)
        if self._process_group is not None and ranks <= set(dist.get_process_group_ranks(self._process_group)):
            return [self._process_group]
        if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
            return [dist.group.WORLD]
        meshes = list(dict.fromkeys(as_spread(param).device_mesh for param in params if is_spread(param)))
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        groups += [] if self._process_group is None else [self._process_group]
        return groups if len(meshes) == 1 and self._process_group is None else groups * 2

    def _refuse(self) -> NoReturn:
        """Tell what this rank would do otherwise than another; all ranks are here."""
        plans: list[list[str]] = [[] for _ in range(dist.get_world_size(self._groups[0]))]
        dist.all_gather_object(plans, self._plan, group=self._groups[0])
        for rank, theirs in zip(dist.get_process_group_ranks(self._groups[0]), plans, strict=True):
            for here, there in zip_longest(self._plan, theirs, fillvalue="nothing"):
                if here != there:
                    raise RuntimeError(
                        f"the ranks would take different steps, so none is taken: rank {dist.get_rank()} has\n  {here}"
                        f"\nwhere rank {rank} has\n  {there}\nbuild model and optimizer alike on every rank"
                    )
        raise RuntimeError(
            "the ranks would take different steps, so none is taken; compare optimizer.routing() of every rank, and "
            "build model and optimizer alike on each"
        )

    def _compare_copies(self, watched: Sequence[Member]) -> None:
        """Plain parameters under a process group must be the same on all its ranks."""
        if self._process_group is None:
            return
        plain = [member for member in watched if not is_spread(member.param)]
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
    """Parameters that lack a gradient here and have one elsewhere, where it counts as zero."""
    absent = []
    for place, member in enumerate(watched):
        missing_everywhere, missing_somewhere = values[place], -values[place + len(watched)]
        if not is_spread(member.param) and missing_everywhere != missing_somewhere:
            raise ValueError(
                f"{member.name} has a gradient on some ranks of process_group only; average gradients over all ranks "
                f"before the step, as DistributedDataParallel does (find_unused_parameters=True)"
            )
        if missing[place] and not missing_everywhere:
            absent.append(member.param)
    return absent


def _describe(member: Member) -> str:
    """A line about a parameter and all settings that make a rank move it otherwise."""
    group, name, param = member
    spread = f" {as_spread(param).placements} over {as_spread(param).device_mesh.shape}" if is_spread(param) else ""
    rule = ALGORITHMS[group["algorithm"]]
    keys = sorted(key for key in group if key not in _OWN_BUSINESS and not isinstance(group[key], Tensor))
    settings = ", ".join(f"{key}={group[key]!r}" for key in keys if key in rule.defaults or key in _SETTINGS)
    frozen = "" if param.requires_grad else " frozen"
    where = param.device.type if rule.whole is None else rule.whole.result_dtype(group, param.dtype, param.device)
    return f"{name} {tuple(param.shape)} {param.dtype}{spread}{frozen}: {group['algorithm']} in {where}, {settings}"


_SETTINGS = (
    "lr",
    "weight_decay",
    "decay",
    "total_steps",
    "norm",
    "target_norm",
    "cautious",
    "peak",
    "lr_multiplier",
    "state_dtype",
    "rounding",
    "maximize",
)


def _checksum(param: Tensor) -> Tensor:
    """The sum of a tensor's bits, which does not depend on the order of summation."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return param.detach().contiguous().view(-1).view(integers[param.element_size()]).sum(dtype=torch.int64)
