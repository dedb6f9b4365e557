"""`muonsw train`: train a preset, or a config file, and continue where an earlier run stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from muonsw.decay import DECAY_RULES
from muonsw.lab.arms import refuse_too_much_decay
from muonsw.lab.commands.data import describe
from muonsw.lab.commands.shared import changed, given
from muonsw.lab.commands.task import TASK_HELP, TaskOptions, introduce, refuse_with_task
from muonsw.lab.console import harmless, say, showing
from muonsw.lab.errors import FAILED, OK, Diverged, Interrupted, UsageError, report_error
from muonsw.lab.files import require_writable
from muonsw.lab.train.checkpoint import read_config_file
from muonsw.lab.train.config import RunConfig, changed_run, with_data
from muonsw.lab.train.loop import Watch, train
from muonsw.lab.train.ranks import joined, known_to_all, speaker
from muonsw.lab.train.records import numbers_of, require_sinks
from muonsw.lab.train.state import Training, resolve_device
from muonsw.text import counted

WITH_CONFIG = ("--config", "--out", "--strategy")
NAME = "training"
# Dense bfloat16 TFLOP/s by a part of the device's name, from the makers' data sheets.
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0, "L40S": 362.0, "4090": 165.0}


@dataclass(frozen=True)
class Changes:
    """Settings of the optimizer, instead of the preset's."""

    algorithm: str | None = None
    """muon (with AdamW for everything but hidden matrices) or adamw."""
    lr: float | None = None
    """Peak learning rate, before muP multiplies it."""
    weight_decay: float | None = None
    """Lambda."""
    decay: Annotated[str | None, arg(help=f"Decay rule: {', '.join(DECAY_RULES)}.")] = None
    muon_lr: str | None = None
    """How muP scales Muon's learning rate with the width: adam, sqrt or none."""
    peak: str | None = None
    """What scaled decay divides by: group for the group's own peak, base for the base peak."""


@dataclass(frozen=True)
class Train:
    """Train a model; rerun the same command to resume.

    Exits with 0 when the run is complete, 1 when it diverged, 130 or 143 when it was stopped and saved.
    """

    preset: str = "demo"
    """Model and recipe: demo, mini, w128, w256, w512, w768, w1024, each also with -dense."""
    task: Annotated[str | None, arg(metavar="FILE", help=TASK_HELP)] = None
    data: Annotated[Path | None, arg(metavar="DIR")] = None
    """Prepared tokens; without them and without --text, the Python standard library is prepared in out/data."""
    text: Annotated[tuple[str, ...], arg(metavar="PATH")] = ()
    """Your own text instead: files, folders or quoted globs (.txt, .md, .jsonl, .parquet); prepared in out/data."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder of the run; default out/train/ with the name of the preset, the task or the config."""
    config: Annotated[Path | None, arg(metavar="FILE")] = None
    """A complete config file, such as a run's config.json, instead of all other settings but --out and --strategy; a
    task that it names is executed as you."""
    steps: int | None = None
    """Steps, instead of the preset's; without --lr the peak learning rate follows the horizon rule."""
    batch: int | None = None
    """Sequences in a step, instead of the preset's; a task says itself how large its batches are."""
    accumulation: int | None = None
    """Micro-batches a step is cut into, for less memory."""
    checkpoint_every: Annotated[int | None, arg(metavar="N")] = None
    """Steps between checkpoints, instead of the preset's; a run is also saved every three minutes."""
    telemetry_every: Annotated[int | None, arg(metavar="N")] = None
    """Steps between samples of norms, updates and alignments, instead of the preset's; 0 takes none."""
    seed: int = 0
    """Seed of the initial weights and the order of the data."""
    device: str = "auto"
    """cpu, cuda or auto."""
    precision: str | None = None
    """float32, bfloat16 (autocast), or auto for bfloat16 on a GPU."""
    strategy: Literal["ddp", "fsdp"] | None = None
    """How ranks of torchrun share the work: ddp (unless given) keeps the model on each, fsdp divides it."""
    tensorboard: FlagCreatePairsOff[bool] = False
    """Also write TensorBoard events into the run's folder."""
    wandb: str = ""
    """Also log to this Weights & Biases project."""
    own: OmitArgPrefixes[TaskOptions] = field(default_factory=TaskOptions)
    """For a task of your own."""
    optimizer: OmitArgPrefixes[Changes] = field(default_factory=Changes)

    def run(self) -> int:
        names = ("batch", "accumulation", "checkpoint_every", "telemetry_every", "precision")
        changes = given(self, *names, "seed", "device", "tensorboard", "wandb")
        optimizer = given(self.optimizer, *vars(self.optimizer))
        if self.task is not None:
            refuse_with_task(self, "--preset", "--data", "--text", "--config", "--batch")
            folder = self.out or Path("out/train") / Path(self.task).stem
            config, checked = self.own.run_config(self.task, [folder], **changes, **optimizer, **given(self, "steps"))
            if speaker() is None:
                introduce(Console(), config, checked)
            return run(self._divided(config), folder)
        self.own.refuse_without_task()
        for option in changed(self) if self.config else ():
            if option not in WITH_CONFIG:
                raise UsageError(f"{option} does not go with --config, whose file has all settings: change it there")
        folder = self.out or Path("out/train") / (self.config.stem if self.config else self.preset)
        require_writable(folder)
        if self.config:
            return run(self._divided(read_config_file(self.config)), folder)
        config = changed_run(self.preset, self.steps, optimizer, **changes)
        # Everything is checked before tokens are prepared, which may take long.
        refuse_too_much_decay(config, config.optimizer)
        resolve_device(config.device)
        require_sinks(config)
        config = with_data(config, self.data, self.text)
        if self.text and speaker() is None:
            say(Console(), describe(Path(config.tokens.path)))
        return run(self._divided(config), folder)

    def _divided(self, config: RunConfig) -> RunConfig:
        if self.strategy is None:
            return config
        return replace(config, parallel=replace(config.parallel, strategy=self.strategy))


