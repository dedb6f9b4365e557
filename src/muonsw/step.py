"""One step: six phases, and the three ways to walk them.

    collect   the parameters that have gradients, in batches of one group, device and dtype
    check     learning rates and weight decays, and rates against the peak
    agree     whether the step is taken: gradients are finite and, on many ranks, all would do the same
    rates     learning rate and decay of each batch
    update    state and directions, a chunk at a time (`algorithms/`), exchanged where matrices are sharded
    apply     the only place where weights change (`apply.py`)

What can be wrong is found in the first four, and the state that is missing is made there, before anything changes: a
step that raises leaves weights and state alone. Only the machine can fail in the last two (no memory for a chunk, an
interrupt); then the step is not counted, but what was updated before stays so. `local_step` walks the phases for
parameters that are whole on this rank, `sharded_step` for those that ranks share, and `captured_step` has the last two
and the finite check in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw import norms, peak, rates, replay
from muonsw.algorithms import ALGORITHMS, Budget, Update
from muonsw.algorithms.base import FusedUpdate, Rates
from muonsw.apply import apply_update
from muonsw.decay import decays
from muonsw.distributed import exchanged_updates
from muonsw.distributed.agreement import asked_by
from muonsw.distributed.shards import is_dtensor, local_item, refuse_interleaved
from muonsw.nonfinite import Flag, NonFiniteGradientError, describe_non_finite, finite_flag
from muonsw.precision import STORED
from muonsw.state import keep, missing_state
from muonsw.stored import as_computed, finish, put_back, updates_in_place
from muonsw.work import Batch, Group, Item, MissingState, any_dtensor, items_of, label_of, rows_of

if TYPE_CHECKING:
    from muonsw.distributed.agreement import StepAgreement
    from muonsw.distributed.rounds import ExchangeBatch
    from muonsw.optimizer import ScaledDecayOptimizer

States = dict[Tensor, dict[str, Any]]

# Called once nothing can be wrong any more, before anything changes.
BeforeUpdate = Callable[[list[Batch], list[Rates]], None]

CPU_CHUNK_BYTES = 4 * 2**20
ACCELERATOR_CHUNK_BYTES = 9 * 2**26
# Little, since a graph keeps it, and just so much that products fill a GPU: of 24 matrices of 768 x 2048 those with one
# triangle have 504 tiles, and an H200 computes 264 at a time (with 16 matrices a third of the time was waiting).
REPLAYED_CHUNK_BYTES = 9 * 2**24


@_disable_dynamo  # kernels and graphs are faster than what the compiler would make of a step
def take_step(optimizer: ScaledDecayOptimizer) -> None:
    """Take one step; roll back peaks, counts and empty state on error."""
    last, groups = (optimizer._last, optimizer._last_skipped), optimizer.param_groups
    kept = [_kept_of(group) for group in groups]
    try:
        _walk(optimizer)
        rates.count_steps(groups)
    except BaseException:
        optimizer._last, optimizer._last_skipped = last
        for group, values in zip(groups, kept, strict=True):
            group.update(zip(_KEPT, values, strict=True))
        drop_empty_state(optimizer)
        raise


def drop_empty_state(optimizer: Optimizer) -> None:
    """Forget the state that `collect` has begun for parameters of which nothing is kept yet."""
    for param in [param for param, state in optimizer.state.items() if not state]:
        del optimizer.state[param]


# What steps keep in a group.
_KEPT = (*peak.KEPT, *rates.KEPT)
_kept_of = itemgetter(*_KEPT)


def _walk(optimizer: ScaledDecayOptimizer) -> None:
    """Replay the step from a graph that is ready, or else walk the phases."""
    if is_shared(optimizer):
        sharded_step(optimizer)
    elif not _replays(optimizer) or not _replayed(optimizer):
        local_step(optimizer)


def _replays(optimizer: ScaledDecayOptimizer) -> bool:
    """Whether to replay steps if possible: as the user chose, else when the step is CPU-bound."""
    if optimizer._before_update is not None:  # Schedule-Free swaps weights, which is incompatible with graphs
        return False
    if optimizer.replay is not None:
        return optimizer.replay
    first = optimizer.param_groups[0]["params"][:1]
    if not first or not first[0].is_cuda or optimizer.nonfinite == "raise":
        return False
    return optimizer._replay.pays(optimizer.param_groups)


def is_shared(optimizer: ScaledDecayOptimizer) -> bool:
    """Whether other ranks hold parts or copies of a parameter; DTensors may be swapped in at any time."""
    groups = optimizer.param_groups
    return optimizer._ranks.process_group is not None or True in [any_dtensor(group["params"]) for group in groups]


def local_step(optimizer: ScaledDecayOptimizer) -> None:
    """A step of parameters that are whole on this rank."""
    work = collect(optimizer, unsharded=True)
    check(optimizer, work)
    if _replays(optimizer) and _can_be_captured(optimizer, work):
        captured_step(optimizer, work)
        return
    ok = decide(optimizer, work, finite(optimizer, work, counted=True))
    if ok is False:
        skip(optimizer, work)
        return
    flag = ok if isinstance(ok, Flag) else None
    all_rates = final_rates(optimizer, work, flag)
    update(optimizer, work, all_rates)
    if flag is not None and True in [rates.counts_steps(group) for group in optimizer.param_groups]:
        rates.forget_skipped_start(optimizer.param_groups, flag.bad)


def sharded_step(optimizer: ScaledDecayOptimizer) -> None:
    """A step of parameters that ranks share: local matrices are updated directly, sharded ones exchanged first."""
    if optimizer.replay:
        optimizer._counters.not_replayed("parameters are sharded, or shared by a process_group")
    asked = [asked_by(group) for group in optimizer.param_groups]  # before `check` has resolved anything on this rank
    try:
        work = collect(optimizer)
        check(optimizer, work)
        _check_placements(work)
        ok, missing = finite(optimizer, work), missing_shards(work)
    except Exception:
        agree(optimizer, asked, False)  # the other ranks skip this step instead of waiting for ever
        raise
    agreement = agree(optimizer, asked, ok)
    if agreement.absent:
        drop_empty_state(optimizer)  # ranks make it in one order, in which a checkpoint gathers it
        work = collect(optimizer, agreement.absent)
        missing = missing_shards(work)
        remember(optimizer, work)
    if not work:
        optimizer._counters.no_gradient()
    if decide(optimizer, work, agreement.ok) is False:
        skip(optimizer, work)
        return
    sharded = norms.ShardedNorms(work, optimizer._ranks.layouts)
    radii = agreed_radii(optimizer, asked, work, sharded)
    update_sharded(optimizer, work, final_rates(optimizer, work, None, radii + missing), sharded)


def captured_step(optimizer: ScaledDecayOptimizer, work: list[Batch]) -> None:
    """A step whose rates the host hands over as scalars on the device, so that the rest can be a graph."""

    def program(work: list[Batch], on_device: list[Rates]) -> Flag | None:
        ok = decide(optimizer, work, finite(optimizer, work, counted=True, captured=True))
        flag = ok if isinstance(ok, Flag) else None
        all_rates = [batch_rates._replace(flag=flag) for batch_rates in on_device]
        update(optimizer, work, all_rates)
        return flag

    on_host = final_rates(optimizer, work, None)
    optimizer._replay.take(work, on_host, program, asked=bool(optimizer.replay))
    optimizer._last_skipped = optimizer._replay.flag or False


def _replayed(optimizer: ScaledDecayOptimizer) -> bool:
    """Take the step by a graph, if one is bound to exactly what is there now."""
    settings = (optimizer.nonfinite, optimizer.chunk_bytes, optimizer._counters.address)
    batches = optimizer._replay.ready(optimizer.param_groups, optimizer.state, settings)
    if batches is None:
        return False
    check(optimizer, batches)
    optimizer._replay.again(final_rates(optimizer, batches, None))
    optimizer._last_skipped = optimizer._replay.flag or False
    return True


def _can_be_captured(optimizer: ScaledDecayOptimizer, work: list[Batch]) -> bool:
    """Whether a step like this can be captured, now or later; warns who has asked for it if not, or if it never is."""
    if not work:
        return False
    reason = replay.obstacle(work, optimizer.nonfinite)
    if optimizer.replay and (reason or optimizer._replay.complaint):
        optimizer._counters.not_replayed(reason or optimizer._replay.complaint)
    return not reason


# collect


def collect(optimizer: Optimizer, absent: Sequence[Tensor] = (), *, unsharded: bool = False) -> list[Batch]:
    """The parameters that have gradients, in batches; of a sharded one, the shard of this rank.

    The gradients of `absent` are on other ranks alone, and zero here. `unsharded` skips the search for DTensors: the
    caller knows that there are none.
    """
    zero = {id(param) for param in absent}
    position = 0
    work: list[Batch] = []
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        names = group.get("param_names")
        if names is None or len(names) != len(params):  # other parameters were put there, as ZeRO does
            names = _numbered(number, len(params))
        places = range(position, position + len(params))
        if not unsharded and (zero or any_dtensor(params)):
            items = _shards(places, names, params, optimizer.state, zero)
        else:
            items = _items(places, names, params, optimizer.state)
        work += _batches(number, group, items)
        position += len(params)
    return work


@lru_cache(maxsize=128)
def _numbered(number: int, count: int) -> list[str]:
    """Names for the parameters of a group that have none."""
    return [f"parameter {place} of group {number}" for place in range(count)]


def _items(places: Sequence[int], names: Sequence[str], params: Sequence[Tensor], state: States) -> list[Item]:
    """The parameters that have a gradient; no Python function runs for each of them."""
    columns = zip(places, names, params, [param.grad for param in params], strict=True)
    rows = [(place, name, param, grad, state[param], None) for place, name, param, grad in columns if grad is not None]
    for _, name, param, grad, *_ in rows:
        if grad.layout is not torch.strided or grad.shape != param.shape:
            _refuse_gradient(name, param, grad)
    return rows_of(Item, rows)


def _shards(
    places: Sequence[int], names: Sequence[str], params: Sequence[Tensor], state: States, zero: set[int]
) -> list[Item]:
    """The same of parameters that may be sharded, or have a gradient on other ranks alone."""
    items: list[Item] = []
    for place, name, param in zip(places, names, params, strict=True):
        grad = param.grad
        if grad is None and id(param) not in zero:
            continue
        if grad is not None and (grad.layout is not torch.strided or grad.shape != param.shape):
            _refuse_gradient(name, param, grad)
        if is_dtensor(param):
            items.append(local_item(place, name, param, grad, state[param]))
        else:
            items.append(Item(place, name, param, torch.zeros_like(param) if grad is None else grad, state[param]))
    return items


def _refuse_gradient(name: str, param: Tensor, grad: Tensor) -> NoReturn:
    if grad.layout != torch.strided:
        raise ValueError(f"the gradient of {name} is sparse; make it dense, or freeze the parameter")
    raise ValueError(
        f"{name} has shape {tuple(param.shape)} and its gradient {tuple(grad.shape)}; call zero_grad() when you change "
        f"a parameter, and backward() after it"
    )


def _batches(number: int, group: Group, items: list[Item]) -> list[Batch]:
    """The items of a group, those of one device and dtype together, in the order in which they come first."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
    kinds = [(item.param.device, item.param.dtype) for item in items]
    if len(set(kinds)) == 1:  # nearly always
        by_kind[kinds[0]] = items
    else:
        for kind, item in zip(kinds, items, strict=True):
            by_kind.setdefault(kind, []).append(item)
    batches = [Batch(number, group, *kind, _whole_parameters(of_kind), of_kind) for kind, of_kind in by_kind.items()]
    rule = ALGORITHMS[group["algorithm"]]
    for batch in batches:
        for item in batch.items if rule.matrices is not None else ():
            if item.param.dim() < 2:
                rule.count_matrices(group, item.param)  # raises: a framework has flattened the matrix
        if batch.device.type == "meta":
            raise ValueError(
                f"{batch.items[0].name} is on the meta device and has no values to change; give the model memory with "
                f"model.to_empty(device=...), initialize it, and build the optimizer after that"
            )
    return batches


