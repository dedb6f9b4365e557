"""`muonsw task`: check a task of the user's own, or write a file to begin with; and how other commands take one."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from muonsw.lab.advise import RULES
from muonsw.lab.arms import Arm
from muonsw.lab.commands.shared import changed, given, require_at_least_one
from muonsw.lab.compare import FACTORS, advise_arm
from muonsw.lab.console import harmless, paragraph, say
from muonsw.lab.errors import FAILED, Diverged, Interrupted, UsageError
from muonsw.lab.files import prepare_folder, write_atomically
from muonsw.lab.launch import runs_at_once
from muonsw.lab.tasks import Checked, TaskConfig, check_task, with_file
from muonsw.lab.train.checkpoint import recorded_code
from muonsw.lab.train.config import RunConfig, task_run
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.records import Record
from muonsw.lab.train.state import Training, build_optimizer, open_task, resolve_device
from muonsw.text import counted

TASK_HELP = (
    "Train this instead of a preset: a Python file, or dotted module, which is executed as you; `muonsw task new FILE` "
    "writes one."
)
ARMS = 2
FEWEST_STEPS, TIMED_SECONDS = 3, 5.0


@dataclass(frozen=True)
class TaskOptions:
    """How a task of the user's own is called and evaluated."""

    task_options: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE")] = ()
    """Options of the task; `--task.depth 6` is the same as `--task-options depth=6`."""
    eval_batches: Annotated[int | None, arg(metavar="N")] = None
    """Validation batches of a task; all of a list, and 16 of what has no length, unless given."""
    eval_every: Annotated[int | None, arg(metavar="N")] = None
    """Steps between evaluations of a task; a twentieth of the run unless given."""

    def refuse_without_task(self) -> None:
        for option in changed(self):
            raise UsageError(f"{option} needs a task: give --task FILE")

    def run_config(
        self, path: str, runs: Iterable[Path] = (), seed: int = 0, **chosen: Any
    ) -> tuple[RunConfig, Checked]:
        """The run of the task, and what calling its functions showed.

        Raises:
            UsageError: If it cannot be trained, before anything is; or before any of it is run, if its code has changed
                since one of `runs` began.
        """
        try:
            task = TaskConfig(path, tuple(sorted(self.task_options)), None, self.eval_batches)
        except ValueError as error:
            raise UsageError(str(error)) from error
        for begun in runs:
            with_file(replace(task, fingerprint=recorded_code(begun, task)))
        task = with_file(task)
        checked = check_task(task, seed)
        return task_run(task, checked, seed=seed, **chosen, **given(self, "eval_every")), checked


def refuse_with_task(command: object, *options: str) -> None:
    """Refuse options of a command that a task decides itself."""
    for option in changed(command):
        if option in options:
            raise UsageError(f"give --task or {option}, not both: the file says what is trained, and on what")


