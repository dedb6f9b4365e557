"""The cost model of many GPUs: measured points of one, closed forms, and what grows and falls with their number."""

import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from muonsw.distributed.rounds import share_by_cost
from muonsw.lab.base.errors import UsageError
from muonsw.lab.commands.plan import Plan
from muonsw.lab.cost.parts import parts_of
from muonsw.lab.cost.update import ADAMW_PASSES, H200, ON_PAPER, Setup, heaviest, orthogonalizing, plan_update
from muonsw.lab.model import ModelConfig, count, preset

MOE = ON_PAPER["moe-1t"]
# Milliseconds of Muon's step over hidden matrices, by width and inner size of the experts, one H200,
# docs/performance.md: replayed from a graph, and for 1024, where the host does not count, as it is.
STEP_MS = {(256, 768): 2.2, (512, 1408): 5.4, (768, 2048): 13.2, (1024, 2816): 27.9}
# GiB of whole training on one H200, by preset and sequences in a micro-batch, docs/performance.md.
TRAINING_GIB = {("w256", 32): 11.9, ("w256", 128): 43.7, ("w1024", 32): 53.1}


def on(gpus, strategy="fsdp", experts="stack", **settings):
    return Setup(gpus, strategy, experts, **settings)


@pytest.mark.parametrize(("width", "ff"), STEP_MS)
def test_the_step_of_one_gpu_is_as_it_was_measured(width, ff):
    """One constant (the overhead) was fitted to the four; the rates were measured apart, at width 1024."""
    model = ModelConfig(width=width, ff=ff)
    planned = plan_update(model, on(1))
    adamw = parts_of(model).rest.parameters * ADAMW_PASSES / H200.memory
    assert 1e3 * (planned.optimizer_seconds - adamw) == pytest.approx(STEP_MS[width, ff], rel=0.06)


@pytest.mark.parametrize(("name", "sequences"), TRAINING_GIB)
def test_the_memory_of_one_gpu_is_as_it_was_measured(name, sequences):
    """One constant (the share of activations that is kept) was fitted to the three."""
    planned = plan_update(preset(name), on(1, micro_batch=sequences))
    assert planned.memory.total / 2**30 == pytest.approx(TRAINING_GIB[name, sequences], rel=0.03)


def test_one_gpu_sends_nothing_whatever_the_strategy():
    memories = set()
    for strategy in ("ddp", "fsdp", "ep"):
        planned = plan_update(preset("w256"), on(1, strategy))
        assert planned.optimizer_bytes == planned.model_bytes == planned.exchange_seconds == 0.0
        memories.add(planned.memory)
    assert len(memories) == 1


def test_one_gpu_is_what_is_planned_where_no_number_is_given(capsys):
    printed = []
    for setup in (Setup(), Setup(gpus=1)):
        assert Plan(preset="w256", steps=10, setup=setup).run() == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "exchange" not in printed[0]


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes_are_the_formulas_of_the_page(ranks):
    """(N-1)/N of 2 bytes for copies, (4+2)(N-1)/N^2 for shards, none for stacks."""
    parts = parts_of(preset("w1024"))
    muon = parts.experts.parameters + parts.hidden.parameters
    shard = 6 * (ranks - 1) / ranks**2
    assert plan_update(preset("w1024"), on(ranks, "ddp")).optimizer_bytes == pytest.approx(
        2 * (ranks - 1) / ranks * muon
    )
    assert plan_update(preset("w1024"), on(ranks, "fsdp", "rows")).optimizer_bytes == pytest.approx(shard * muon)
    hidden = shard * parts.hidden.parameters
    assert plan_update(preset("w1024"), on(ranks, "fsdp")).optimizer_bytes == pytest.approx(hidden)
    stack = min(ranks, 8)
    cut = ranks // stack
    experts = 6 * (cut - 1) / cut**2 * parts.experts.parameters / stack
    assert plan_update(preset("w1024"), on(ranks, "ep")).optimizer_bytes == pytest.approx(hidden + experts)


def test_parts_add_up_to_the_model():
    for model in (preset("w256"), preset("w256-dense"), preset("mini"), MOE):
        parts = parts_of(model)
        both = (parts.experts, parts.hidden)
        assert sum(part.parameters for part in (*both, parts.rest)) == count(model).total
        for part in both:
            assert sum(rows * columns * number for (rows, columns), number in part.matrices.items()) == part.parameters


def test_the_heaviest_load_is_that_of_the_optimizers_own_division():
    draw = random.Random(0)
    for owners in (1, 2, 5, 16):
        costs = [draw.choice((1, 3, 8, 27)) for _ in range(40)]
        loads = [0] * owners
        for owner, cost in zip(share_by_cost(costs, owners), costs, strict=True):
            loads[owner] += cost
        assert heaviest([(float(cost), costs.count(cost)) for cost in set(costs)], owners) == max(loads)


def test_more_ranks_than_matrices_do_not_help():
    model = preset("w256-dense")
    matrices = sum(parts_of(model).hidden.matrices.values())
    enough, many = (plan_update(model, on(ranks)).product_seconds for ranks in (matrices, 8 * matrices))
    assert many == enough == max(orthogonalizing(*shape) for shape in parts_of(model).hidden.matrices)


