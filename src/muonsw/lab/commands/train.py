"""`muonsw train`: train a preset, or a config file, and continue where an earlier run stopped."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from muonsw.decay import DECAY_RULES
from muonsw.lab.arms import refuse_too_much_decay
from muonsw.lab.commands.data import describe
from muonsw.lab.commands.shared import changed, given
from muonsw.lab.commands.task import TASK_HELP, TaskOptions, introduce, refuse_with_task
from muonsw.lab.console import say
from muonsw.lab.errors import UsageError
from muonsw.lab.files import require_writable
from muonsw.lab.run import run
from muonsw.lab.train.checkpoint import read_config_file
from muonsw.lab.train.config import RunConfig, changed_run, require_enough_text, with_data
from muonsw.lab.train.ranks import speaker
from muonsw.lab.train.records import require_sinks
from muonsw.lab.train.state import resolve_device

WITH_CONFIG = ("--config", "--out", "--strategy")


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
        if self.text:
            if speaker() is None:
                say(Console(), describe(Path(config.tokens.path)))
            require_enough_text(config)
        return run(self._divided(config), folder)

    def _divided(self, config: RunConfig) -> RunConfig:
        if self.strategy is None:
            return config
        return replace(config, parallel=replace(config.parallel, strategy=self.strategy))
