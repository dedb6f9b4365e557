"""`muonsw compare`: the same model on the same batches under several decay rules, and an honest verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from muonsw.decay import DECAY_RULES
from muonsw.lab.arms import Arm, parse_arm, refuse_too_much_decay
from muonsw.lab.commands.data import describe
from muonsw.lab.commands.shared import given, print_conclusion, require_at_least_one
from muonsw.lab.commands.task import TASK_HELP, TaskOptions, introduce, refuse_with_task
from muonsw.lab.compare import FACTORS, Question, advise_arm, answer
from muonsw.lab.console import paragraph, say
from muonsw.lab.data.loader import read_record
from muonsw.lab.errors import UsageError
from muonsw.lab.files import prepare_folder
from muonsw.lab.launch import Cluster, runs_at_once
from muonsw.lab.report.page import PAGE, check_target
from muonsw.lab.runs import load_runs
from muonsw.lab.stats import Verdict, claims_table
from muonsw.lab.studies.study import ByArm, Workshop
from muonsw.lab.train.checkpoint import RESULT
from muonsw.lab.train.config import RunConfig, changed_run, with_data
from muonsw.presets import PRESETS
from muonsw.text import counted

ARMS_HELP = (
    "What is compared, the baseline first: decay rules, presets of other optimizers, or both (scaled, normuon, "
    "soap/constant), each perhaps with settings (scaled,weight_decay=0.5 or soap,lr=0.01,adam_lr=0.02). "
    f"Decay rules: {', '.join(DECAY_RULES)}. Presets: {', '.join(PRESETS)}."
)


@dataclass(frozen=True)
class Compare:
    """Train the same model with constant and with scaled decay, and report which did better.

    Runs are paired: same initial weights, same batches. Rerun the same command to resume.
    """

    preset: str = "demo"
    """Model and recipe, as for `muonsw train`."""
    task: Annotated[str | None, arg(metavar="FILE", help=TASK_HELP)] = None
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Prepared tokens; without them and without --text, the Python standard library is prepared in out/data."""
    text: Annotated[tuple[str, ...], arg(metavar="PATH")] = ()
    """Your own text instead: files, folders or quoted globs (.txt, .md, .jsonl, .parquet); prepared in out/data."""
    out: Annotated[Path, arg(metavar="DIR")] = Path("out/compare")
    """Folder for the runs and the report."""
    arms: Annotated[tuple[str, ...], arg(help=ARMS_HELP)] = ("constant", "scaled")
    seeds: int = 3
    """How many seeds; one gives no interval, and two a very wide one."""
    lr: float | None = None
    """Peak learning rate, instead of the preset's."""
    weight_decay: float | None = None
    """Lambda of every arm that has none of its own; unless given, the one of `muonsw advise`, or that of the task."""
    steps: int | None = None
    """Steps, instead of the preset's; without --lr the peak learning rate follows the horizon rule."""
    checkpoint_every: Annotated[int | None, arg(metavar="N")] = None
    """Steps between checkpoints, instead of the preset's; a run is also saved every three minutes."""
    telemetry_every: Annotated[int | None, arg(metavar="N")] = None
    """Steps between samples of norms, updates and alignments, instead of the preset's; 0 takes none."""
    control: FlagCreatePairsOff[bool] = False
    """Add an arm: constant decay of the same total as scaled decay, which tells less decay from later decay."""
    tune_lambda: FlagCreatePairsOff[bool] = False
    """Find the best lambda of each arm on a seed of its own, and compare those."""
    claims: FlagCreatePairsOff[bool] = False
    """Judge the paper's two claims as well; the exit code is 1 if one fails."""
    retry_diverged: FlagCreatePairsOff[bool] = False
    """Try runs again that diverged in an earlier call."""
    workers: Annotated[int | None, arg(metavar="N")] = None
    """Runs at a time, on one thread each; one for each core or GPU, or all of them on a cluster, unless given."""
    device: str = "auto"
    """cpu, cuda or auto."""
    precision: str | None = None
    """float32, bfloat16 (autocast), or auto for bfloat16 on a GPU."""
    accumulation: int | None = None
    """Micro-batches a step is cut into, for less memory."""
    record: Annotated[Path | None, arg(metavar="FILE")] = None
    """Append the runs to this JSONL table; run folders can then be deleted."""
    verbose: FlagCreatePairsOff[bool] = False
    """Print all tables, with all their columns."""
    own: OmitArgPrefixes[TaskOptions] = field(default_factory=TaskOptions)
    """For a task of your own."""
    cluster: OmitArgPrefixes[Cluster] = field(default_factory=Cluster)
    """Training as jobs of a cluster."""

    def run(self) -> int:
        require_at_least_one(self, "seeds", "workers")
        self.cluster.check(self.device)
        check_target(self.out / PAGE, images=True)
        console, epochs = Console(), 1.0
        if self.task is not None:
            refuse_with_task(self, "--preset", "--data", "--text")
            begun, chosen = sorted((self.out / "runs").glob("*")), given(self, "lr", "weight_decay", "steps")
            base, checked = self.own.run_config(self.task, begun, **chosen, **self._changes())
            introduce(console, base, checked)
            subject, seen = Path(self.task).name, counted(base.batch, "sample")
        else:
            base, subject = self._decoder_base(console)
            epochs = base.steps * base.tokens_per_step / read_record(Path(base.tokens.path)).tokens("train")
            base = self._with_lambda(console, base, epochs)
            seen = f"{counted(base.tokens_per_step, 'token')} ({epochs:.2f} epochs of {base.tokens.path})"
        arms = self._arms(base)
        compared = "Optimizers" if any(arm.optimizer.preset for arm in arms) else "Decay rules"
        title = f"{compared} on {subject}"
        asked = Question(base, arms, self.seeds, title, self.control, self.tune_lambda, epochs, self.claims)
        places, runs = ByArm(self.out / "runs"), self.seeds * (len(self.arms) + self.control)
        workers = self.workers or (runs if self.cluster.cluster else runs_at_once(self.device))
        workshop = Workshop(console, workers, places, self.retry_diverged, self.cluster)
        prepare_folder(self.out)
        names = " and ".join([*(arm.name for arm in arms), *["constant decay of the same total"] * self.control])
        length = f"{counted(self.seeds, 'seed')} each: {counted(base.steps, 'step')} of {seen}"
        paragraph(console, f"{names}, {length}, {workshop.workers} at a time, in {self.out}")

        found = answer(asked, workshop.train, self.out, note=partial(say, console))
        tables = list(found.tables if self.verbose else found.tables[:1])
        if self.verbose and found.claims:
            tables.append(claims_table({"comparison": found.claims}, ("expected", "measured")))
        print_conclusion(console, found, self.out, tables, verbose=self.verbose)
        if self.record is not None:
            from muonsw.lab.studies.records import append  # which most comparisons do not need

            ended = sorted(path.parent for path in (self.out / "runs").glob(f"*/{RESULT}"))
            count = append(self.record, load_runs(ended), study="tasks" if self.task else "compare")
            say(console, f"added {counted(count, 'run')} to {self.record}")
        return int(any(claim.verdict is Verdict.FAILS for claim in found.claims))

    def _decoder_base(self, console: Console) -> tuple[RunConfig, str]:
        """The run of a preset, and what it trains on as the title of the page names it."""
        self.own.refuse_without_task()
        base = changed_run(self.preset, self.steps, given(self, "lr", "weight_decay"), **self._changes())
        self._arms(base)  # checked before tokens are prepared, which may take long
        if self.data is None and not self.text:
            say(console, "tokens: the Python standard library, prepared once in out/data")
        base = with_data(base, self.data, self.text)
        if not self.text:
            return base, "Python's standard library" if self.data is None else str(self.data)
        say(console, describe(Path(base.tokens.path)))
        names = [Path(path).name or path for path in self.text]
        return base, names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

    def _with_lambda(self, console: Console, base: RunConfig, epochs: float) -> RunConfig:
        """The run at the formula's lambda, unless one was given; says whether a given one suits the run."""
        advice = advise_arm(base, Arm("scaled", replace(base.optimizer, decay="scaled")), epochs)
        given_lambda = base.optimizer.weight_decay
        if advice.low is None or advice.high is None:
            say(console, f"lambda {given_lambda:g}: {advice.answer}")
        elif self.weight_decay is None:
            # Two digits are as many as the formula knows; of a range, its middle.
            lam = float(f"{math.sqrt(advice.low * advice.high):.2g}")
            base = replace(base, optimizer=replace(base.optimizer, weight_decay=lam))
            say(console, f"lambda {lam:g}, by the formula of muonsw advise")
        elif advice.verdict != "fine":
            size = "large" if advice.verdict == "large" else "small"
            say(console, f"lambda {given_lambda:g}, as given, is {size} for this run. {advice.answer}")
        return base

    def _changes(self) -> dict[str, Any]:
        # One thread for each run: the number of workers then changes nothing but the time.
        threads = {"threads": 1} if self.cluster.device_type(self.device) == "cpu" else {}
        return given(self, "device", "checkpoint_every", "telemetry_every", "precision", "accumulation") | threads

    def _arms(self, base: RunConfig) -> tuple[Arm, ...]:
        arms = tuple(parse_arm(text, base.optimizer) for text in self.arms)
        if len({arm.name for arm in arms}) < max(len(arms), 2):
            raise UsageError(f"--arms must name at least two different arms, got {', '.join(self.arms)}")
        scaled = [arm for arm in arms if arm.optimizer.decay == "scaled"]
        if self.control and not scaled:
            raise UsageError("--control needs a scaled arm, whose total it takes")
        if self.control and not scaled[0].optimizer.weight_decay:
            raise UsageError("--control needs decay to take the total of: give --weight-decay above zero")
        for arm in arms:
            tried = arm.optimizer.weight_decay * (min(FACTORS) if self.tune_lambda else 1.0)
            refuse_too_much_decay(base, replace(arm.optimizer, weight_decay=tried))
        if self.tune_lambda and not any(arm.optimizer.weight_decay for arm in arms):
            raise UsageError("--tune-lambda tries multiples of lambda: give --weight-decay above zero")
        return arms
