"""One step: plan, commit, update, apply.

    plan     collect parameters with gradients into batches of one group, device and dtype; compute eta and phi of each
             batch. All validation happens here, on copies of the groups, so a step that raises has changed nothing.
    commit   allocate missing state, and write peaks and counters into the groups.
    update   compute momenta and directions, one chunk at a time (`algorithms/`); exchange sharded matrices.
    apply    change the weights, here and nowhere else (`apply.py`).

Only the machine can fail in the last two stages (out of memory, an interrupt). The step is then not counted, but chunks
that were already updated stay updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

from muonsw import codecs, peak
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import elementwise_chunks, update_matrices, whole_parts
from muonsw.apply import apply_update
from muonsw.decay import check_rates, decays, phi_of
from muonsw.distributed.exchange import exchange_updates
from muonsw.distributed.shards import is_dtensor, local, local_item, refuse_interleaved
from muonsw.matrices import matrix_chunks
from muonsw.nonfinite import Flag, NonFiniteGradientError, describe_non_finite, finite_flag
from muonsw.precision import LOW_PRECISION
from muonsw.state import allocate
from muonsw.work import Batch, Group, Item, StepContext, any_dtensor, items_of, named_params

if TYPE_CHECKING:
    from muonsw.distributed.shards import Layout
    from muonsw.optimizer import ScaledDecayOptimizer

CPU_CHUNK_BYTES = 4 * 2**20
ACCELERATOR_CHUNK_BYTES = 9 * 2**26

# Steps between searches for unfrozen parameters: with a frozen base of 288, one takes 0.4 ms, as long as a small step.
LOOK_FOR_UNFROZEN = 100


class Plan(NamedTuple):
    """What a step will do: the groups as they will be afterwards, batches, and the context of each batch."""

    groups: list[Group]
    batches: list[Batch]
    contexts: list[StepContext]


@_disable_dynamo  # our kernels and graphs are faster than a compiled step
def take_step(optimizer: ScaledDecayOptimizer) -> None:
    """Take one step. If it raises, nothing has changed, unless the machine failed."""
    ranks, groups = optimizer._ranks, optimizer.param_groups
    # do other ranks hold parts or copies of a parameter? DTensors may be swapped in at any time
    ranks.is_shared = ranks.process_group is not None or True in [any_dtensor(group["params"]) for group in groups]
    if ranks.is_shared:
        ranks.prepare(groups, {"nonfinite": optimizer.nonfinite, "chunk_bytes": optimizer.chunk_bytes})
    if ranks.is_shared and not ranks.is_settled:
        plan, finite = agreed_plan(optimizer)
        commit(optimizer, plan)
        finite = update_and_apply(optimizer, plan.batches, plan.contexts, finite=finite)
    else:
        plan = settled_plan(optimizer)
        finite = optimizer._replay.run(optimizer, plan.batches, plan.contexts, update_and_apply)
        if ranks.is_shared:
            ranks.show_trouble()
    optimizer._last_finite = finite
    if finite is False:
        optimizer._counters.skip_on_host(items_of(plan.batches))
    for group, planned in zip(optimizer.param_groups, plan.groups, strict=True):
        group["step_count"] += 1
        group["update_count"] = planned["update_count"]
        # If the first step was skipped, algorithms that build their bases at the first step do so at the next one.
        # Only the first step waits for the device here.
        if group["update_count"] == 1 and not finite:
            group["update_count"] = 0


# plan


def make_plan(
    optimizer: ScaledDecayOptimizer, batches: list[Batch] | None = None, absent: Sequence[Tensor] = ()
) -> Plan:
    """Check rates, find peaks and collect batches (unless the caller has them); changes nothing.

    Parameters in `absent` have a gradient on other ranks only; here it counts as zero.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "a CUDA graph would freeze the learning rate of this step; capture forward and backward, and step outside "
            "the graph: small steps replay as graphs automatically"
        )
    groups = [dict(group) for group in optimizer.param_groups]
    counters = optimizer._counters
    for number, group in enumerate(groups):
        check_rates(group, number, counters)
        if ALGORITHMS[group["algorithm"]].counts_steps(group):
            group["update_count"] = int(group["update_count"]) + 1
        if "max_momentum" in group and group["momentum"] and "betas" not in ALGORITHMS[group["algorithm"]].defaults:
            counters.warn_once(
                "momentum not cycled",
                f"the scheduler cycles betas, but algorithm={group['algorithm']!r} uses momentum, which stays at "
                f"{group['momentum']:g}; pass cycle_momentum=False to the scheduler",
            )
    if decays(optimizer.defaults) and not any(decays(group) or group["decay"] == "none" for group in groups):
        counters.warn_once(
            "no decay",
            "no param group decays: all have weight_decay=0, whatever the optimizer was built with; set it in the "
            "groups that should decay, or build the optimizer with weight_decay=0",
        )
    if batches is None:
        batches = collect(optimizer, groups, absent)
    contexts = []
    for batch in batches:
        group = groups[batch.number]
        phi = phi_of(group, group["lr"], group["step_count"] + 1)
        contexts.append(StepContext(group["lr"], phi, chunk_bytes(optimizer, batch.device)))
    return Plan(groups, batches, contexts)