def _whole_parameters(items: Sequence[Item]) -> list[Tensor]:
    return [item.param if item.whole is None else item.whole for item in items]


# check


def check(optimizer: ScaledDecayOptimizer, work: list[Batch]) -> None:
    """Check the rates of all groups and resolve peaks, on the host and before anything changes.

    Other options are checked where they are given: by the constructor, add_param_group and load_state_dict.
    """
    groups, counters = optimizer.param_groups, optimizer._counters
    if work:
        counters.place(work[0].device)
    if not work and not is_shared(optimizer):  # else other ranks may have gradients
        counters.no_gradient()
    _warn_of_unfrozen(optimizer)
    if decays(optimizer.defaults) and not any(decays(group) or group["decay"] == "none" for group in groups):
        counters.no_decay()
    for group in groups:
        if "max_momentum" in group and group["momentum"] and "betas" not in ALGORITHMS[group["algorithm"]].defaults:
            counters.momentum_not_cycled(group)
    peak.warn_of_changes([rates.check(g, label_of(g, number), counters) for number, g in enumerate(groups)])
    if optimizer._loaded_rates:
        before, optimizer._loaded_rates = optimizer._loaded_rates, []
        if "step" not in vars(optimizer):  # which schedulers replace; they record peaks of their own
            peak.warn_after_load([group if rates.needs_peak(group) else None for group in groups], before)
    remember(optimizer, work)


