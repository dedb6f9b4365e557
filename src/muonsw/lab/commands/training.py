"""`muonsw compare`, `muonsw train` and `muonsw task`, which share the options that describe a run."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from muonsw.decay import DECAY_RULES
from muonsw.lab import launch
from muonsw.lab.compare import (
    CONTROL,
    FACTORS,
    RULES,
    SCALED,
    Arm,
    Conclusion,
    PlaceJob,
    Results,
    advice_for,
    by_arm,
    conduct,
    decay_factors,
    parse_arm,
    refuse_too_much_decay,
    train_all,
)
from muonsw.lab.config import changed
from muonsw.lab.console import Table, harmless, paragraph, print_table, say, showing
from muonsw.lab.data.loader import SPLITS, DataRecord, read_record
from muonsw.lab.errors import OK, Ending, UsageError
from muonsw.lab.files import prepare_folder, require_writable, write_atomically
from muonsw.lab.launch import Cluster, runs_at_once
from muonsw.lab.options import Flag, unset
from muonsw.lab.report import PAGE, check_target
from muonsw.lab.runs import load_runs
from muonsw.lab.tasks import Checked, TaskConfig, check_task, naming_lines, with_file
from muonsw.lab.train.checkpoint import RESULT, read_config_file, recorded_code
from muonsw.lab.train.config import RunConfig, changed_run, task_run, with_data
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.ranks import joined, known_to_all, speaker
from muonsw.lab.train.records import numbers_of
from muonsw.lab.train.state import Training, build_optimizer, open_task, resolve_device
from muonsw.presets import PRESETS
from muonsw.text import counted

ARMS_HELP = (
    "Arms to compare, the baseline first: a decay rule (scaled), an optimizer preset (normuon) or both "
    "(soap/constant), optionally with settings (scaled,weight_decay=0.5 or soap,lr=0.01,adam_lr=0.02). "
    f"Decay rules: {', '.join(DECAY_RULES)}. Presets: {', '.join(PRESETS)}."
)
NAME = "training"

# ---- Options


def user_options(command: Any, *names: str) -> dict[str, Any]:
    """The values of these options by name, without those that the user left out."""
    return {name: value for name in names if (value := getattr(command, name)) is not None}


def require_at_least_one(command: Any, *names: str) -> None:
    for name, value in user_options(command, *names).items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


TaskOptions = Annotated[tuple[str, ...], unset(name="task.NAME", metavar="VALUE")]


def checked_task(
    path: str, options: Sequence[str], runs: Iterable[Path] = (), seed: int = 0, **settings: Any
) -> tuple[RunConfig, Checked]:
    """Check a user's task; return its run and the result of the check.

    Raises:
        UsageError: If it cannot be trained, or if its file changed after one of `runs` began. The latter is checked
            before the file is executed.
    """
    task = TaskConfig(path, tuple(sorted(options)))
    for folder in runs:
        with_file(replace(task, fingerprint=recorded_code(folder, task)))
    task = with_file(task)
    checked = check_task(task, seed)
    return task_run(task, checked, seed=seed, **settings), checked


@dataclass(frozen=True)
class RunOptions:
    """What to train, on what, and how."""

    preset: str = "demo"
    """Model and recipe: demo, mini, w128, w256, w512, w768 or w1024."""
    task: Annotated[str | None, unset(metavar="FILE")] = None
    """Python file to train instead of a preset; executed with your permissions. `muonsw task new` writes one."""
    data: Annotated[Path | None, unset(metavar="DIR")] = None
    """Prepared tokens. Default: --text, else the Python standard library."""
    text: Annotated[tuple[str, ...], unset(metavar="PATH")] = ()
    """Train on this text: files, folders or quoted globs (.txt, .md, .jsonl, .parquet). It is tokenized in out/data."""
    steps: Annotated[int | None, unset()] = None
    """Optimizer steps. Default: the preset's. Without --lr, the peak learning rate follows the horizon rule."""
    lr: Annotated[float | None, unset()] = None
    """Peak learning rate before muP scales it. Default: the preset's."""
    weight_decay: Annotated[float | None, unset()] = None
    """Lambda. Default: the preset's or the task's; on text, `muonsw compare` uses what `muonsw advise` suggests."""
    accumulation: Annotated[int | None, unset()] = None
    """Micro-batches per step; more use less memory."""
    checkpoint_every: Annotated[int | None, unset(metavar="N")] = None
    """Steps between checkpoints. Default: the preset's. A run is also saved every three minutes."""
    telemetry_every: Annotated[int | None, unset(metavar="N")] = None
    """Steps between samples of norms, updates and alignments; 0 for none. Default: the preset's."""
    device: str = "auto"
    """cpu, cuda or auto."""
    precision: Annotated[str | None, unset()] = None
    """float32, bfloat16 (autocast), or auto: bfloat16 on a GPU."""
    task_options: TaskOptions = ()
    """With --task, an argument of its functions, such as `--task.depth 6`."""

    def run_config(self, runs: Iterable[Path], **changes: Any) -> tuple[RunConfig, Checked | None]:
        """The run that the options describe, without tokens, and the result of checking its task."""
        changes |= user_options(self, "accumulation", "checkpoint_every", "telemetry_every", "device", "precision")
        optimizer = user_options(self, "lr", "weight_decay")
        if self.task is not None:
            for option in changed(self):
                if option in ("--preset", "--data", "--text", "--config", "--batch"):
                    raise UsageError(f"give --task or {option}, not both: the task file sets the model and its data")
            changes |= optimizer | user_options(self, "steps")
            return checked_task(self.task, self.task_options, runs, **changes)
        if self.task_options:
            raise UsageError("--task.NAME needs --task FILE")
        return changed_run(self.preset, self.steps, optimizer, **changes), None

    def prepare(self, console: Console, config: RunConfig, checked: Checked | None) -> RunConfig:
        """Introduce the task, or prepare the tokens, which may take long."""
        if checked is not None:
            introduce(console, config, checked)
            return config
        if self.data is None and not self.text:
            say(console, "tokens: the Python standard library, prepared once in out/data")
        config = with_data(config, self.data, self.text)
        if self.text:
            say(console, f"tokens: {contents(read_record(Path(config.tokens.path)))}, in {config.tokens.path}")
        return config


