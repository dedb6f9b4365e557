"""`muonsw compare`: the same model on the same batches under several decay rules, and an honest verdict."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, arg

from muonsw.lab.claims.table import print_claims
from muonsw.lab.data.record import read_record
from muonsw.lab.errors import UsageError
from muonsw.lab.processes import cores
from muonsw.lab.report.sections import Table
from muonsw.lab.storage import prepare_folder
from muonsw.lab.studies.compare.arms import Arm, parse_arm, same_total
from muonsw.lab.studies.compare.conduct import Bench, write_outcome
from muonsw.lab.studies.compare.tables import arms_table, pairs_table
from muonsw.lab.studies.compare.tune import sweep_table, tune
from muonsw.lab.tables import print_table
from muonsw.lab.terminal import say
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.presets import run_on, with_steps
from muonsw.lab.train.state import resolve_device


@dataclass(frozen=True)
class Compare:
    """Train the same model with constant and with scaled decay, and tell what came out.

    Runs are paired: same initial weights, same batches. The same command again goes on where it stopped.
    """

    preset: str = "demo"
    """Model and recipe, as for `muonsw train`."""
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Prepared tokens; without it the Python standard library is prepared in out/data."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("out/compare")
    """Folder for the runs and the report."""
    arms: tuple[str, ...] = ("constant", "scaled")
    """Decay rules, each perhaps with settings: constant, scaled,weight_decay=0.5 or scaled,algorithm=adamw. The first
    is the baseline."""
    seeds: int = 3
    """How many seeds; fewer than three give intervals that span everything."""
    lr: float | None = None
    """Peak learning rate, instead of the preset's."""
    weight_decay: float | None = None
    """Lambda of every arm that has none of its own, instead of the preset's."""
    steps: int | None = None
    """Updates, instead of the preset's; the peak learning rate then follows the horizon rule unless it is given."""
    control: Literal["none", "total"] = "none"
    """With total: one more arm, constant decay that adds up to what scaled decay does."""
    tune_lambda: FlagCreatePairsOff[bool] = False
    """Find the best lambda of each arm on a seed of its own, and compare those."""
    workers: Annotated[int | None, arg(metavar="N")] = None
    """Runs at a time, on one thread each; one for each core, or one on a GPU, unless given."""
    device: str = "auto"
    """cpu, cuda or auto."""

    def run(self) -> int:
        """Train all arms, print the verdict, write the report."""
        if self.seeds < 1:
            raise UsageError(f"--seeds must be at least 1, got {self.seeds}")
        console, start = Console(), time.perf_counter()
        if self.data is None:
            say(console, "tokens: the Python standard library, prepared once in out/data")
        base = self._base()
        arms = self._arms(base)
        prepare_folder(self.out)
        bench = Bench(self.out, console, self._workers(base))
        say(console, self._plan(base, arms, bench.workers))
        tables: list[Table] = []
        if self.tune_lambda:
            found = tune(bench, base, arms, seed=self.seeds)
            arms, tables = [tuned.arm for tuned in found], [sweep_table(found)]
        arms += self._control(base, arms)
        runs = bench.run(base, arms, range(self.seeds))
        title = f"Decay rules on the {self.preset} preset"
        # The paper's claims are about one lambda for both rules.
        claims = () if self.tune_lambda else None
        outcome, sentence, judged, paths = write_outcome(
            self.out, title, runs, tuned=self.tune_lambda, tables=tables, claims=claims
        )
        for table in (arms_table(outcome), pairs_table(outcome), *tables):
            print_table(console, table)
        print_claims(console, judged)
        seconds = time.perf_counter() - start
        say(console, f"\n{sentence}\n({seconds:.0f} s)")
        for path in paths:
            if path.suffix in (".html", ".json"):
                say(console, f"wrote {path}")
        return 0

    def _plan(self, base: RunConfig, arms: list[Arm], workers: int) -> str:
        """What is about to happen, in a sentence."""
        names = " and ".join(arm.name for arm in arms)
        epochs = base.steps * base.tokens_per_step / read_record(Path(base.data.path)).tokens("train")
        length = f"{base.steps:,} updates of {base.tokens_per_step:,} tokens ({epochs:.2f} epochs of {base.data.path})"
        return f"{names}, {self.seeds} seeds each: {length}, {workers} at a time, in {self.out}"

    def _base(self) -> RunConfig:
        base = replace(run_on(self.preset, self.data), device=self.device)
        changes = {"lr": self.lr, "weight_decay": self.weight_decay}
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        try:
            base = base if self.steps is None else with_steps(base, self.steps)
            # One thread for each run: the number of workers then changes nothing but the time.
            threads = 1 if on_cpu(base) else base.threads
            return replace(base, optimizer=replace(base.optimizer, **given), threads=threads)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _arms(self, base: RunConfig) -> list[Arm]:
        arms = [parse_arm(text, base.optimizer) for text in self.arms]
        if len({arm.name for arm in arms}) < max(len(arms), 2):
            raise UsageError(f"--arms must name at least two different arms, got {', '.join(self.arms)}")
        if self.control == "total" and not any(arm.optimizer.decay == "scaled" for arm in arms):
            raise UsageError("--control total needs a scaled arm, whose total it takes")
        return arms

    def _control(self, base: RunConfig, arms: list[Arm]) -> list[Arm]:
        """Constant decay of the total of the scaled arm as it is after tuning."""
        scaled = [arm for arm in arms if arm.optimizer.decay == "scaled"]
        return [same_total(base, scaled[0])] if self.control == "total" else []

    def _workers(self, base: RunConfig) -> int:
        if self.workers is not None:
            if self.workers < 1:
                raise UsageError(f"--workers must be at least 1, got {self.workers}")
            return self.workers
        return cores() if on_cpu(base) else 1


def on_cpu(config: RunConfig) -> bool:
    """Whether a run would be on the CPU here."""
    return resolve_device(config.device).type == "cpu"
