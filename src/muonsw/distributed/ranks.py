"""One rank's view of the others: what they must agree on before a step, and what they exchange.

Each step begins with one small reduction over all ranks that share a model. Its message has a fixed length, so ranks
with different plans find out instead of hanging. It says whether gradients are finite, and carries a digest of
parameters, options and missing gradients.

On a GPU no rank waits for the result of a settled step, one that is planned like the step before it. The device turns
the result into the flag that multiplies learning rate and decay, so ranks that disagree change nothing, and the host
learns of it a step or two later. Anything that could change shapes or the number of collectives (the first step, a
changed option, another set of gradients, a load) makes a rank wait for the result before it exchanges anything. If
other ranks were settled and went ahead, it joins the step they agreed on: with zeros for gradients that only it lacks,
or, if it cannot, by sending zeros in a step that the flag cancels on every rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.decay import DECAY_RULES
from muonsw.distributed.exchange import Round, exchange_nothing, make_rounds
from muonsw.distributed.shards import Layout, Layouts, is_dtensor, local, mesh_ranks, shard_misfit
from muonsw.kernels.graphs import eagerly
from muonsw.matrices import MatrixView
from muonsw.nonfinite import Flag
from muonsw.text import users_line
from muonsw.work import Batch, Group, Item, label_of, named_params

# Cached exchange plans: parameters that only sometimes have gradients need several.
_REMEMBERED = 8

# Above every rank.
_NO_RANK = 2**31

# Not compared: what differs between ranks by design, and step counts, which lag on a rank that failed.
_NOT_COMPARED = ("params", "param_names", "step_count", "gradient_average")
_PLAIN = (type(None), bool, int, float, str, tuple, list)


class _Known(NamedTuple):
    """What depends on the parameters alone."""

    key: Any = None  # changes when the parameters do
    lines: Sequence[str] = ()  # one for each parameter, see `_describe`
    digest: str = ""  # a hash of `lines`
    groups: Sequence[dist.ProcessGroup] = ()
    watched: Sequence[tuple[str, Tensor]] = ()  # parameters that other ranks hold parts or copies of


class Message(NamedTuple):
    """What ranks reduce, by the minimum; values that must be equal are also sent negated.

    Integers in float64, exact below 2^53. The first five sum to 1 if the step may be taken.
    """

    ok: int  # 1 if the gradients here are finite
    plan: int
    minus_plan: int
    missing: int  # digest of the missing gradients in the step agreed on before; -1 if this rank cannot join it
    minus_missing: int
    failed: int  # the lowest rank that cannot take the step, minus _NO_RANK; 0 if all can
    minus_settled: int  # -1 if this rank does not wait for the result
    minus_new: int  # -1 if its parameters have changed
    local_missing: int
    minus_local_missing: int


class Ranks:
    """What an optimizer knows about the other ranks.

    Args:
        process_group: ranks with copies of the plain parameters; None if every rank works alone.

    Attributes:
        is_shared: whether other ranks hold parts or copies of this step's parameters.
        is_settled: whether this rank takes the step without waiting for the others.
    """

    waits_on: Sequence[str] = ("cpu",)  # devices where waiting for a result is free

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in process_group, which must contain every rank that uses it; pass "
                f"each rank a group it belongs to, or None where it trains alone"
            )
        self.process_group = process_group
        self.announced: list[str] = []  # collectives that a hook will run around this step
        self.layouts = Layouts(process_group)
        self.is_shared = self.is_settled = False
        self._known = _Known()
        self._rounds: dict[Any, list[Round]] = {}
        self._last_rounds: list[Round] = []
        # the step that this rank is about to take, and the last one that all ranks took
        self._plan, self._agreed_plan = "", ""  # what must not change while a rank is settled
        self._missing: tuple[bool, ...] = ()  # which watched parameters have no gradient
        self._agreed_missing: tuple[bool, ...] = ()
        self._options: list[Group] = []  # all of them, rates and decay included
        self._in_doubt = False  # ranks have taken a step that the flag forbade: agree again
        self._sent: Message
        self._message: Tensor | None = None
        self._bad: Tensor
        # over settled steps, the least of minus the difference between plans and of `failed`: zeros if all went well
        self._trouble: Tensor
        self._seen: Tensor  # a copy on the host, which lags

    def prepare(self, groups: Sequence[Group], settings: Group) -> None:
        """Work out what this rank is about to do, and whether it is settled.

        Args:
            groups: the param groups.
            settings: the optimizer's own options; like those of its groups, they must be equal on all ranks.
        """
        with torch._C.DisableTorchFunctionSubclass():  # makes attributes of DTensors twice as fast
            key = [(g["algorithm"], *map(id, g["params"]), *[p.requires_grad for p in g["params"]]) for g in groups]
        is_new = key != self._known.key
        if is_new:
            members = [
                (group, name, param)
                for number, group in enumerate(groups)
                for name, param in named_params(group, number)
            ]
            has_copies = self.process_group is not None
            shared = [(name, param) for _, name, param in members if has_copies or is_dtensor(param)]
            lines = [_describe(*member) for member in members]
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            covering = _covering_groups(self.process_group, [param for _, param in shared])
            self._known = _Known(key, lines, digest, covering, shared)
        self._options = [settings, *map(_plain_options, groups)]
        # schedulers change rates, decay and betas at every step, but not what is exchanged
        frozen = [[v for k, v in o.items() if k != "betas" and not isinstance(v, float)] for o in self._options]
        self._plan = repr([self._known.digest, frozen, self.announced])
        with torch._C.DisableTorchFunctionSubclass():
            self._missing = tuple([param.grad is None for _, param in self._known.watched])
        self._react_to_trouble()
        self.is_settled = (
            not self._in_doubt
            and (self._plan, self._missing) == (self._agreed_plan, self._agreed_missing)
            and settings["nonfinite"] != "raise"
            and self._device.type not in self.waits_on
        )
        plan = _digest([self._known.digest, self._options, self.announced])
        mine = _digest(self._missing)
        joined = _digest(self._agreed_missing) if self.is_settled or self._can_join() else -1
        self._sent = Message(1, plan, -plan, joined, -joined, 0, -self.is_settled, -is_new, mine, -mine)
        self._write(self._sent)

    def _can_join(self) -> bool:
        """Whether this rank can join the step that ranks agreed on before; missing gradients count as zero."""
        if self._agreed_plan != self._plan:
            return False
        columns = zip(self._known.watched, self._agreed_missing, self._missing, strict=True)
        return all(before == now or (now and is_dtensor(param)) for (_, param), before, now in columns)

    @property
    def _device(self) -> torch.device:
        return local(self._known.watched[0][1]).device

    def _write(self, message: Message) -> None:
        device = self._device
        if self._message is None or self._message.device != device:
            self._message = torch.zeros(len(message), dtype=torch.float64, device=device)
            self._bad = torch.zeros((), dtype=torch.float32, device=device)
            self._trouble = torch.zeros(2, dtype=torch.float64, device=device)
            self._seen = torch.zeros(2, dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
        # so few bytes need no pinned memory: the driver takes them along with the launch
        numbers = torch.tensor(message, dtype=torch.float64, device="cpu")
        self._message.copy_(numbers, non_blocking=True)

    def reduced(self, finite: Flag | bool) -> Flag:
        """Whether all ranks take this step, as a flag on the device; does not wait for the reduction."""
        message = self._message
        assert message is not None
        if isinstance(finite, Flag):
            message[0].sub_(finite.bad.to(message.device))
        elif not finite:
            message[0].zero_()

        def reduce() -> None:
            for group in self._known.groups:
                dist.all_reduce(message, dist.ReduceOp.MIN, group=group)

        eagerly(reduce)
        self._bad.copy_(message[:5].sum() < 1)
        return Flag(self._bad)

    def reduced_unread(self, finite: Flag | bool) -> Flag:
        """`reduced` for a settled step: the host does not read the result, so the device remembers trouble."""
        flag, message = self.reduced(finite), self._message
        assert message is not None
        torch.minimum(self._trouble, torch.stack([message[1:5].sum(), message[5]]), out=self._trouble)
        return flag

    def show_trouble(self) -> None:
        """Copy what the device remembers to the host, without waiting for it."""
        self._seen.copy_(self._trouble, non_blocking=True)

    def _react_to_trouble(self) -> None:
        """Raise if a rank failed in a settled step; agree again if ranks planned different ones."""
        if self._message is None or not self._seen.any():
            return
        difference, failed = map(int, self._seen.tolist())
        self._trouble.zero_()
        self._seen = torch.zeros_like(self._seen, pin_memory=self._seen.is_pinned())  # copies to the old one may follow
        self._in_doubt |= difference < 0
        _raise_failure(failed)

    def agree(self, finite: Flag | bool) -> tuple[Flag | bool, list[Tensor]]:
        """Whether all ranks take this step, and which parameters lack a gradient on this rank alone.

        Raises:
            RuntimeError: if ranks differ in parameters, shapes, settings or announced collectives, or if one of them
                cannot take the step.
            ValueError: if copies of a parameter differ, or only some ranks have their gradient.
        """
        flag, result = self.reduced(finite), self._read()
        if result.minus_settled:  # some ranks went ahead with the step agreed on before
            if not self._can_join() or result.failed:
                self._in_doubt = True
                exchange_nothing(self._last_rounds)
                _raise_failure(result.failed)
                return False, []
            late = zip(self._known.watched, self._agreed_missing, self._missing, strict=True)
            return flag, [param for (_, param), before, now in late if before != now]
        self._agreed_plan = ""
        if result.plan != -result.minus_plan:
            self._raise_difference()
        _raise_failure(result.failed)
        if result.minus_new and self.process_group is not None:
            _compare_copies([(n, p) for n, p in self._known.watched if not is_dtensor(p)], self.process_group)
        missing = self._missing
        absent: list[Tensor] = []
        if result.local_missing != -result.minus_local_missing:
            missing, absent = self._gather_missing()
        if self._in_doubt:
            warnings.warn(
                "ranks planned different steps before this one and took none of them; now their plans agree again",
                stacklevel=users_line(),
            )
            self._in_doubt = False
        if result.ok:
            self._agreed_plan, self._agreed_missing = self._plan, missing
        return bool(result.ok), absent

    def fail(self) -> None:
        """Tell the other ranks that this one cannot take the step, so that they do not wait for it."""
        self._write(self._sent._replace(minus_settled=0, failed=dist.get_rank() - _NO_RANK))
        self.reduced(finite=False)
        self._agreed_plan, result = "", self._read()
        if result.minus_settled:
            exchange_nothing(self._last_rounds)
        elif result.plan != -result.minus_plan:
            self._raise_difference()

    def _read(self) -> Message:
        assert self._message is not None
        return Message._make(map(int, self._message.tolist()))

    def _gather_missing(self) -> tuple[tuple[bool, ...], list[Tensor]]:
        """Which parameters have no gradient on any rank, and which lack theirs on this rank alone."""
        extremes = torch.tensor(
            [self._missing, [-flag for flag in self._missing]], dtype=torch.int64, device=self._device
        )
        for group in self._known.groups:
            dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
        absent, watched = [], self._known.watched
        everywhere, somewhere = extremes.tolist()
        columns = zip(watched, self._missing, everywhere, somewhere, strict=True)
        for (name, param), is_missing, all_miss, any_misses in columns:
            # Ranks outside a parameter's mesh have no gradient for it.
            if all_miss != -any_misses and (
                not is_dtensor(param)
                or (
                    all(placement.is_replicate() for placement in param.placements)
                    and mesh_ranks([param]) == mesh_ranks(other for _, other in watched)
                )
            ):
                raise ValueError(
                    f"{name} is replicated but has a gradient on some ranks only; average gradients over all ranks "
                    f"before the step, as DistributedDataParallel does (find_unused_parameters=True)"
                )
            if is_missing and not all_miss:
                absent.append(param)
        return tuple(map(bool, everywhere)), absent

    def _raise_difference(self) -> NoReturn:
        """Raise an error that shows the first difference between this rank and another."""
        group = self._known.groups[0]
        labels = ["the optimizer", *(label_of(options, number) for number, options in enumerate(self._options[1:]))]
        pairs = zip(labels, self._options, strict=True)
        lines = [f"{label}: {key}={value!r}" for label, options in pairs for key, value in options.items()]
        lines += [*self._known.lines, *self.announced]
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(gathered, lines, group=group)
        for rank, their_lines in zip(dist.get_process_group_ranks(group), gathered, strict=True):
            for here, there in zip_longest(lines, their_lines, fillvalue="nothing"):
                if here != there:
                    raise RuntimeError(
                        f"the ranks would take different steps, so none is taken: rank {dist.get_rank()} has\n  {here}"
                        f"\nwhere rank {rank} has\n  {there}\nbuild the same model and optimizer on every rank, and "
                        f"change options on all of them"
                    )
        raise RuntimeError(
            "the ranks would take different steps, so none is taken; compare optimizer.routing() and the options on "
            "every rank, and build the same model and optimizer on each"
        )

    def sort(self, batch: Batch) -> tuple[list[Item], list[Item], list[Layout]]:
        """Split a batch into items whose matrices are whole on this rank, and items to exchange with their layouts."""
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
        """The rounds of an exchange, cached by layouts and settings."""
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
        self._last_rounds = self._rounds[tuple(key)]
        return self._last_rounds


def _covering_groups(process_group: dist.ProcessGroup | None, params: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """Process groups that together reach every rank with parts or copies of the parameters."""
    ranks = mesh_ranks(params)
    if process_group is not None and ranks <= set(dist.get_process_group_ranks(process_group)):
        return [process_group]
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return [dist.group.WORLD]
    meshes = list(dict.fromkeys(param.device_mesh for param in params if is_dtensor(param)))
    groups = [group for mesh in meshes for group in mesh.get_all_groups()]
    groups += [] if process_group is None else [process_group]
    return groups if len(meshes) == 1 and process_group is None else groups * 2


def _digest(value: Any) -> int:
    """A digest below 2^50: a sum of several is exact in float64."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7]) >> 6