def contents(record: DataRecord) -> str:
    """Describe a folder of prepared tokens."""
    size = sum(group.bytes for group in record.groups)
    text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    tokens = " and ".join(f"{record.tokens(split):,} {split}" for split in SPLITS)
    return f"{counted(record.documents, 'document')}, {text} of text, {tokens} tokens"


def introduce(console: Console, config: RunConfig, checked: Checked) -> None:
    """Print what will be trained: batches, warnings, which algorithm updates what, and whether decay matters.

    Raises:
        UsageError: If the optimizer rejects the model or the patterns of the file.
    """
    assert config.task is not None
    measured = "".join(f", {name} {value:.4g}" for name, value in checked.metrics.items())
    paragraph(
        console, f"{config.task.name}: batches of {checked.batch}; loss {checked.loss:.4g}{measured} at the start"
    )
    for note in checked.notes:
        paragraph(console, f"note: {note}")
    task = open_task(config)
    model = task.model(config.seed)
    with naming_lines(config.task):
        patterns = task.patterns(model, config.optimizer.weight_decay)
    try:
        say(console, build_optimizer(model, config.optimizer, config.steps, patterns=patterns).routing())
    except ValueError as error:
        raise UsageError(str(error)) from error
    optimizers = {rule: replace(config.optimizer, decay=rule, peak="group") for rule in RULES}
    totals = {rule: math.fsum(decay_factors(config, optimizer)) for rule, optimizer in optimizers.items()}
    paragraph(console, f"total decay: {', '.join(f'{total:.2g} ({rule})' for rule, total in totals.items())}")


