"""Ranks agree on a step before they take it."""

import contextlib
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from muonsw import MuonSW, NonFiniteGradientError, NonFiniteGradientWarning
from muonsw.distributed.shards import local
from tests.addons.test_replay import Repeated, SeesNothing
from tests.distributed.problems import (
    PEAK,
    give_plain,
    give_sharded,
    gradient,
    groups_of,
    mesh_of,
    parameters,
    plain,
    shard0,
    sharded_over,
    take_step,
    whole,
    worst,
)

CHOSEN = ("matrices", "vectors")


def built(kind, **options):
    if kind == "copies":
        return MuonSW(groups_of(CHOSEN, plain), lr=PEAK, process_group=dist.group.WORLD, **options), give_plain
    return MuonSW(groups_of(CHOSEN, sharded_over(mesh_of(4), shard0)), lr=PEAK, **options), give_sharded


def poisoned(give, bad_rank):
    def put(param, grad):
        sharded = give(param, grad)
        if dist.get_rank() == bad_rank and param.shape == (8, 8):
            local(sharded)[0, 0] = torch.nan
        return sharded

    return put


def nan_on_one_rank(kind):
    """Steps 0 and 2 are good, step 1 is bad on rank 2 alone."""
    optimizer, give = built(kind)
    alone = MuonSW(groups_of(CHOSEN, plain), lr=PEAK)
    for step in (0, 2):
        take_step(alone, step, give_plain)
    take_step(optimizer, 0, give)
    with warnings.catch_warnings(record=True, action="always") as caught:
        take_step(optimizer, 1, poisoned(give, 2))
        skipped = optimizer.summary().skipped
    take_step(optimizer, 2, give)
    messages = [str(w.message) for w in caught if w.category is NonFiniteGradientWarning]
    return worst(optimizer, alone), skipped, optimizer.skipped_steps, messages


@pytest.mark.parametrize("kind", ["shards", "copies"])
def test_a_nan_on_one_rank_makes_all_ranks_skip(pool, kind):
    answers = pool.run(nan_on_one_rank, kind)
    for rank, (difference, skipped, count, messages) in enumerate(answers):
        assert difference < 1e-9
        assert (skipped, count, len(messages)) == (True, 1, 1)
        assert ("matrices.0" if rank == 2 else "a gradient on another rank") in messages[0]


def raising():
    optimizer, give = built("shards", nonfinite="raise")
    before = whole(optimizer)
    with pytest.raises(NonFiniteGradientError) as error:
        take_step(optimizer, 0, poisoned(give, 1))
    return str(error.value), all(map(torch.equal, before, whole(optimizer)))


def test_a_nan_on_one_rank_raises_on_all(pool):
    for rank, (message, unchanged) in enumerate(pool.run(raising)):
        assert ("matrices.0" if rank == 1 else "another rank") in message
        assert unchanged


def swap_two(optimizer):
    params = optimizer.param_groups[0]["params"]
    params[0], params[3] = params[3], params[0]


def drop_the_last(optimizer):
    optimizer.param_groups[0]["params"].pop()
    optimizer.param_groups[0]["param_names"].pop()


def option(**changed):
    return lambda optimizer: optimizer.param_groups[1].update(changed)


# A change that one rank makes to its optimizer, and how the error names it.
DIFFERENCES = {
    "order of parameters": (swap_two, "matrices.0 (1, 6)"),
    "fewer parameters": (drop_the_last, "matrices.4"),
    "frozen parameter": (lambda o: o.param_groups[0]["params"][1].requires_grad_(False), "frozen: muon"),
    "chunk_bytes": (lambda o: setattr(o, "chunk_bytes", 512), "the optimizer: chunk_bytes=512"),
    "lr": (option(lr=0.01), "param group 1: lr=0.01"),
    "betas": (option(betas=(0.8, 0.95)), "param group 1: betas=(0.8, 0.95)"),
    "peak_lr": (lambda o: o.set_peak_lr(0.25, group=1), "param group 1: peak_lr=0.25"),
    "scheduler's record": (option(initial_lr=0.125), "param group 1: initial_lr=0.125"),
    "unknown decay": (option(decay="constnat"), "param group 1: decay='constnat'"),
    "unknown algorithm": (option(algorithm="adamv"), "param group 1: algorithm='adamv'"),
    "tensor lr": (lambda o: o.param_groups[1]["lr"].mul_(0.5), f"param group 1: lr={PEAK / 2}"),
}


