"""Train the runs of named groups and write one small record for each, as long as the time lasts.

    PYTHONPATH=src python bench/gather.py regret-6400 rules --data DIR --seconds 540

Groups are in bench/planned.py, most important runs first; `--list` shows them. A run whose record is in evidence/ or in
`--out` is not made again, one that would not end in time is not begun, and one that fails is told of and left out. With
`--workers N` so many processes share the GPU. Nothing that draws is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import re
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from muonsw.lab.data.loader import TokenLoader
from muonsw.lab.data.shards import open_split, read_record
from muonsw.lab.data.tokenizers import padded_vocab
from muonsw.lab.errors import Diverged
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.loop import Watch, train
from planned import GROUPS, Planned

EVIDENCE = Path(__file__).parents[1] / "evidence"
Record = dict[str, Any]

# What is kept of every telemetry sample, where it is kept.
SAMPLED = ("weight_rms", "update_rms", "decay", "alignment_update", "alignment_gradient", "alignment_momentum")
SAMPLED += ("defect", "lr")
DIGITS = 5
# What a process needs before its first update, and an update of width 128 with 16 sequences, in seconds on one H200.
COMPILING, UPDATE = 35.0, 0.0045


@dataclass(frozen=True)
class Wanted:
    """A run to make, of which group, and the file of its record."""

    group: str
    out: Path
    planned: Planned


def main() -> None:
    options = parsed()
    if options.list:
        for name, group in GROUPS.items():
            print(f"{name:12} {len(group.runs()):3} runs, {guess(group.runs()):5.0f} s: {group.question}")
        return
    gather([one for asked in options.groups for one in left_of(asked, options)], options)


def left_of(asked: str, options: argparse.Namespace) -> list[Wanted]:
    """The runs of `GROUP`, or of its first N with `GROUP:N`, that have no record yet."""
    name, _, first = asked.partition(":")
    runs, out = GROUPS[name].runs()[: int(first) if first else None], options.out or EVIDENCE / GROUPS[name].file
    done = {identity(record) for path in {*EVIDENCE.glob("*.jsonl"), out} for record in read(path)}
    left = [one for one in runs if identity(settings(one.config)) not in done]
    print(f"{name}: {len(left)} of {len(runs)} runs left", flush=True)
    return [Wanted(name, out, replace(one, config=ready(one.config, options))) for one in left]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP[:N]", help="its first N runs: " + ", ".join(GROUPS))
    parser.add_argument("--data", type=Path, help="a folder that `muonsw data prepare` filled")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no run that would end later")
    parser.add_argument("--out", type=Path, help="where records are added, instead of the group's file in evidence/")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--steps", type=int, help="cut every run to so many updates, to try the machine")
    parser.add_argument("--list", action="store_true", help="show the groups and how long they take, and end")
    options = parser.parse_args()
    if not options.list and (not options.groups or options.data is None):
        parser.error("give one GROUP or more, and --data DIR; or --list")
    if unknown := {asked for asked in options.groups if not re.fullmatch(rf"({'|'.join(GROUPS)})(:[1-9]\d*)?", asked)}:
        parser.error(f"no group {', '.join(sorted(unknown))}: give {', '.join(GROUPS)}, or the first of one as GROUP:N")
    options.start = time.perf_counter()
    return options


@dataclass
class Clock:
    """How long runs take here: by what decides it, the seconds of an update."""

    start: float
    seconds: float
    workers: int
    known: dict[Any, float] = field(default_factory=dict)

    def allows(self, config: RunConfig) -> bool:
        """Whether a run that begins now would end in time."""
        needed = self.known.get(size(config), UPDATE * cost(config) * self.workers) * config.steps
        return time.perf_counter() - self.start + needed <= self.seconds

    def learn(self, config: RunConfig, seconds: float) -> None:
        """Remember the quickest update of a size; the first run of a process compiles."""
        self.known[size(config)] = min(self.known.get(size(config), math.inf), seconds / config.steps)


def size(config: RunConfig) -> tuple[Any, ...]:
    """What decides how long an update takes."""
    return config.model.width, config.batch, config.optimizer.algorithm, config.weights


def cost(config: RunConfig) -> float:
    """An update, in those of width 128 with 16 sequences; a guess until one was seen."""
    tokens = config.batch * config.model.sequence / 2**14
    return 0.4 + 0.6 * tokens * (config.model.width / 128) ** 0.8


def guess(runs: list[Planned]) -> float:
    return COMPILING + sum(UPDATE * cost(one.config) * one.config.steps for one in runs)


def gather(runs: list[Wanted], options: argparse.Namespace) -> None:
    """Make the runs one after another or side by side, and write the record of each as soon as it has ended."""
    clock = Clock(options.start, options.seconds, options.workers)
    for wanted, record in outcomes(runs, clock, options.workers):
        one, elapsed = wanted.planned, f"{time.perf_counter() - options.start:6.0f} s "
        if isinstance(record, str):
            print(f"{elapsed} {one.arm} failed:\n{record}", flush=True)
            continue
        clock.learn(one.config, record["seconds"])
        with wanted.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"group": wanted.group, "arm": one.arm, **record, "workers": options.workers}) + "\n")
        loss = "diverged" if record["final_loss"] is None else f"{record['final_loss']:.4f}"
        told = f"{one.arm}, width {record['width']}, {record['steps']} updates, seed {record['seed']}: {loss}"
        print(f"{elapsed} {told} ({record['seconds']:.0f} s)", flush=True)


def outcomes(runs: list[Wanted], clock: Clock, workers: int) -> Iterator[tuple[Wanted, Record | str]]:
    """Every run that ends in time, with its record or what went wrong; in this process, or in several."""
    begun = set[tuple[Any, ...]]()

    def begin(one: Wanted) -> bool:
        key = identity(settings(one.planned.config))
        if key in begun or not clock.allows(one.planned.config):
            return False
        begun.add(key)
        return True

    left = (one for one in runs if begin(one))
    if workers == 1:
        yield from ((one, attempt(one.planned)) for one in left)
        return
    waiting = dict[Future[Record | str], Wanted]()
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        while True:
            for one in islice(left, workers - len(waiting)):
                waiting[pool.submit(attempt, one.planned)] = one
            if not waiting:
                return
            for ended in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(ended), ended.result()


def ready(config: RunConfig, options: argparse.Namespace) -> RunConfig:
    """The run on this data, perhaps cut short."""
    vocab = padded_vocab(read_record(options.data).vocab_size)
    steps = config.steps if options.steps is None else min(config.steps, options.steps)
    every = {"checkpoint_every": steps, "steps": steps}
    model, data = replace(config.model, vocab=vocab), replace(config.data, path=str(options.data))
    return replace(config, model=model, data=data, **every)


def attempt(one: Planned) -> Record | str:
    """A record, or the traceback of what went wrong: one bad run must not cost the others."""
    try:
        return outcome(one)
    except Exception:
        return traceback.format_exc()


def outcome(one: Planned) -> Record:
    """Train a run in a folder that is thrown away, and keep what is worth keeping."""
    losses: list[list[float]] = []
    samples: list[list[float | None]] = []

    def look(record: Mapping[str, Any]) -> None:
        if record["kind"] == "eval":
            losses.append([record["step"], short(record["loss"])])
        if record["kind"] == "telemetry":
            seen = record["decayed"] or record["all"]
            samples.append([record["step"], *(short(seen.get(key)) for key in SAMPLED)])

    config, began, result = one.config, time.perf_counter(), {}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Diverged):
        result = train(config, Path(folder) / "run", Watch(record=look))
    norms = [sample[1] for sample in samples if sample[1] is not None]
    loader = TokenLoader(
        open_split(Path(config.data.path), "train"), config.model.sequence, config.batch, 0, config.data.train_windows
    )
    return {
        **settings(config),
        "final_loss": result.get("final_loss"),
        "losses": losses[1:],
        "end_norm": norms[-1] if norms else None,
        "highest_norm": max(norms, default=None),
        "tokens": config.steps * config.tokens_per_step,
        "epochs": short(loader.epochs(config.steps)),
        "seconds": round(time.perf_counter() - began, 2),
        **({"sampled": ["step", *SAMPLED], "samples": samples} if one.dynamics else {}),
    }


def short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def settings(config: RunConfig) -> Record:
    """What tells one run from another."""
    chosen = config.optimizer
    return {
        "algorithm": chosen.algorithm,
        "rule": chosen.decay,
        "unnormalized": chosen.unnormalized,
        "norm": chosen.norm,
        "target_norm": chosen.target_norm,
        "lambda": chosen.weight_decay,
        "lr": chosen.lr,
        "peak": chosen.peak,
        "width": config.model.width,
        "base_width": config.model.mup.base_width,
        "batch": config.batch,
        "schedule": config.schedule.shape,
        "windows": config.data.train_windows,
        "weights": config.weights,
        "steps": config.steps,
        "seed": config.seed,
    }


def identity(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The settings of a run, as a key."""
    return tuple(record[key] for key in KEYS)


KEYS = (
    *("algorithm", "rule", "unnormalized", "norm", "target_norm", "lambda", "lr", "peak", "width", "base_width"),
    *("batch", "schedule", "windows", "weights", "steps", "seed"),
)


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