def introduce(console: Console, config: RunConfig, checked: Checked) -> None:
    """Say what will be trained: batches, what is odd about them, which algorithm moves what, and whether decay acts.

    Raises:
        UsageError: If the optimizer refuses the model, or the routing of the file.
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
    try:
        patterns = task.patterns(model, config.optimizer.weight_decay)
        say(console, build_optimizer(model, config.optimizer, config.steps, patterns=patterns).routing())
    except ValueError as error:
        raise UsageError(str(error)) from error
    with suppress(ValueError):  # a number makes no sense for the formula
        advice = {
            rule: advise_arm(config, Arm(rule, replace(config.optimizer, decay=rule, peak="group")), 1.0)
            for rule in RULES
        }
        totals = " and ".join(f"{one.total:.2g} ({rule})" for rule, one in advice.items())
        answer = advice["scaled"].answer
        paragraph(console, f"Total decay is {totals}. For a language model trained from scratch: {answer}")


class EnoughError(Exception):
    """Ends a run that is only timed."""


@dataclass(frozen=True)
class Check:
    """Call every function of a task and look at what it returns; say how long a comparison will take here."""

    file: Annotated[str, Positional, arg(metavar="FILE")]
    """Python file, or dotted module, which is executed as you."""
    own: OmitArgPrefixes[TaskOptions] = field(default_factory=TaskOptions)
    """Options of the task."""
    steps: int | None = None
    """Steps, instead of the task's own."""
    seeds: int = 3
    """Seeds of the comparison."""
    device: str = "auto"
    """cpu, cuda or auto."""

    def run(self) -> int:
        require_at_least_one(self, "seeds")
        console = Console()
        config, checked = self.own.run_config(self.file, **given(self, "device", "steps"))
        config = replace(config, threads=1 if resolve_device(self.device).type == "cpu" else 0)
        introduce(console, config, checked)
        # Time the first seconds of a real run, which is then deleted.
        times: list[float] = []
        evaluations: list[float] = []

        def started(_training: Training) -> None:
            evaluations.append(time.perf_counter())

        def record(record: Record) -> None:
            kept = {"eval": evaluations, "train": times}.get(record["kind"], [])
            kept.append(time.perf_counter())
            if len(times) > FEWEST_STEPS and times[-1] - times[0] > TIMED_SECONDS:
                raise EnoughError

        steps = max(config.steps, FEWEST_STEPS)
        timed = replace(config, steps=steps, eval_every=steps)  # no evaluation between the steps that are timed
        try:
            with TemporaryDirectory() as folder, suppress(EnoughError):
                train(timed, Path(folder) / "run", Watch(started, record))
        except Diverged as error:
            print(f"muonsw: {harmless(error.__cause__)}", file=sys.stderr)  # without the checkpoint that was deleted
            return FAILED
        except Interrupted as error:
            raise Interrupted("stopped; a check keeps nothing", error.signal) from error
        step, evaluation = (times[-1] - times[0]) / max(1, len(times) - 1), evaluations[1] - evaluations[0]
        run = config.steps * step + (1 + math.ceil(config.steps / config.eval_every)) * evaluation
        workers = runs_at_once(self.device)
        compared, searched = (math.ceil(runs / workers) * run for runs in (ARMS * self.seeds, ARMS * len(FACTORS)))
        runs = f"{counted(config.steps, 'step')}, {ARMS} arms, {counted(self.seeds, 'seed')}"
        parts = f"{1e3 * step:,.1f} ms a step, {1e3 * evaluation:,.0f} ms an evaluation, {workers} runs at a time"
        paragraph(
            console,
            f"{runs}: about {in_words(compared)} here ({parts}); --tune-lambda adds {in_words(searched)} or more",
        )
        return 0


def in_words(seconds: float) -> str:
    """A duration, roughly.

    Examples:
        >>> in_words(0.2), in_words(4.2), in_words(400), in_words(9000)
        ('1 second', '4 seconds', '7 minutes', '2.5 hours')
    """
    if seconds < 90:
        return counted(max(1, round(seconds)), "second")
    return f"{round(seconds / 60)} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


@dataclass(frozen=True)
class New:
    """Write a task that runs, with comments that say what to replace."""

    file: Annotated[Path, Positional, arg(metavar="FILE")]
    """Python file to write; one that exists is left alone."""

    def run(self) -> int:
        if self.file.suffix != ".py":
            raise UsageError(f"{self.file} must end in .py")
        text = files("muonsw.lab").joinpath("task_template.py").read_text(encoding="utf-8")
        if os.path.lexists(self.file):
            raise UsageError(f"{self.file} exists already: choose another name")
        prepare_folder(self.file.parent)
        write_atomically(self.file, text)
        named = shlex.quote(str(self.file))
        say(Console(), f"wrote {self.file}; `muonsw task check {named}`, then `muonsw compare --task {named}`")
        return 0


@dataclass(frozen=True)
class TaskCommand:
    """Check a task of your own, or write a file to begin with."""

    action: Annotated[
        Annotated[Check, subcommand("check", prefix_name=False)] | Annotated[New, subcommand("new", prefix_name=False)],
        arg(name=""),
    ]

    def run(self) -> int:
        return self.action.run()