def collect(optimizer: ScaledDecayOptimizer, groups: list[Group], absent: Sequence[Tensor] = ()) -> list[Batch]:
    """Collect parameters with gradients into batches; of a sharded parameter, this rank's shard."""
    zero, position, batches = {id(param) for param in absent}, 0, []
    make, state_of = Item._make, optimizer.state.get  # small steps are bound by Python
    for number, group in enumerate(groups):
        has_shards = any_dtensor(group["params"])
        view = ALGORITHMS[group["algorithm"]].view(group)
        if view is not None and group.get("block_period") and group["update_count"] % group["block_period"] == 0:
            view = view.unsplit()  # MuonBP takes whole matrices every few steps
        by_kind: dict[tuple[torch.device, torch.dtype], list[Item]] = {}
        for place, (name, param) in enumerate(named_params(group, number), start=position):
            grad = param.grad
            if grad is None and id(param) not in zero:
                continue
            if grad is not None and (grad.layout is not torch.strided or grad.shape != param.shape):
                raise ValueError(
                    f"{name} has shape {tuple(param.shape)} and a gradient of shape {tuple(grad.shape)}, "
                    f"{grad.layout}; make a sparse gradient dense, and call zero_grad() when you change a parameter"
                )
            if has_shards and is_dtensor(param):
                item = local_item(place, name, param)
            else:
                grad = torch.zeros_like(param) if grad is None else grad
                item = make((place, name, param, grad, state_of(param) or {}, None))
            state, shape = item.state, item.param.shape
            momentum = state.get("momentum_buffer", state.get("exp_avg"))
            if momentum is not None and momentum.shape != shape:  # kernels would read past the end
                raise ValueError(
                    f"the state of {name} has shape {tuple(momentum.shape)}, but the parameter now has {tuple(shape)}; "
                    f"reset it with optimizer.state[param].clear()"
                )
            if view is not None and len(shape) < 2:
                view.count(shape)  # raises, because a framework has flattened the matrix
            by_kind.setdefault((item.param.device, item.param.dtype), []).append(item)
        position += len(group["params"])
        for kind, items in by_kind.items():
            parameters = [item.param if item.dtensor is None else item.dtensor for item in items]
            batches.append(Batch(number, group, *kind, parameters, items, view))
            if kind[0].type == "meta":
                raise ValueError(
                    f"{items[0].name} is on the meta device, so it has no values to change; call "
                    f"model.to_empty(device=...), initialize the model, then build the optimizer"
                )
    return batches


def settled_plan(optimizer: ScaledDecayOptimizer) -> Plan:
    """Plan and commit a step that needs no agreement: one rank, or the plan that ranks last agreed on."""
    try:
        plan = make_plan(optimizer, optimizer._replay.ready(optimizer))
        if optimizer.nonfinite == "raise" and not finite_flag(plan.batches):  # waits for the device
            raise NonFiniteGradientError(f"{describe_non_finite(items_of(plan.batches))}; nothing was changed")
        commit(optimizer, plan)
    except Exception:
        if optimizer._ranks.is_shared:
            optimizer._ranks.fail()
        raise
    return plan


def agreed_plan(optimizer: ScaledDecayOptimizer) -> tuple[Plan, Flag | bool]:
    """Agree on a plan with all ranks that share parameters; also return whether all gradients are finite."""
    try:
        plan = make_plan(optimizer)
        for item in items_of([batch for batch in plan.batches if batch.view is not None]):
            refuse_interleaved(item.name, item.parameter)
        finite: Flag | bool = optimizer.nonfinite == "propagate" or finite_flag(plan.batches)
        allocate(optimizer)  # here, so that a rank that runs out of memory does not leave the others waiting
    except Exception:
        optimizer._ranks.fail()
        raise
    finite, absent = optimizer._ranks.agree(finite)
    if absent:
        plan = make_plan(optimizer, absent=absent)
    if finite is False and optimizer.nonfinite == "raise":
        raise NonFiniteGradientError(f"{describe_non_finite(items_of(plan.batches))}; nothing was changed")
    return plan, finite


def chunk_bytes(optimizer: ScaledDecayOptimizer, device: torch.device) -> int:
    """The temporary memory that a chunk may use."""
    return optimizer.chunk_bytes or (CPU_CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES)


# commit


