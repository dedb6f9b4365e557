"""Write the tables of docs/guide/distributed.md and bench/scaling.md from the cost model of `muonsw plan`.

    python bench/scaling_tables.py

Each table lies between two comments with its name. A test compares the pages with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from muonsw.lab.model import ModelConfig, preset
from muonsw.lab.plan import H200, Setup, StepCost, parts_of, plan_step

ROOT = Path(__file__).parents[1]
W1024 = preset("w1024")
# A hypothetical model, about the size and shape of the largest open mixtures of experts.
MOE_1T = ModelConfig(width=7168, layers=61, head_dim=128, experts=384, top_k=8, ff=2048, vocab=163_840, sequence=4096)
LARGE_BATCH = 16_000_000
BATCHES = (1_000_000, 4_000_000, 16_000_000, 64_000_000)
NEAR = 1024
# Measured for w1024 on one H200 without its optimizer (docs/performance.md), and assumed for the large model.
TFLOPS = 460.0
GIB, MB = 2**30, 1e6


def small(setup: Setup) -> StepCost:
    """A run of width 1024 at the paper's batch, the default."""
    return plan_step(W1024, replace(setup, micro_batch=1, tflops=TFLOPS))


def large(setup: Setup, batch: int = LARGE_BATCH) -> StepCost:
    """The model of 1T parameters."""
    return plan_step(MOE_1T, replace(setup, micro_batch=1, tflops=TFLOPS), batch)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def seconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.1f} s"


def label(setup: Setup) -> str:
    if setup.replicas > 1 and setup.strategy == "fsdp":
        return f"{setup.gpus:,}, hsdp, experts by rows"
    if setup.replicas > 1:
        return f"{setup.gpus:,}, {setup.strategy}, the rest on {setup.shards:,}"
    return f"{setup.gpus:,}, {setup.strategy}{', experts by rows' if setup.experts == 'rows' else ''}"


def strategies() -> str:
    """Width 1024 on more and more GPUs; with HSDP each machine of 8 holds a copy."""
    rows = []
    for gpus in (8, 64, 1024):
        hsdp = [Setup(gpus, "fsdp", "rows", replicas=gpus // 8)] if gpus > 8 else []
        for setup in (Setup(gpus, "ddp"), Setup(gpus, "fsdp"), Setup(gpus, "fsdp", "rows"), *hsdp, Setup(gpus, "ep")):
            cost = small(setup)
            rows.append((
                label(setup),
                f"{cost.memory.total / GIB:.1f}",
                f"{cost.optimizer_bytes / MB:,.0f}",
                str(cost.optimizer_collectives),
                seconds(cost.product_seconds),
                seconds(cost.exchange_seconds),
                seconds(cost.optimizer_seconds),
                seconds(max(cost.model_seconds, cost.model_link_seconds)),
                f"{100 * cost.optimizer_share:.0f}%",
            ))  # fmt: skip
    headings = ("GPUs", "GiB each", "MB received", "collectives", "products", "exchange", "optimizer", "model", "share")
    return table(headings, rows)


def one_trillion() -> str:
    """The model of 1T parameters on thousands of GPUs."""
    rows = []
    for gpus in (1024, 4096, 16_384):
        # Also with everything but the experts sharded over a thousand ranks and copied.
        near = Setup(gpus, "ep", replicas=gpus // NEAR)
        for setup in dict.fromkeys((Setup(gpus, "ep"), near)):
            cost = large(setup)
            alone = cost.optimizer_seconds / (cost.optimizer_seconds + cost.model_seconds)
            rows.append((
                label(setup),
                f"{cost.memory.total / GIB:.0f}",
                seconds(cost.model_seconds),
                seconds(cost.model_link_seconds),
                f"{cost.optimizer_bytes / MB:,.0f}",
                seconds(cost.product_seconds),
                seconds(cost.exchange_seconds),
                seconds(cost.optimizer_seconds),
                f"{100 * cost.optimizer_share:.1f}%",
                f"{100 * alone:.1f}%",
            ))  # fmt: skip
    headings = ("GPUs", "GiB a GPU", "model computes", "its links", "MB received", "products", "exchange")
    return table((*headings, "optimizer", "share", "share, model's links hidden"), rows)


def batches() -> str:
    """The optimizer's share by tokens in a step."""
    rows = []
    for gpus in (1024, 4096, 16_384):
        shares = [large(Setup(gpus, "ep"), batch).optimizer_share for batch in BATCHES]
        # The batch at which the optimizer takes a tenth of the time, if the model's traffic is hidden.
        cost = large(Setup(gpus, "ep"))
        tenth = 9 * cost.optimizer_seconds / cost.model_seconds * LARGE_BATCH
        rows.append((f"{gpus:,}, ep", *(f"{100 * share:.1f}%" for share in shares), f"{tenth / 1e6:.2f}M"))
    return table(("GPUs", *(f"{batch // 10**6}M" for batch in BATCHES), "a tenth at"), rows)


def sizes() -> str:
    """The parts of the hypothetical model."""
    parts = parts_of(MOE_1T)
    labels = {"experts": parts.experts, "attention": parts.hidden, "embedding, norms, routers": parts.adamw}
    rows = []
    for name, part in labels.items():
        matrices = [f"{number:,} of {short:,} by {long:,}" for (short, long), number in part.matrices.items()]
        rows.append((name, f"{part.parameters / 1e9:,.1f}B", ", ".join(matrices) or "AdamW"))
    return table(("part", "parameters", "matrices"), rows)


def rates() -> str:
    """The rates of the cost model."""
    rows = [
        ("memory", f"{H200.memory / 1e12:g} TB/s", "measured"),
        ("dense products", f"{H200.dense / 1e12:g} TFLOP/s", "measured"),
        ("`X X^T`, one triangle", f"{H200.gram / 1e12:g} useful TFLOP/s", "measured"),
        ("short symmetric products", f"{H200.short / 1e12:g} useful TFLOP/s", "measured"),
        ("overhead of a step", f"{1e3 * H200.overhead:g} ms", "fitted to four measured steps"),
        ("link inside a node of 8", f"{H200.inside / 1e9:g} GB/s a GPU", "assumed: 80% of 450"),
        ("link between nodes", f"{H200.outside / 1e9:g} GB/s a GPU", "assumed: 80% of 50"),
        ("a collective of n ranks", f"{1e6 * H200.latency:g} + {1e6 * H200.message:g} (n - 1) µs", "assumed"),
    ]
    return table(("rate", "value", "from"), rows)


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "guide" / "distributed.md": {"rates": rates},
    ROOT / "bench" / "scaling.md": {
        "strategies": strategies,
        "sizes": sizes,
        "one-trillion": one_trillion,
        "batches": batches,
    },
}


def written(path: Path) -> str:
    """A page with its tables updated."""
    page = path.read_text(encoding="utf-8")
    for name, table_of in TABLES[path].items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end: {name} -->"
        before, after = page.split(begin)
        page = before + begin + table_of() + end + after.split(end)[1]
    return page


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(written(path), encoding="utf-8")