def _raise_failure(failed: int) -> None:
    if failed:
        raise RuntimeError(
            f"rank {failed + _NO_RANK} could not take a step, so no rank took it; see the error on that rank"
        )


def _compare_copies(copies: Sequence[tuple[str, Tensor]], process_group: dist.ProcessGroup) -> None:
    """Refuse plain parameters whose values differ between ranks of a process group."""
    if not copies:
        return
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [param.detach().contiguous().view(-1).view(integers[param.element_size()]) for _, param in copies]
    sums = torch.stack([numbers.sum(dtype=torch.int64) for numbers in bits])  # exact in any order
    extremes = torch.cat([sums, -sums])
    dist.all_reduce(extremes, dist.ReduceOp.MIN, group=process_group)
    low, high = extremes.chunk(2)
    for (name, _), differs in zip(copies, (low != -high).tolist(), strict=True):
        if differs:
            raise ValueError(
                f"{name} has different values on another rank of process_group, which is for replicated parameters; "
                f"wrap the model in DistributedDataParallel or broadcast it first, and leave process_group out where "
                f"ranks hold different parameters"
            )


def _plain_options(group: Group) -> Group:
    """The options of a group that are plain data, with rates and lambdas as floats."""
    options = dict(group)
    for key in ("lr", "weight_decay"):
        if not isinstance(options[key], float):
            with suppress(TypeError, ValueError, RuntimeError):  # the plan refuses non-numbers
                options[key] = float(options[key])
    options = {k: v for k, v in sorted(options.items()) if k not in _NOT_COMPARED and isinstance(v, _PLAIN)}
    rule = DECAY_RULES.get(group["decay"])  # the plan refuses an unknown rule, on every rank
    if rule is not None and rule.uses_step:
        options["step_count"] = float(group["step_count"])  # compared like a rate, which changes at every step
    return options


def _describe(group: Group, name: str, param: Tensor) -> str:
    """One line about a parameter: shape, sharding, algorithm and the precision of its orthogonalization."""
    sharded = f" {param.placements} over {param.device_mesh.shape}" if is_dtensor(param) else ""
    frozen = "" if param.requires_grad else " frozen"
    rule, where, misfit = ALGORITHMS.get(group["algorithm"]), str(param.device.type), ""
    if rule is not None and rule.matrices is not None:
        where = str(rule.matrices.result_dtype(group, param.dtype, param.device))
        misfit = shard_misfit(param, MatrixView.of(group).stack_axes(param.dim())) if is_dtensor(param) else ""
    return f"{name} {tuple(param.shape)} {param.dtype}{sharded}{frozen}: {group['algorithm']} in {where}{misfit}"