def commit(optimizer: ScaledDecayOptimizer, plan: Plan) -> None:
    """Allocate missing state, write peaks into the groups, and remember what `summary` shows."""
    # replayed batches have no items, but their state exists
    if not plan.batches or any(batch.items for batch in plan.batches):
        allocate(optimizer)  # first: memory may run out
    for group, planned in zip(optimizer.param_groups, plan.groups, strict=True):
        group.update({key: planned[key] for key in peak.STEP_KEYS})
        if not isinstance(group["lr"], Tensor):
            group["lr"] = planned["lr"]
    for item in [item for batch in plan.batches for item in batch.items if not item.state]:
        item.state.update({key: local(value) for key, value in optimizer.state[item.parameter].items()})
    if not plan.batches:
        optimizer._counters.warn_once(
            "no gradient",
            "this step found no gradients, so nothing was changed; if the model was wrapped, sharded or moved after "
            "the optimizer was built, build the optimizer last",
        )
    if optimizer._left_out and optimizer.param_groups[0]["step_count"] % LOOK_FOR_UNFROZEN == 0:
        optimizer.warn_of_unfrozen()
    optimizer._last = [(batch.number, batch.parameters, plan.groups[batch.number]["lr"]) for batch in plan.batches]


# update and apply


def update_and_apply(
    optimizer: ScaledDecayOptimizer,
    batches: list[Batch],
    contexts: list[StepContext],
    *,
    finite: Flag | bool | None = None,
    captured: bool = False,
) -> Flag | bool:
    """Update all parameters; return whether gradients were finite, as a flag if only the device knows."""
    ranks = optimizer._ranks
    if finite is None:
        finite = optimizer.nonfinite != "skip" or finite_flag(batches, captured)
        if ranks.is_shared:
            finite = ranks.reduced_unread(finite)
    if finite is False:
        return False
    flag = finite if isinstance(finite, Flag) else None
    if flag is not None:
        optimizer._counters.skip_on_device(flag)
        contexts = [ctx._replace(flag=flag.to(batch.device)) for batch, ctx in zip(batches, contexts, strict=True)]
    exchanged = []
    for batch, ctx in zip(batches, contexts, strict=True):
        count_step(batch.items, ctx.flag)
        here, sent, layouts = ranks.sort(batch) if ranks.is_shared else (batch.items, [], [])
        if here:
            update = update_encoded if codecs.is_encoded(batch.group) else update_batch
            update(batch, here, ctx)
            increment_version(batch.parameters)  # kernels do not tell autograd that they changed weights
        if sent:
            exchanged.append((batch._replace(items=sent), ctx, layouts))
    if exchanged:
        exchange(optimizer, exchanged)
    return finite


def update_encoded(batch: Batch, items: list[Item], ctx: StepContext) -> None:
    """Update parameters whose state is stored in fewer bits or on the host."""
    items = codecs.update_in_place(batch.group, items, ctx)
    codecs.update_decoded(batch.group, items, ctx, partial(update_batch, batch, ctx=ctx))


def update_batch(batch: Batch, items: list[Item], ctx: StepContext) -> None:
    """Update parameters whose matrices are whole on this rank, one chunk after another."""
    group, algorithm = batch.group, ALGORITHMS[batch.group["algorithm"]]
    if algorithm.matrices is not None and batch.view is not None:
        for chunk in matrix_chunks(batch.view, items, ctx.chunk_bytes):
            apply_update(group, update_matrices(algorithm.matrices, group, chunk, ctx), ctx)
        return
    assert algorithm.update is not None
    items = [item for item in items if item.param.numel()]  # kernels take no empty shards
    fused = algorithm.fused if group["fused"] is not False else None
    # A kernel takes all tensors at once, except low-precision weights, whose noise depends on how they are chunked.
    at_once = bool(items and fused and batch.dtype not in LOW_PRECISION and fused(group, whole_parts(items), ctx))
    for parts in elementwise_chunks(items, ctx.chunk_bytes) if items and not at_once else ():
        if not (fused and fused(group, parts, ctx)):
            apply_update(group, algorithm.update(group, parts, ctx), ctx)


def count_step(items: list[Item], flag: Flag | None) -> None:
    counters = [item.state["step"] for item in items if "step" in item.state]
    if counters:
        # A tensor, because CPU foreach is a loop that would convert a number each time. Without alpha torch would read
        # the tensor on the host.
        torch._foreach_add_(counters, counters[0].new_ones(()) if flag is None else flag.taken, alpha=1)


def exchange(optimizer: ScaledDecayOptimizer, exchanged: list[tuple[Batch, StepContext, list[Layout]]]) -> None:
    """Update matrices that other ranks hold parts or copies of."""
    stored, contexts, layouts = zip(*exchanged, strict=True)
    batches = [
        batch._replace(items=codecs.decode_items(batch.group, batch.items)) if codecs.is_encoded(batch.group) else batch
        for batch in stored
    ]
    rounds = optimizer._ranks.rounds(batches, layouts, contexts[0].chunk_bytes)
    exchange_updates(batches, contexts, rounds)
    for before, after, ctx in zip(stored, batches, contexts, strict=True):
        if after is not before:
            codecs.encode_items(before.group, before.items, after.items, ctx.ok)