@dataclass(frozen=True)
class ManyRuns:
    """How a command trains several runs, and what it prints and keeps."""

    workers: Annotated[int | None, unset(metavar="N")] = None
    """Runs or experiments at a time. Default: one per core or GPU; on a cluster, all."""
    record: Annotated[Path | None, unset(metavar="FILE")] = None
    """Append the runs to this JSONL table; run folders can then be deleted."""
    cluster: OmitArgPrefixes[Cluster] = field(default_factory=Cluster)
    """To train on a Slurm cluster."""

    def at_once(self, runs: int, device: str) -> int:
        return self.workers or (runs if self.cluster.cluster else runs_at_once(device))

    def trainer(self, console: Console, place: PlaceJob, workers: int) -> partial[Results]:
        run = partial(launch.run, console=console, workers=workers, cluster=self.cluster)
        return partial(train_all, place=place, launch=run)

    def conclude(
        self, console: Console, conclusion: Conclusion, folder: Path, tables: Sequence[Table], more: str = ""
    ) -> None:
        """Print the verdict, these tables, and where the files are, followed by `more`."""
        say(console, "")
        paragraph(console, conclusion.sentence)
        for table in tables:
            print_table(console, table)
        names = ", ".join(str(path.relative_to(folder)) for path in conclusion.paths)
        say(console, f"\nwrote {names} to {folder}{more}")

    def add_to_record(self, console: Console, runs: Iterable[Path], **about: Any) -> None:
        if self.record is not None:
            from muonsw.lab.studies.records import append  # most comparisons do not need it

            count = append(self.record, load_runs(runs), **about)
            say(console, f"added {counted(count, 'run')} to {self.record}")


# ---- Compare


@dataclass(frozen=True)
class Compare(ManyRuns, RunOptions):
    """Compare decay rules on your text, your task or a demo.

    Every rule trains the same model from the same weights on the same batches.

    Rerun the same command to resume.
    """

    out: Annotated[Path, arg(metavar="DIR")] = Path("out/compare")
    """Folder for the runs and the report."""
    arms: Annotated[tuple[str, ...], arg(help=ARMS_HELP)] = ("constant", "scaled")
    seeds: int = 3
    """Number of seeds; one gives no error bar, and two a very wide one."""
    control: Flag = False
    """Also train constant decay with the scaled arm's total decay, to separate less decay from later decay."""
    tune_lambda: Flag = False
    """Find the best lambda of each arm on a separate seed, and compare the arms at their best."""

    def run(self) -> int:
        require_at_least_one(self, "seeds", "workers")
        self.cluster.check(self.device)
        check_target(self.out / PAGE)
        console, epochs = Console(), 1.0
        # One thread per run: results then do not depend on the number of workers.
        threads = {"threads": 1} if self.cluster.device_type(self.device) == "cpu" else {}
        base, checked = self.run_config(sorted((self.out / "runs").glob("*")), **threads)
        first, *_ = self._arms(base)  # raises before tokens are prepared
        shown = replace(base, optimizer=first.optimizer)
        base = replace(self.prepare(console, shown, checked), optimizer=base.optimizer)
        if self.task is not None:
            subject, seen = Path(self.task).name, counted(base.batch, "sample")
        else:
            prepared = "Python's standard library" if self.data is None else str(self.data)
            subject = ", ".join(Path(path).name or path for path in self.text) or prepared
            epochs = base.steps * base.tokens_per_step / read_record(Path(base.tokens.path)).tokens("train")
            base = self._with_lambda(console, base, first, epochs)
            seen = f"{counted(base.tokens_per_step, 'token')} ({epochs:.2f} epochs)"
        arms, length = self._arms(base), f"{counted(base.steps, 'step')} of {seen}"
        workers = self.at_once(self.seeds * (len(arms) + self.control), self.device)
        prepare_folder(self.out)
        names = ", ".join(map(repr, [*(arm.name for arm in arms), *[CONTROL] * self.control]))
        seeds = f"{counted(self.seeds, 'seed')} each"
        paragraph(console, f"{names}; {seeds}: {length}, {workers} at a time, in {self.out}")
        conclusion = conduct(
            base,
            arms,
            self.trainer(console, by_arm(self.out / "runs"), workers),
            self.out,
            seeds=self.seeds,
            title=f"{subject}: {length}",
            control=self.control,
            tune_lambda=self.tune_lambda,
            epochs=epochs,
        )
        self.conclude(console, conclusion, self.out, conclusion.tables)
        ended = sorted(path.parent for path in (self.out / "runs").glob(f"*/{RESULT}"))
        self.add_to_record(console, ended, study="tasks" if self.task else "compare")
        return 0

    def _with_lambda(self, console: Console, base: RunConfig, first: Arm, epochs: float) -> RunConfig:
        """Set the formula's lambda for the first arm unless the user gave one; print it and whether it fits."""
        judged = replace(first.optimizer, decay=SCALED, weight_decay=base.optimizer.weight_decay)
        advice = advice_for(base, judged, epochs)
        if self.weight_decay is None and advice.low is not None and advice.high is not None:
            # The formula is good for two digits; from a range, take the geometric mean.
            lam = float(f"{math.sqrt(advice.low * advice.high):.2g}")
            say(console, f"lambda {lam:g}, by the formula of muonsw advise")
            return replace(base, optimizer=replace(base.optimizer, weight_decay=lam))
        say(console, f"lambda {base.optimizer.weight_decay:g}: {advice.answer}")
        return base

    def _arms(self, base: RunConfig) -> tuple[Arm, ...]:
        arms = tuple(parse_arm(text, base.optimizer) for text in self.arms)
        if len({arm.name for arm in arms}) < max(len(arms), 2):
            raise UsageError(f"--arms must name at least two different arms, got {', '.join(self.arms)}")
        scaled = [arm for arm in arms if arm.optimizer.decay == SCALED]
        if self.control and not scaled:
            raise UsageError("--control needs a scaled arm, because it copies that arm's total decay")
        if self.control and not scaled[0].optimizer.weight_decay:
            raise UsageError("--control needs a scaled arm that decays: give --weight-decay above zero")
        for arm in arms:
            tried = arm.optimizer.weight_decay * (min(FACTORS) if self.tune_lambda else 1.0)
            refuse_too_much_decay(base, replace(arm.optimizer, weight_decay=tried))
        if self.tune_lambda and not any(arm.optimizer.weight_decay for arm in arms):
            raise UsageError("--tune-lambda tries multiples of lambda: give --weight-decay above zero")
        return arms