def different_on_rank_2(kind, what, steps_before, is_settled=False):
    """Change rank 2 after some steps; return this rank's error, and whether its weights then stayed the same."""
    with settled() if is_settled else contextlib.nullcontext(), warnings.catch_warnings(action="ignore"):
        optimizer, give = built(kind)
        if "tensor" in what:
            optimizer.param_groups[1]["lr"] = torch.tensor(PEAK, dtype=torch.float64)
        every = parameters(optimizer)
        for step in range(steps_before + (3 if is_settled else 1)):
            if step == steps_before:
                before = [local(param.detach()).clone() for param in every]
                if dist.get_rank() == 2:
                    DIFFERENCES[what][0](optimizer)
            for number, param in enumerate(every):
                param.grad = give(param, gradient(param.shape, step, number))
            try:
                optimizer.step()
            except (RuntimeError, ValueError, KeyError) as error:
                return str(error), all(map(torch.equal, before, [local(param.detach()) for param in every]))
    return "", False


def different_at_any_time(kind, what):
    return [different_on_rank_2(kind, what, *when) for when in ((0,), (1,), (3, True))]


@pytest.mark.parametrize("kind", ["shards", "copies"])
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_on_one_rank_is_an_error_on_all(pool, kind, what):
    """A rank that waits forever fails by the pool's time limit; settled ranks notice one step later."""
    for rank, answers in enumerate(pool.run(different_at_any_time, kind, what, timeout=30)):
        *waiting, (when_settled, _) = answers
        for message, _ in waiting:
            assert "the ranks would take different steps" in message
            assert DIFFERENCES[what][1] in message
        assert all(unchanged for _, unchanged in answers)
        refused = "unknown" in what  # when settled, rank 2 finds the mistake itself and tells the others
        assert when_settled
        assert ("rank 2 could not take a step" in when_settled) == (refused and rank != 2)
        assert refused or DIFFERENCES[what][1] in when_settled