def _check_placements(work: list[Batch]) -> None:
    """Refuse DTensors without an exchange, for rules that see whole matrices or weights; others move any shard."""
    for batch in work:
        if ALGORITHMS[batch.group["algorithm"]].matrices is not None or norms.acting(batch.group) is not None:
            for item in [item for item in batch.items if item.whole is not None]:
                refuse_interleaved(item.name, item.parameter)


def remember(optimizer: ScaledDecayOptimizer, work: list[Batch]) -> None:
    """Keep what `summary` shows of this step."""
    optimizer._last = [(batch.group, batch.parameters, float(batch.group["lr"])) for batch in work]
    optimizer._last_skipped = False


def _warn_of_unfrozen(optimizer: ScaledDecayOptimizer) -> None:
    """Warn of parameters that were frozen when the optimizer was built, are not any more, and are in no group."""
    modules = [(name, reference(), own) for name, reference, own in optimizer._left_out]
    params = [(name, module._parameters.get(own)) for name, module, own in modules if module is not None]
    unfrozen = [(name, param) for name, param in params if param is not None and param.requires_grad]
    if unfrozen:
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for name in [name for name, param in unfrozen if id(param) not in own][:1]:
            optimizer._counters.unfrozen(name)


# agree


def finite(
    optimizer: ScaledDecayOptimizer, work: list[Batch], *, counted: bool = False, captured: bool = False
) -> Flag | bool:
    """Whether all gradients are finite; a flag counts its step as skipped, unless other ranks have a say in it."""
    if optimizer.nonfinite == "propagate" or not work:
        return True
    counted = counted and optimizer.nonfinite == "skip" and work[0].device.type == "cuda"
    flags = optimizer._counters.flags(work[0].device) if counted else None
    return finite_flag(work, flags, captured)