def test_the_strategies_trade_memory_for_traffic_as_they_should():
    ddp, fsdp, ep = (plan_update(preset("w1024"), on(8, strategy)) for strategy in ("ddp", "fsdp", "ep"))
    assert ddp.memory.weights == 8 * fsdp.memory.weights == 8 * ep.memory.weights
    assert ddp.optimizer_bytes > fsdp.optimizer_bytes == ep.optimizer_bytes
    copies = plan_update(preset("w1024"), Setup(64, "fsdp", replicas=8))
    assert copies.memory.weights == fsdp.memory.weights
    assert copies.optimizer_bytes == fsdp.optimizer_bytes
    assert copies.product_seconds == fsdp.product_seconds, "copies do not divide the products"
    assert plan_update(MOE, on(1024, "ep", micro_batch=1, recompute=True)).memory.total < H200.capacity
    assert plan_update(MOE, on(1024, "ddp", micro_batch=1, recompute=True)).memory.total > H200.capacity


def test_copies_of_attention_trade_bytes_for_latency_and_leave_experts_alone():
    far, near = (plan_update(MOE, Setup(16_384, "ep", replicas=copies)) for copies in (1, 16))
    parts = parts_of(MOE)
    more = 6 * parts.hidden.parameters * ((1024 - 1) / 1024**2 - (16_384 - 1) / 16_384**2)
    assert near.optimizer_bytes - far.optimizer_bytes == pytest.approx(more)
    assert near.exchange_seconds < far.exchange_seconds
    assert near.memory.muon_state > far.memory.muon_state


def test_recomputing_takes_a_forward_pass_more_and_keeps_little():
    kept, again = (plan_update(preset("w1024"), on(8, recompute=chosen)) for chosen in (False, True))
    assert again.model_seconds == pytest.approx(4 / 3 * kept.model_seconds)
    assert again.memory.activations < kept.memory.activations / 4


@pytest.mark.parametrize("period", [2, 5, 20])
def test_a_period_divides_the_bytes_and_leaves_stacks_alone(period):
    """Cut matrices: the exchange once in a period, and on average no less than their rows to orthogonalize."""
    rows = [plan_update(preset("w1024"), on(8, "fsdp", "rows", period=number)) for number in (1, period)]
    assert rows[1].optimizer_bytes == pytest.approx(rows[0].optimizer_bytes / period)
    assert rows[0].product_seconds / period < rows[1].product_seconds < rows[0].product_seconds
    dense = [plan_update(preset("w1024"), replace(on(8, "ddp"), period=number)) for number in (1, period)]
    assert dense[0].product_seconds == dense[1].product_seconds, "copies have nothing cut"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 8, "strategy": "tp"}, "strategy='tp' must be one of ddp, fsdp, ep"),
        ({"gpus": 0}, "gpus=0 must be a positive multiple"),
        ({"gpus": 6, "strategy": "fsdp", "replicas": 4}, "multiple of replicas=4"),
        ({"gpus": 8, "replicas": 2}, "needs strategy fsdp or ep"),
        ({"gpus": 8, "period": 0}, "period=0 must be positive"),
        ({"gpus": 8, "outside": 0.0}, "outside=0.0 must be positive"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        Plan(preset="w256", steps=10, setup=Setup(**options)).run()


def test_several_gpus_do_not_go_with_a_recipe():
    with pytest.raises(UsageError, match="--gpus does not go with --recipe"):
        Plan(recipe="kimi-k2", setup=Setup(gpus=8)).run()


def test_the_command_prints_what_was_planned(capsys):
    assert Plan(preset="w1024", steps=1000, json=True, setup=on(8)).run() == 0
    data = json.loads(capsys.readouterr().out)
    planned = plan_update(preset("w1024"), on(8))
    assert data["update"]["optimizer_bytes"] == planned.optimizer_bytes
    assert data["hours"] == pytest.approx(1000 * planned.seconds / 3600)
    assert Plan(preset="w1024", steps=1000, setup=on(8)).run() == 0
    printed = capsys.readouterr().out
    for text in ("memory a GPU", "optimizer receives", "% of it the optimizer", "links are assumed", "hours"):
        assert text in printed
    assert Plan(preset="moe-1t", steps=1000, setup=on(8, "ddp")).run() == 0
    assert "more than the 131.32 GiB there are" in capsys.readouterr().out


def test_a_dense_model_has_no_stacks_to_divide():
    dense = ModelConfig(width=256, experts=1, top_k=1)
    assert plan_update(dense, on(8, "ep")).optimizer_bytes == plan_update(dense, on(8, "fsdp", "rows")).optimizer_bytes


def test_the_pages_have_the_tables_of_the_model():
    """What `python bench/scaling_tables.py` writes; its rows are calls of `plan_update`."""
    path = Path(__file__).parents[2] / "bench" / "scaling_tables.py"
    spec = importlib.util.spec_from_file_location("scaling_tables", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for page in script.TABLES:
        assert script.written(page) == page.read_text(encoding="utf-8"), "run python bench/scaling_tables.py"