def shards_of_other_shapes(rows, matrix):
    """Step with shards whose lengths contradict their placements."""
    mine = torch.ones((rows[dist.get_rank()], 4, 4) if matrix else (rows[dist.get_rank()], 4))
    shape = torch.Size((8, *mine.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    shard = DTensor.from_local(mine, mesh_of(4), [Shard(0)], run_check=False, shape=shape, stride=stride)
    param = nn.Parameter(shard)
    optimizer = MuonSW([param], lr=PEAK, matrix=matrix)
    param.grad = shard.clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("rows", [(2, 2, 1, 3), (1, 1, 1, 1)], ids=["some", "all"])
def test_shards_that_contradict_their_placements_are_refused_on_all_ranks(pool, rows):
    for message in pool.run(shards_of_other_shapes, rows, None, timeout=20):
        assert "instead of (2, 4): make it with distribute_tensor or fully_shard" in message


def test_ranks_may_hold_any_number_of_whole_matrices(pool):
    assert pool.run(shards_of_other_shapes, (2, 2, 1, 3), "stack", timeout=20) == [""] * 4


def nothing_to_do_here():
    """Step while rank 0 has no gradient."""
    optimizer, give = built("shards")
    take_step(optimizer, 0, (lambda p, g: None) if dist.get_rank() == 0 else give)  # noqa: ARG005
    return optimizer.summary().matrices


def test_a_rank_without_gradients_takes_part(pool):
    assert set(pool.run(nothing_to_do_here)) == {5}


def nothing_to_do_anywhere(kind):
    optimizer, _ = built(kind)
    with warnings.catch_warnings(record=True, action="always") as caught:
        optimizer.step()
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("kind", ["shards", "copies"])
def test_a_step_without_gradients_on_any_rank_warns(pool, kind):
    for (message,) in pool.run(nothing_to_do_anywhere, kind):
        assert "no gradient" in message


def a_step_that_rank_1_cannot_take(what, kind="shards", nonfinite="skip"):
    """On rank 1 a sharded parameter has a plain gradient, or there is no memory for state."""
    optimizer, give = built(kind, nonfinite=nonfinite)
    wrong = torch.ones(8, 8, dtype=torch.float64)
    before = [local(p).clone() for p in parameters(optimizer)]
    fails = what if dist.get_rank() == 1 else ""
    no_memory = patch("muonsw.state.zeros", side_effect=torch.OutOfMemoryError("no memory"))
    with warnings.catch_warnings(action="ignore"), no_memory if fails == "memory" else contextlib.nullcontext():
        try:
            take_step(optimizer, 0, lambda p, g: wrong if fails == "gradient" and p.shape == (8, 8) else give(p, g))
            message = ""
        except (ValueError, RuntimeError) as error:
            message = str(error)
    unchanged = all(map(torch.equal, before, [local(p) for p in parameters(optimizer)]))
    return message, optimizer.skipped_steps, unchanged


@pytest.mark.parametrize(("what", "options"), [
    ("gradient", {}), ("gradient", {"nonfinite": "propagate"}), ("memory", {}), ("memory", {"kind": "copies"}),
], ids=str)  # fmt: skip
def test_a_step_that_one_rank_cannot_take_is_an_error_on_all(pool, what, options):
    answers = pool.run(a_step_that_rank_1_cannot_take, what, **options, timeout=20)
    for rank, (message, skipped, unchanged) in enumerate(answers):
        assert unchanged
        assert not skipped
        assert ("rank 1 could not take a step" in message) == (rank != 1)
        assert message


# In settled steps no rank waits for the agreement. On CPUs ranks always wait unless `waits_on` is empty.


@contextlib.contextmanager
def settled(replay=False):
    """Let ranks settle as on GPUs; with `replay`, a graph runs its program again on the same tensors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("muonsw.distributed.ranks.Ranks.waits_on", ()))
        if replay:
            stack.enter_context(patch("muonsw.addons.replay.recorded", Repeated))
            stack.enter_context(patch("muonsw.addons.replay.GradientReads", SeesNothing))
            stack.enter_context(patch("muonsw.addons.replay.supports", lambda *_: ""))
        yield


def run_with_trouble(kind, replaying, **options):
    """Train with a NaN on one rank and gradients missing on one or all ranks, settled and waiting."""
    waited, replay = 0, dist.get_rank() in replaying
    betas = options.pop("betas", [None])

    def run(**more):
        nonlocal waited
        optimizer, give = built(kind, **options, **more)
        buffers = [torch.zeros_like(param) for param in parameters(optimizer)]
        for step in range(12):
            absent = (0,) if step == 9 or (step == 7 and dist.get_rank() == 3 and kind == "shards") else ()
            put = poisoned(give, 2) if step == 3 else give
            for group in optimizer.param_groups:
                group["lr"] = PEAK / (1 + step)
                group["betas"] = betas[step % len(betas)] or group["betas"]
            for number, param in enumerate(parameters(optimizer)):
                buffers[number].copy_(put(param, gradient(param.shape, step, number)))
                param.grad = None if number in absent else buffers[number]
            optimizer.step()
            waited += not optimizer._ranks.is_settled
        return optimizer, [local(param.detach()) for param in parameters(optimizer)], optimizer.skipped_steps

    with warnings.catch_warnings(action="ignore", category=NonFiniteGradientWarning):
        _, expected, skipped = run()
        assert waited == 12
        waited = 0
        with settled(replay):
            optimizer, found, found_skipped = run(replay=replay)
    furthest = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True) if a.numel())
    return furthest, skipped, found_skipped, waited, optimizer._replay._replays


@pytest.mark.parametrize("replaying", [(), (0, 3)], ids=["eager", "two ranks replay"])
@pytest.mark.parametrize(("kind", "options"), [
    ("shards", {"decay": "cosine", "total_steps": 12}), ("copies", {"betas": [(0.8, 0.9), (0.9, 0.9)]}),
    ("shards", {"normalize": "normuon", "precondition": "muon2"}),
], ids=str)  # fmt: skip
def test_settled_steps_equal_steps_that_wait(pool, kind, options, replaying):
    for rank, answer in enumerate(pool.run(run_with_trouble, kind, replaying, **options, timeout=60)):
        furthest, skipped, found_skipped, waited, replays = answer
        assert furthest < 1e-14  # of weights of size 0.1 in float64
        assert skipped == found_skipped == 1
        # the first step, each change of the set of gradients, and until all ranks notice one that is missing on one
        assert waited <= 6
        # a graph is bound to AdamW's betas
        assert bool(replays) == (rank in replaying and "betas" not in options)


def wrong_gradient(param, grad):
    """A gradient that the step refuses: plain for a sharded matrix, sparse for another."""
    return grad if hasattr(param, "device_mesh") else grad.to_sparse()


def goes_on_after_a_failure(kind):
    """Rank 1 fails in a settled step; the others learn of it one step later. All of them then go on."""
    with settled(), warnings.catch_warnings(action="ignore"):
        optimizer, give = built(kind)
        failures = []
        for call in range(9 if dist.get_rank() == 1 else 10):  # the call that reports the failure takes no step
            wrong = call == 4 and dist.get_rank() == 1
            try:
                take_step(optimizer, 0, wrong_gradient if wrong else give)
            except (RuntimeError, ValueError) as error:
                failures.append((call, str(error)))
        alone = MuonSW(groups_of(CHOSEN, plain), lr=PEAK)
        taken = optimizer.param_groups[0]["step_count"] - optimizer.skipped_steps
        for _ in range(taken):
            take_step(alone, 0, give_plain)
        return failures, taken, worst(optimizer, alone), optimizer._ranks.is_settled


@pytest.mark.parametrize("kind", ["shards", "copies"])
def test_ranks_go_on_after_a_failure_that_all_of_them_caught(pool, kind):
    answers = pool.run(goes_on_after_a_failure, kind, timeout=30)
    for rank, (failures, _, difference, is_settled) in enumerate(answers):
        ((call, message),) = failures
        assert call == (4 if rank == 1 else 5)
        assert ("rank 1 could not take a step" in message) == (rank != 1)
        assert difference < 1e-9
        assert is_settled
    (taken,) = {taken for _, taken, *_ in answers}
    assert 6 <= taken <= 8  # not the failed one, and not those until ranks agree again