def agree(optimizer: ScaledDecayOptimizer, asked: list[Group], ok: Flag | bool) -> StepAgreement:
    """Agree with the other ranks on what was asked for, and whether the step is taken."""
    settings = {"nonfinite": optimizer.nonfinite, "chunk_bytes": optimizer.chunk_bytes}
    settings["without radius"] = norms.without_radius(optimizer.param_groups, optimizer.state)
    known = ok.ok if isinstance(ok, Flag) else ok
    return optimizer._ranks.agree(optimizer.param_groups, known, asked=asked, settings=settings)


def agreed_radii(
    optimizer: ScaledDecayOptimizer, asked: list[Group], work: list[Batch], sharded: norms.ShardedNorms
) -> MissingState:
    """The radii that are missing; a weight of norm zero on one rank is an error on all."""
    if not norms.without_radius(optimizer.param_groups, optimizer.state):
        return []
    try:
        radii = norms.missing_radii(work, sharded)
    except ValueError:
        agree(optimizer, asked, False)
        raise
    if not agree(optimizer, asked, True).ok:
        raise ValueError(
            "another rank holds a weight of norm zero, which the norm rule would keep there; see its error"
        )
    return radii


def decide(optimizer: ScaledDecayOptimizer, work: list[Batch], ok: Flag | bool) -> Flag | bool:
    """What follows from the finite flag: go on, skip, or raise."""
    if ok is True:
        return True
    if optimizer.nonfinite == "raise":
        if ok is False or not bool(ok.ok):
            raise NonFiniteGradientError(f"{describe_non_finite(items_of(work))}; nothing was changed")
        return True
    if isinstance(ok, Flag):
        optimizer._counters.skip_on_device(ok)
    return ok