# ---- Train


@dataclass(frozen=True)
class Train(RunOptions):
    """Train a model; rerun the same command to resume.

    Exit codes: 0 complete, 1 diverged, 130 or 143 stopped and saved.
    """

    out: Annotated[Path | None, unset(metavar="DIR")] = None
    """Folder of the run. Default: out/train/ and the name of the preset, task or config."""
    config: Annotated[Path | None, unset(metavar="FILE")] = None
    """Train from a run's config.json; its task file, if any, is executed. Combine only with --out and --strategy."""
    arm: Annotated[str | None, unset()] = None
    """Decay rule, optimizer preset or both, with settings, as for `muonsw compare --arms`. Default: the preset's."""
    batch: Annotated[int | None, unset()] = None
    """Sequences per step. Default: the preset's. A task sets its own batch size."""
    seed: int = 0
    """Seed of the initial weights and the data order."""
    strategy: Annotated[Literal["ddp", "fsdp"] | None, unset()] = None
    """Under torchrun: ddp (default) replicates the model on every rank, fsdp shards it."""
    tensorboard: Flag = False
    """Also write TensorBoard events into the run's folder."""
    wandb: Annotated[str, unset()] = ""
    """Also log to this Weights & Biases project."""

    def run(self) -> int:
        folder = self.out or Path("out/train") / Path(self.config or self.task or self.preset).stem
        require_writable(folder)
        if self.config and self.task is None:
            if others := [option for option in changed(self) if option not in ("--config", "--out", "--strategy")]:
                raise UsageError(f"{others[0]} does not go with --config, whose file has all settings: change it there")
            config = read_config_file(self.config)
        else:
            console = Console(quiet=speaker() is not None)  # only rank 0 prints
            changes = user_options(self, "batch", "seed", "tensorboard", "wandb")
            config, checked = self.run_config([folder], **changes)
            if self.arm is not None:
                config = replace(config, optimizer=parse_arm(self.arm, config.optimizer).optimizer)
            if config.task is None:
                refuse_too_much_decay(config, config.optimizer)
            resolve_device(config.device)
            config = self.prepare(console, config, checked)
        if self.strategy is not None:
            config = replace(config, parallel=replace(config.parallel, strategy=self.strategy))
        return run(config, folder)


