"""Write the tables of docs/guide/distributed.md from the cost model of `muonsw plan`.

    python bench/scaling_tables.py

Two comments with its name enclose each table. A test compares the page with the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from muonsw.lab.model import preset
from muonsw.lab.plan import H200, Setup, plan_step

W1024 = preset("w1024")
BATCH_TOKENS = 524_288  # the paper's
TFLOPS = 460.0  # measured for w1024 on one H200 without its optimizer (docs/performance.md)
GIB, MB = 2**30, 1e6


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def seconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.1f} s"


def label(setup: Setup) -> str:
    strategy = "hsdp" if setup.replicas > 1 else setup.strategy
    return f"{setup.gpus:,}, {strategy}{', experts by rows' if setup.experts == 'rows' else ''}"


def strategies() -> str:
    """Width 1024 on more and more GPUs; with HSDP each machine of 8 holds a copy."""
    rows = []
    for gpus in (8, 64, 1024):
        hsdp = [Setup(gpus, "fsdp", "rows", replicas=gpus // 8)] if gpus > 8 else []
        for setup in (Setup(gpus, "ddp"), Setup(gpus, "fsdp"), Setup(gpus, "fsdp", "rows"), *hsdp, Setup(gpus, "ep")):
            cost = plan_step(W1024, replace(setup, micro_batch=1, tflops=TFLOPS), BATCH_TOKENS)
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


def rates() -> str:
    """The rates of the cost model."""
    rows = [
        ("memory", f"{H200.memory / 1e12:g} TB/s", "measured"),
        ("dense products", f"{H200.dense / 1e12:g} TFLOP/s", "measured"),
        ("`X X^T`, one triangle", f"{H200.gram / 1e12:g} useful TFLOP/s", "measured"),
        ("short symmetric products", f"{H200.short / 1e12:g} useful TFLOP/s", "measured"),
        ("overhead of a step", f"{1e3 * H200.overhead:g} ms", "fitted to four measured steps"),
        ("link inside a node of 8", f"{Setup.inside:g} GB/s a GPU", "assumed: 80% of 450"),
        ("link between nodes", f"{Setup.outside:g} GB/s a GPU", "assumed: 80% of 50"),
        ("a collective of n ranks", f"{1e6 * H200.latency:g} + {1e6 * H200.message:g} (n - 1) µs", "assumed"),
    ]
    return table(("rate", "value", "from"), rows)


PAGE = Path(__file__).parents[1] / "docs" / "guide" / "distributed.md"


def written() -> str:
    """The page with its tables updated."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table_of in {"rates": rates, "strategies": strategies}.items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end: {name} -->"
        before, rest = page.split(begin)
        page = before + begin + table_of() + end + rest.split(end)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