def skip(optimizer: ScaledDecayOptimizer, work: list[Batch]) -> None:
    """Leave everything as it is; the step counts for schedules."""
    optimizer._counters.skip_on_host(items_of(work))
    optimizer._last_skipped = True
    drop_empty_state(optimizer)
    rates.count_updates(optimizer.param_groups)
    rates.forget_skipped_start(optimizer.param_groups, True)


# rates


def final_rates(
    optimizer: ScaledDecayOptimizer, work: list[Batch], flag: Flag | None, missing: MissingState | None = None
) -> list[Rates]:
    """Learning rate and decay of each batch, for which all state is there; from here on the step is taken."""
    if missing is None:
        missing = [one for batch in work for one in missing_state(batch.group, batch.items)]
    found = rates.rates_of(work, optimizer.param_groups, flag)
    if flag is not None:
        optimizer._last_skipped = flag
    if optimizer._before_update is not None:  # which may refuse the step
        optimizer._before_update(work, found)
    keep(missing)
    return found


def missing_shards(work: list[Batch]) -> MissingState:
    """What state lacks on this rank, without radii, which ranks agree on."""
    return [one for batch in work for one in missing_state(batch.group, batch.items, ("radius",))]


# update and apply


def update(optimizer: ScaledDecayOptimizer, work: list[Batch], all_rates: list[Rates]) -> None:
    """Update parameters whose matrices are whole on this rank."""
    for batch, batch_rates in zip(work, all_rates, strict=True):
        for one in updates_here(optimizer, batch.group, batch.items, batch_rates):
            _apply(batch.group, one, batch_rates)
            del one  # its directions need not outlive it


def _is_stored(group: Group) -> bool:
    """Whether state is kept in another form than a step computes with."""
    return group["state_dtype"] in STORED or group["offload"]


def updates_here(
    optimizer: ScaledDecayOptimizer, group: Group, items: list[Item], batch_rates: Rates
) -> Iterator[Update | FusedUpdate]:
    """Updates of parameters whose matrices are whole on this rank, each to be applied before the next."""
    _count(items, batch_rates.flag)
    stored, budget = _is_stored(group), _budget(optimizer, group, items, batch_rates)
    if stored and not budget.plain:
        whole, items = updates_in_place(group, items, budget.chunk_bytes)
        yield from whole
        if not items:
            return
    computed = as_computed(group, items, budget.chunk_bytes) if stored else items
    for one in ALGORITHMS[group["algorithm"]].updates(group, computed, budget):
        yield one
        if stored:
            put_back(one.parts, batch_rates.ok)
    if stored:
        finish(computed, batch_rates.ok)


def update_sharded(
    optimizer: ScaledDecayOptimizer, work: list[Batch], all_rates: list[Rates], sharded: norms.ShardedNorms
) -> None:
    """Update parameters that ranks share; weights whose norm is a sum over ranks are moved last, all together."""
    waiting: list[norms.Waiting] = []
    for group, one, batch_rates in sharded_updates(optimizer, work, all_rates):
        if isinstance(one, Update) and sharded.concern(one):
            waiting.append((group, one, batch_rates))
        else:
            _apply(group, one, batch_rates)
    if sharded.weights:  # also where this rank holds nothing of them
        for group, one, batch_rates in sharded.prepared(waiting):
            apply_update(group, one, batch_rates)


