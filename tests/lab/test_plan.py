"""What `muonsw plan` predicts: the paper's numbers, measured points of one GPU, and closed forms of many.

`tests/distributed/test_cost_model.py` compares its bytes with those that ranks hold and send.
"""

import importlib
from pathlib import Path

import pytest

from muonsw.lab.errors import UsageError
from muonsw.lab.model import ModelConfig, count, preset
from muonsw.lab.plan import (
    H200,
    PASS_BYTES,
    Plan,
    Setup,
    amount,
    orthogonalizer_flops,
    parts_of,
    plan_step,
)
from muonsw.lab.train.config import preset_run

# Milliseconds of Muon's step over hidden matrices on one H200 (docs/performance.md), by width and inner size of the
# experts: replayed from a graph, except at 1024, where host time does not matter.
STEP_MS = {(256, 768): 2.2, (512, 1408): 5.4, (768, 2048): 13.2, (1024, 2816): 27.9}
# GiB of whole training on one H200, by preset and sequences in a micro-batch, docs/performance.md.
TRAINING_GIB = {("w256", 32): 11.9, ("w256", 128): 43.7, ("w1024", 32): 53.1}


@pytest.mark.parametrize(("width", "ff"), STEP_MS)
def test_the_step_of_one_gpu_is_as_measured(width, ff):
    """One constant (the overhead) was fitted to the four; the rates were measured separately, at width 1024."""
    model = ModelConfig(width=width, ff=ff)
    planned = plan_step(model, Setup())
    adamw = parts_of(model).adamw.parameters * PASS_BYTES / H200.memory
    assert 1e3 * (planned.optimizer_seconds - adamw) == pytest.approx(STEP_MS[width, ff], rel=0.06)


@pytest.mark.parametrize(("name", "sequences"), TRAINING_GIB)
def test_the_memory_of_one_gpu_is_as_measured(name, sequences):
    """One constant (the share of activations that is kept) was fitted to the three."""
    planned = plan_step(preset(name), Setup(micro_batch=sequences))
    assert planned.memory.total / 2**30 == pytest.approx(TRAINING_GIB[name, sequences], rel=0.03)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes_are_the_formulas_of_the_page(ranks):
    """(N-1)/N of 2 bytes for copies, (4+2)(N-1)/N^2 for shards, none for stacks."""

    def planned(*strategy):
        return plan_step(preset("w1024"), Setup(ranks, *strategy)).optimizer_bytes

    parts = parts_of(preset("w1024"))
    muon, shard = parts.experts.parameters + parts.hidden.parameters, 6 * (ranks - 1) / ranks**2
    assert planned("ddp") == pytest.approx(2 * (ranks - 1) / ranks * muon)
    assert planned("fsdp", "rows") == pytest.approx(shard * muon)
    assert planned("fsdp") == pytest.approx(shard * parts.hidden.parameters)
    cut = ranks // (stack := min(ranks, 8))
    experts = 6 * (cut - 1) / cut**2 * parts.experts.parameters / stack
    assert planned("ep") == pytest.approx(shard * parts.hidden.parameters + experts)


def test_every_expert_and_split_projection_counts():
    config = ModelConfig(width=64, layers=2, head_dim=32, experts=3, top_k=1, ff=128)
    square, wide = 6 * 64**3, 4 * 64**2 * 128 + 2 * 64**3
    assert orthogonalizer_flops(config) == 5 * 2 * (4 * square + 3 * 3 * wide)
    parts = parts_of(preset("w256"))
    assert sum(part.parameters for part in parts) == count(preset("w256")).total
    for part in (parts.experts, parts.hidden):
        assert sum(rows * columns * number for (rows, columns), number in part.matrices.items()) == part.parameters


def test_copies_of_shards_share_their_costs():
    fsdp = plan_step(preset("w1024"), Setup(8, "fsdp"))
    copies = plan_step(preset("w1024"), Setup(64, "fsdp", replicas=8))
    assert copies.memory.weights == fsdp.memory.weights
    assert copies.optimizer_bytes == fsdp.optimizer_bytes
    assert copies.product_seconds == fsdp.product_seconds, "copies do not divide the products"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give --preset and --tokens"),
        ({"tokens": "12 Q"}, "197B"),
        ({"tokens": "1M", "setup": Setup(6, "fsdp", replicas=4)}, "multiple of replicas=4"),
        ({"tokens": "1M", "setup": Setup(8, replicas=2)}, "needs strategy fsdp or ep"),
        ({"tokens": "1M", "setup": Setup(8, "ep", "rows")}, "experts=rows needs strategy fsdp"),
        ({"tokens": "1M", "setup": Setup(8, tflops=0.0)}, "tflops=0.0 must be positive"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(UsageError, match=message):
        Plan(preset="w256", **settings).run()


def test_the_command_answers_first_then_shows_sizes_and_links(capsys):
    setup, run = Setup(8, "fsdp"), preset_run("w1024", "tokens")
    assert Plan(preset="w1024", tokens=str(10_000 * run.tokens_per_step), setup=setup).run() == 0
    first, *rows, optimizer, model = capsys.readouterr().out.splitlines()
    planned = plan_step(preset("w1024"), setup)
    assert first.startswith(f"{10_000 * planned.seconds / 3600:,.1f} hours on 8 GPUs (fsdp)")
    shown = {row.split("  ")[0]: row for row in rows}
    assert f"{count(run.model).total:,}" in shown["parameters"]
    assert f"of {run.tokens_per_step:,} tokens" in shown["steps"]
    assert f" {amount(10_000 * run.tokens_per_step, 4)} " in shown["tokens"]
    assert f"{planned.optimizer_bytes / 1e6:,.1f} MB" in optimizer
    assert f"{planned.model_bytes / 1e6:,.1f} MB" in model
    assert Plan(preset="w1024", tokens="1B", setup=Setup(micro_batch=128)).run() == 0
    printed = capsys.readouterr().out
    assert "more than the 131 GiB" in printed
    assert "receives" not in printed


def test_the_pages_have_the_tables_of_the_model(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    scaling_tables = importlib.import_module("scaling_tables")
    for page in scaling_tables.TABLES:
        assert scaling_tables.written(page) == page.read_text(encoding="utf-8"), "run python bench/scaling_tables.py"