def run(config: RunConfig, folder: Path) -> int:
    """Train on all ranks; rank 0 shows progress and prints the result."""
    console = Console()
    try:
        with joined(config.parallel.timeout) as world, watching(console) if world.leads else nullcontext() as watch:
            result = train(config, folder, watch, world)
    except Ending as error:
        # Only rank 0 reports what every rank knows.
        rank = speaker()
        if rank is None or not known_to_all(error):
            print(f"muonsw: {rank or ''}{harmless(error)}", file=sys.stderr)
        return error.exit_code
    if world.leads:
        best = f"best {result['best_loss']:.4f} after {result['best_step']:,}"
        ended = f"validation loss {result['final_loss']:.4f} after {counted(result['steps'], 'step')} ({best})"
        if skipped := result["skipped"]:
            ended += f", {skipped:,} of them skipped because their gradients were not finite"
        say(console, f"{ended}, {result['seconds']:.0f} s, in {folder}")
    return OK


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    """Show loss, speed and the time left while the block runs."""
    steps, unit = 0, ""
    with showing(console, {NAME: None}) as view:

        def started(training: Training) -> None:
            nonlocal steps, unit
            task = training.task
            steps, unit = training.config.steps, task.unit
            parameters = sum(parameter.numel() for parameter in training.model.parameters())
            size = f"{counted(steps, 'step')} of {task.per_step:,} {unit}, {task.data(steps)}"
            view.say(f"{parameters:,} parameters, {size}, on {training.device}")
            order = ("step", "loss", "validation", "weight RMS", f"{unit}/s")
            view.update(NAME, training.step, dict.fromkeys(order, ""), total=steps)

        def record(record: dict[str, Any]) -> None:
            numbers = numbers_of(record, steps)
            if record["kind"] == "eval":
                metrics = [name for name in record if name not in ("kind", "step", "loss")]
                more = "".join(f", {name} {record[name]:.4g}" for name in metrics)
                view.log(f"step {record['step']:,} of {steps:,}: validation {numbers['validation']}{more}")
            if speed := record.get(f"{unit}_per_second"):
                numbers[f"{unit}/s"] = f"{speed:,.0f}"
            view.update(NAME, record["step"] if record["kind"] == "train" else None, numbers)

        yield Watch(started=started, record=record, note=view.say)


# ---- Task


@dataclass(frozen=True)
class Check:
    """Check every function of a task; show its routing and total decay."""

    file: Annotated[str, Positional, arg(metavar="FILE")]
    """Python file; it is executed with your permissions."""
    task_options: TaskOptions = ()
    """An argument of its functions, such as `--task.depth 6`."""
    steps: Annotated[int | None, unset()] = None
    """Steps. Default: the task's."""

    def run(self) -> int:
        config, checked = checked_task(self.file, self.task_options, **user_options(self, "steps"))
        introduce(Console(), config, checked)
        return 0


@dataclass(frozen=True)
class New:
    """Write a small task that runs, with comments on what to replace."""

    file: Annotated[Path, Positional, arg(metavar="FILE")]
    """Python file to write; it must not exist."""

    def run(self) -> int:
        if self.file.suffix != ".py":
            raise UsageError(f"{self.file} must end in .py")
        text = files("muonsw.lab").joinpath("task_template.py").read_text(encoding="utf-8")
        if os.path.lexists(self.file):
            raise UsageError(f"{self.file} already exists: choose another name")
        prepare_folder(self.file.parent)
        write_atomically(self.file, text)
        named = shlex.quote(str(self.file))
        say(Console(), f"wrote {self.file}; next, `muonsw task check {named}`, then `muonsw compare --task {named}`")
        return 0


TaskCommand = (
    Annotated[Check, subcommand("check", prefix_name=False)] | Annotated[New, subcommand("new", prefix_name=False)]
)