def run(config: RunConfig, folder: Path) -> int:
    """Train on all ranks that were started, with progress on the console of the first; print how it ended."""
    console = Console()
    try:
        with joined(config.parallel.timeout) as world, watching(console) if world.leads else nullcontext() as watch:
            result = train(config, folder, watch, world)
    except (Diverged, Interrupted, UsageError) as error:
        # Rank 0 alone reports what all ranks know.
        rank = speaker()
        report_error(f"muonsw: {harmless(error)}")
        if rank is None or not known_to_all(error):
            print(f"muonsw: {rank or ''}{harmless(error)}", file=sys.stderr)
        return FAILED if isinstance(error, Diverged) else error.exit_code
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
    steps, unit, share_of_peak = 0, "", 0.0
    with showing(console, {NAME: None}) as view:

        def started(training: Training) -> None:
            nonlocal steps, unit, share_of_peak
            task, device = training.task, training.device
            steps, unit = training.config.steps, task.unit
            if device.type == "cuda" and task.flops:
                name = torch.cuda.get_device_name(device)
                peak = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
                # What one token a second is of the peak of all ranks' devices.
                share_of_peak = task.flops / (training.world.size * peak * 1e12) if peak else 0.0
            parameters = sum(parameter.numel() for parameter in training.model.parameters())
            size = f"{counted(steps, 'step')} of {task.per_step:,} {unit}, {task.data(steps)}"
            view.say(f"{parameters:,} parameters, {size}, on {device}")
            order = ("step", "loss", "validation", "weight RMS", f"{unit}/s", "MFU")
            view.update(NAME, training.step, dict.fromkeys(order, ""), total=steps)

        def record(record: dict[str, Any]) -> None:
            numbers = numbers_of(record, steps)
            if record["kind"] == "eval":
                metrics = [name for name in record if name not in ("kind", "step", "loss")]
                more = "".join(f", {name} {record[name]:.4g}" for name in metrics)
                view.log(f"step {record['step']:,} of {steps:,}: validation {numbers['validation']}{more}")
            if speed := record.get(f"{unit}_per_second"):
                numbers[f"{unit}/s"] = f"{speed:,.0f}"
                if share_of_peak:
                    numbers["MFU"] = f"{100 * share_of_peak * speed:.1f}%"
            view.update(NAME, record["step"] if record["kind"] == "train" else None, numbers)

        yield Watch(started=started, record=record, note=view.say)