def sharded_updates(
    optimizer: ScaledDecayOptimizer, work: list[Batch], all_rates: list[Rates]
) -> Iterator[tuple[Group, Update | FusedUpdate, Rates]]:
    """Updates of parameters that ranks share: those whose matrices are whole here, then those that are exchanged."""
    exchanged: list[tuple[ExchangeBatch, Rates]] = []
    for batch, batch_rates in zip(work, all_rates, strict=True):
        group = batch.group
        here, sent = optimizer._ranks.sort(group, batch.items)
        if here:
            for local in updates_here(optimizer, group, here, batch_rates):
                yield group, local, batch_rates
        if sent is not None:
            _count(sent.items, batch_rates.flag)
            exchanged.append((_computed(optimizer, sent), batch_rates))
    for number, one in _exchange(optimizer, exchanged):
        sent, batch_rates = exchanged[number]
        yield sent.group, one, batch_rates
        if _is_stored(sent.group):
            put_back(one.parts, None)
    for sent in [sent for sent, _ in exchanged if _is_stored(sent.group)]:
        finish(sent.items, None)


def _computed(optimizer: ScaledDecayOptimizer, batch: ExchangeBatch) -> ExchangeBatch:
    """A batch with its state as a step computes with it."""
    if not _is_stored(batch.group):
        return batch
    ahead = chunk_bytes(optimizer, batch.items[0].param.device)
    return batch._replace(items=as_computed(batch.group, batch.items, ahead))


def _exchange(
    optimizer: ScaledDecayOptimizer, exchanged: list[tuple[ExchangeBatch, Rates]]
) -> Iterator[tuple[int, Update]]:
    """The updates of sharded matrices, each with the number of its batch."""
    if not exchanged:
        return
    batches = [batch for batch, _ in exchanged]
    rounds = optimizer._ranks.rounds(batches, chunk_bytes(optimizer, batches[0].items[0].param.device))
    yield from exchanged_updates(batches, rounds)


def _count(items: list[Item], flag: Flag | None) -> None:
    """Count the step in the state of parameters that follow it."""
    counters = [item.state["step"] for item in items if "step" in item.state]
    if not counters:
        return
    if flag is not None:
        torch._foreach_add_(counters, flag.taken, alpha=1)  # without alpha torch would read the tensor on the host
    elif not counters[0].is_cpu:
        torch._foreach_add_(counters, 1)
    else:  # on CPUs torch goes from one to the next, and would make a tensor of the number for each
        torch._foreach_add_(counters, counters[0].new_ones(()), alpha=1)


def _apply(group: Group, one: Update | FusedUpdate, batch_rates: Rates) -> None:
    apply_update(group, one if batch_rates.norm is None else norms.prepared(group, one, batch_rates), batch_rates)


def _budget(optimizer: ScaledDecayOptimizer, group: Group, items: list[Item], batch_rates: Rates) -> Budget:
    """How an algorithm may work; where a norm rule acts it cuts no weight and leaves the last word to the rule."""
    most, plain = chunk_bytes(optimizer, items[0].param.device), batch_rates.norm is not None
    if optimizer.replay is None and optimizer.chunk_bytes is None and _replays(optimizer):
        most = REPLAYED_CHUNK_BYTES  # which a graph keeps, and the user has not asked for one
    if plain and ALGORITHMS[group["algorithm"]].matrices is None:
        most = max(most, *(item.param.numel() * item.param.element_size() for item in items))
    return Budget(most, batch_rates.flag, batch_rates.on_host, plain or group["fused"] is False, _is_stored(group))


def chunk_bytes(optimizer: ScaledDecayOptimizer, device: torch.device) -> int:
    """How much temporary memory a batch of matrices may take."""
    return optimizer.chunk_bytes or (CPU_CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES)
