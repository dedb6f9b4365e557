"""Write the tables of docs/guide/distributed.md and bench/scaling.md from the cost model; nothing is measured here.

    python bench/scaling_tables.py            # write them
    python bench/scaling_tables.py --check    # exit with 1 if a page has others

Each table stands on its page between two comments with its name. A row is one call of `plan_update`, which is
what `muonsw plan` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from muonsw.lab.model import ModelConfig, preset
from muonsw.lab.plan import H200, ON_PAPER, Setup, UpdateCost, parts_of, plan_update

DOCS = Path(__file__).parents[1] / "docs"
W1024, MOE = preset("w1024"), ON_PAPER["moe-1t"]
SMALL_BATCH = 524_288  # the paper's
LARGE_BATCH = 16_000_000
NEAR = 1024
# What w1024 sustained on one H200 without its optimizer (docs/performance.md); taken for the large model too.
TFLOPS = 460.0
GIB, MB = 2**30, 1e6


def small(setup: Setup) -> UpdateCost:
    """A run of width 1024 at the paper's batch."""
    return plan_update(W1024, replace(setup, micro_batch=1, tflops=TFLOPS), SMALL_BATCH)


def large(setup: Setup, batch: int = LARGE_BATCH) -> UpdateCost:
    """The model of 1T parameters: layers computed again, weights gathered in bfloat16."""
    return plan_update(MOE, replace(setup, micro_batch=1, tflops=TFLOPS, gathered_bytes=2, recompute=True), batch)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(headings) - 1)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows))


def seconds(value: float) -> str:
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.1f} s"


def name(setup: Setup) -> str:
    if setup.replicas > 1:
        return f"{setup.strategy}, the rest on {setup.shards:,}"
    return f"{setup.strategy}, experts by rows" if setup.experts == "rows" else setup.strategy


def strategies() -> str:
    """Width 1024 on more and more GPUs."""
    rows = []
    for gpus in (8, 64, 256):
        for setup in (
            Setup(gpus, "ddp"),
            Setup(gpus, "fsdp"),
            Setup(gpus, "fsdp", "rows"),
            Setup(gpus, "ep"),
        ):
            found = small(setup)
            rows.append((
                f"{gpus}, {name(setup)}",
                f"{found.memory.total / GIB:.1f}",
                f"{found.optimizer_bytes / MB:,.0f}",
                seconds(found.product_seconds),
                seconds(found.exchange_seconds),
                seconds(found.optimizer_seconds),
                seconds(max(found.model_seconds, found.model_link_seconds)),
                f"{100 * found.optimizer_share:.0f}%",
            ))  # fmt: skip
    headings = ("GPUs", "GiB a GPU", "MB received", "products", "exchange", "optimizer", "model", "optimizer's share")
    return table(headings, rows)


def links() -> str:
    """How fast a link must be so that dividing the matrices of copies pays."""
    rows = []
    for label, model in (("w256", preset("w256")), ("w1024", W1024), ("width 7168, dense", dense(7168))):
        alone = plan_update(model, Setup(), SMALL_BATCH).product_seconds
        for gpus in (2, 8, 64):
            found = plan_update(model, Setup(gpus), SMALL_BATCH)
            products, sent = found.product_seconds, found.optimizer_bytes
            pays = f"{sent / (alone - products) / 1e9:.0f}"
            rows.append((f"{label}, {gpus} GPUs", seconds(alone), seconds(products), f"{sent / MB:,.0f}", pays))
    return table(("", "products, undivided", "divided", "MB received", "pays above, GB/s"), rows)


def dense(width: int) -> ModelConfig:
    return ModelConfig(width=width, layers=12, head_dim=128, experts=1, top_k=1)


def near(gpus: int) -> Setup:
    """Expert parallel, with all but the experts cut over a thousand ranks and copied."""
    return Setup(gpus, "ep", replicas=gpus // NEAR)


def one_trillion() -> str:
    """The model of 1T parameters on thousands of GPUs."""
    rows = []
    for gpus in (1024, 4096, 16_384):
        for setup in dict.fromkeys((Setup(gpus, "ep"), near(gpus), Setup(gpus, "fsdp", "rows"))):
            found = large(setup)
            alone = found.optimizer_seconds / (found.optimizer_seconds + found.model_seconds)
            rows.append((
                f"{gpus:,}, {name(setup)}",
                f"{found.memory.total / GIB:.0f}",
                seconds(found.model_seconds),
                seconds(found.model_link_seconds),
                f"{found.optimizer_bytes / MB:,.0f}",
                seconds(found.product_seconds),
                seconds(found.exchange_seconds),
                seconds(found.optimizer_seconds),
                f"{100 * found.optimizer_share:.1f}%",
                f"{100 * alone:.1f}%",
            ))  # fmt: skip
    headings = ("GPUs", "GiB a GPU", "model computes", "its links", "MB received", "products", "exchange")
    return table((*headings, "optimizer", "share", "share, model's links hidden"), rows)


def batches() -> str:
    """The optimizer's share by tokens in an update."""
    rows = []
    for gpus in (1024, 4096, 16_384):
        shares = [large(Setup(gpus, "ep"), batch).optimizer_share for batch in BATCHES]
        rows.append((f"{gpus:,}, ep", *(f"{100 * share:.1f}%" for share in shares), f"{tenth(gpus) / 1e6:.2f}M"))
    return table(("GPUs", *(f"{batch // 10**6}M" for batch in BATCHES), "a tenth at"), rows)


BATCHES = (1_000_000, 4_000_000, 16_000_000, 64_000_000)


def tenth(gpus: int) -> float:
    """Tokens in an update at which the optimizer is a tenth of it, if the model's traffic is hidden."""
    found = large(Setup(gpus, "ep"))
    return 9 * found.optimizer_seconds / found.model_seconds * LARGE_BATCH


def sizes() -> str:
    """What the model on paper is made of."""
    parts = parts_of(MOE)
    labels = {"experts": parts.experts, "attention": parts.hidden, "embedding, norms, routers": parts.rest}
    rows = []
    for label, part in labels.items():
        matrices = [f"{number:,} of {short:,} by {long:,}" for (short, long), number in part.matrices.items()]
        rows.append((label, f"{part.parameters / 1e9:,.1f}B", ", ".join(matrices) or "AdamW"))
    return table(("part", "parameters", "matrices"), rows)


def rates() -> str:
    """The rates behind all of it."""
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


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    DOCS / "guide" / "distributed.md": {"rates": rates, "strategies": strategies, "links": links},
    Path(__file__).with_name("scaling.md"): {"sizes": sizes, "one-trillion": one_trillion, "batches": batches},
}


def written(path: Path) -> str:
    """A page with today's tables."""
    page = path.read_text(encoding="utf-8")
    for key, make in TABLES[path].items():
        begin, end = f"<!-- table: {key} -->", f"<!-- end: {key} -->"
        if begin not in page or end not in page.partition(begin)[2]:
            raise SystemExit(f"{path} has no place for the table {key}: add {begin} and {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [path for path in TABLES if written(path) != path.read_text(encoding="utf-8")]
    for path in () if check else stale:
        path.write_text(written(path), encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
