"""The settings of a run, and the presets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from muonsw.addons.norm_rules import FREE, NORM_RULES
from muonsw.decay import DECAY_RULES
from muonsw.lab.config import as_data, from_data, require, require_choices
from muonsw.lab.data.loader import read_record
from muonsw.lab.data.prepare import Corpus, matching_files, prepare_corpus
from muonsw.lab.errors import UsageError
from muonsw.lab.model import MUON_LR_POWERS, ModelConfig, preset
from muonsw.lab.paper import PAPER_BATCH_TOKENS, ROWS
from muonsw.lab.tasks import Checked, DataConfig, TaskConfig, with_tokens
from muonsw.lab.theory.schedule import peak_lr_for_horizon, schedule_of
from muonsw.orthogonalize import ORTHOGONALIZERS
from muonsw.precision import AUTO, DTYPES
from muonsw.presets import PRESETS
from muonsw.registry import unknown

VERSION = 1
LARGEST = 1 << 63
# Settings that an optimizer preset decides.
MUON_SETTINGS = ("momentum", "nesterov", "orthogonalizer")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its weight decay."""

    algorithm: str = "muon"  # "muon" for hidden and expert matrices with AdamW for the rest, or "adamw" for all
    preset: str = ""  # a name in `PRESETS`, which replaces Muon; empty is Muon with the settings below
    lr: float = 0.02  # peak learning rate before muP multiplies it
    weight_decay: float = 0.1  # lambda of hidden and expert matrices; embedding and norms have none
    decay: str = "scaled"  # decay rule
    # Decay rule of the matrices whose output is not normalized (queries, keys, values, gates and up projections);
    # empty is the same as `decay`. "constant" here with "scaled" above is AdamC.
    unnormalized: str = ""
    norm: str = FREE  # norm rule of the decayed weights
    target_norm: float | None = None  # target of the norm rule, as an RMS; None is each matrix's initial RMS
    momentum: float = 0.95  # Muon's beta
    nesterov: bool = True  # Nesterov momentum in Muon
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's betas
    adam_lr: float | None = None  # peak learning rate of the AdamW groups next to Muon; None is `lr`
    orthogonalizer: str = "newton_schulz"  # Muon's orthogonalizer
    ns_dtype: str = "auto"  # precision of its products; "auto" is bfloat16 if the hardware supports it
    # How muP scales Muon's learning rate with the width: "adam" as 1/width (the paper's), "sqrt", "none".
    muon_lr: str = "none"
    peak: str = "group"  # scaled decay divides by the peak of the "group", or by the "base" peak before muP
    # "adamw" without decay, or "muon" at the base learning rate with decay (the paper's codebase).
    router: str = "adamw"
    qkv: str = "split"  # whether Muon gets queries, keys and values "split" or "fused" in one matrix
    clip: float = 1.0  # largest global gradient norm; 0 does not clip

    def __post_init__(self) -> None:
        choices: dict[str, Sequence[str]] = {
            "algorithm": ("muon", "adamw"),
            "decay": tuple(DECAY_RULES),
            "unnormalized": ("", *DECAY_RULES),
            "norm": tuple(NORM_RULES),
            "orthogonalizer": tuple(ORTHOGONALIZERS),
            "muon_lr": tuple(MUON_LR_POWERS),
            "peak": ("group", "base"),
            "router": ("adamw", "muon"),
            "qkv": ("split", "fused"),
            "ns_dtype": (AUTO, *DTYPES),
        }
        require_choices(self, choices, "optimizer.")
        for name in ("lr", "weight_decay", "clip", "adam_lr", "target_norm"):
            if (value := getattr(self, name)) is not None:
                require(0 <= value < math.inf, f"optimizer.{name}", value, "finite and not negative")
        require(0.0 <= self.momentum < 1.0, "optimizer.momentum", self.momentum, "at least 0 and below 1")
        valid = [0.0 <= beta < 1.0 for beta in self.betas]
        require(valid == [True, True], "optimizer.betas", self.betas, "two numbers, at least 0 and below 1")
        if self.preset:
            PRESETS[self.preset]  # raises if the name is unknown
            for setting in fields(self):
                value = getattr(self, setting.name)
                if setting.name in ("algorithm", *MUON_SETTINGS) and value != setting.default:
                    decided = f"optimizer.preset={self.preset!r} decides {setting.name}"
                    raise ValueError(f"{decided}: leave optimizer.{setting.name}={value} out")

    @property
    def matrix_algorithm(self) -> str:
        """The algorithm of hidden and expert matrices, a name in `ALGORITHMS`."""
        return str(PRESETS[self.preset]["algorithm"]) if self.preset else self.algorithm


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the run, as a multiple of the peak."""

    RETIRED: ClassVar[Mapping[str, Any]] = {"warmup_shape": "linear"}
    shape: str = "cosine"  # "cosine", "wsd" (warmup, stable, decay) or "constant" (after warmup)
    warmup_steps: int | None = None  # None is the paper's rule, at most a tenth of the run
    final_fraction: float = 0.1  # final learning rate as a fraction of the peak
    decay_fraction: float = 0.2  # fraction of the run over which "wsd" decays

    def multiple(self, steps: int) -> Callable[[int], float]:
        """The multiple of the peak learning rate at each step of a run of this length."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return schedule_of(settings.pop("shape"), steps, **settings)


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks that torchrun starts share the work.

    A run may resume with other settings here and on another number of ranks; only the rounding of sums changes.
    """

    RETIRED: ClassVar[Mapping[str, Any]] = {"experts": "stack", "replicas": 1}
    # "ddp" replicates the model and divides Muon's work among the ranks; "fsdp" also shards weights, gradients and
    # optimizer state.
    strategy: str = "ddp"
    timeout: float = 600.0  # seconds that a rank waits for the others

    def __post_init__(self) -> None:
        require_choices(self, {"strategy": ("ddp", "fsdp")}, "parallel.")
        require(0 < self.timeout < math.inf, "parallel.timeout", self.timeout, "finite and positive")


@dataclass(frozen=True)
class RunConfig:
    # The decoder and its tokens, or None for a task. Code for decoders reads `decoder` and `tokens`.
    model: ModelConfig | None = None
    data: DataConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    steps: int = 1000
    batch: int = 8  # sequences in a step, or rows in a task's batch
    accumulation: int = 1  # micro-batches in a step
    seed: int = 0  # of the initial weights and the data order
    arm: str = ""  # the name of this run's arm in a comparison
    eval_every: int = 100  # steps between evaluations; the last step is always evaluated
    checkpoint_every: int = 500  # steps between checkpoints; the last step is always saved
    checkpoint_seconds: float = 180.0  # also save when the last checkpoint is this old; 0 never does
    keep: int = 2  # checkpoints to keep
    log_every: int = 1  # steps between training records
    telemetry_every: int = 10  # steps between telemetry samples, plus the first and the last step; 0: none
    device: str = "auto"  # "cpu", "cuda", or "auto" for a GPU if there is one
    precision: str = "auto"  # "float32", "bfloat16" (autocast over float32 weights), or "auto" for bfloat16 on a GPU
    weights: str = "float32"  # dtype of the parameters: "float32", or "bfloat16" with stochastic rounding
    compile: str = "auto"  # "on", "off", or "auto" for compiling the decoder on a GPU
    graphs: str = "auto"  # "on", "off", or "auto" for replaying small steps of the decoder on a GPU as CUDA graphs
    threads: int = 0  # CPU threads; 0 is torch's choice at the start, which a resumed run keeps
    diverged: float = 5.0  # stop when the training loss exceeds its minimum by this many nats
    skipped: int = 20  # stop after this many consecutive steps with non-finite gradients
    tensorboard: bool = False  # also write TensorBoard events into the run folder
    wandb: str = ""  # also log to this Weights & Biases project
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    task: TaskConfig | None = None  # trained instead of the decoder

    def __post_init__(self) -> None:
        for name in ("model", "data"):
            if (getattr(self, name) is None) != (self.task is not None):
                raise ValueError(f"setting {name} is missing" if self.task is None else f"a task has no {name}")
        counts = ("steps", "batch", "accumulation", "eval_every", "checkpoint_every", "keep", "log_every", "skipped")
        for name in counts:
            require(1 <= getattr(self, name) < LARGEST, name, getattr(self, name), "at least 1 and below 2**63")
        for name in ("seed", "telemetry_every", "threads"):
            require(0 <= getattr(self, name) < LARGEST, name, getattr(self, name), "at least 0 and below 2**63")
        require(self.diverged > 0, "diverged", self.diverged, "positive")
        seconds = self.checkpoint_seconds
        require(0 <= seconds < math.inf, "checkpoint_seconds", seconds, "finite and not negative")
        choices = {"precision": ("auto", "float32", "bfloat16"), "weights": ("float32", "bfloat16")}
        require_choices(self, {**choices, **dict.fromkeys(("compile", "graphs"), ("auto", "on", "off"))})
        if self.batch % self.accumulation:
            raise ValueError(f"batch={self.batch} does not split into accumulation={self.accumulation} equal parts")
        self.schedule.multiple(self.steps)(0)  # raises if the schedule is invalid

    @property
    def decoder(self) -> ModelConfig:
        assert self.model is not None, "a task has no decoder"
        return self.model

    @property
    def tokens(self) -> DataConfig:
        assert self.data is not None, "a task has no tokens"
        return self.data

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.decoder.sequence

    def as_data(self) -> dict[str, Any]:
        """The run as JSON data, with the version of the format."""
        data = {"version": VERSION, **as_data(self)}
        if not self.optimizer.preset:  # so that runs older than presets keep their identity
            del data["optimizer"]["preset"]
        for name in ("task",) if self.task is None else ("model", "data"):
            del data[name]
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> RunConfig:
        """Read a run from JSON data; raise a `ValueError` if its version or a setting is wrong."""
        if data.get("version") != VERSION:
            raise ValueError(f"this file has settings of version {data.get('version')!r}, not {VERSION}")
        return from_data(cls, {key: value for key, value in data.items() if key != "version"})


DEFAULT_DATA = Path("out/data")


def _paper(steps: int, lr: float) -> dict[str, Any]:
    # The settings most likely used for the paper's numbers: see docs/reproducing.md.
    optimizer = OptimizerConfig(lr=lr, muon_lr="adam", peak="base", router="muon", qkv="fused")
    # Micro-batches fit the memory of one large GPU.
    return {"steps": steps, "batch": 256, "accumulation": 8, "optimizer": optimizer}


# Run settings by model preset; those in SHARED are the defaults.
SHARED: Mapping[str, Any] = {"eval_every": 250, "checkpoint_every": 1000, "telemetry_every": 50, "eval_windows": 512}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The paper has no run of width 128.
    "w128": _paper(5_000, 2.0e-2),
    **{f"w{width}": _paper(row.steps, row.peak_lr) for width, row in ROWS.items()},
    # lambda * lr * steps = 35, the paper's row at width 256, with the decay of a step at its cap of 0.01.
    "mini": {
        "steps": 3_500,
        "batch": 32,
        "optimizer": OptimizerConfig(weight_decay=0.5),
        "eval_every": 50,
        "eval_windows": 256,
    },
    # Trains in minutes: with the decay of a step at its cap of 0.02, lambda * lr * steps is 8.4. Products in float32
    # give the same result on every machine.
    "demo": {
        "steps": 420,
        "batch": 12,
        "optimizer": OptimizerConfig(weight_decay=1.0, ns_dtype="float32"),
        "eval_every": 42,
        "checkpoint_every": 42,
        "telemetry_every": 10,
        "eval_windows": 128,
    },
}


def preset_run(name: str, data: str) -> RunConfig:
    """The run of a preset on prepared tokens."""
    model = preset(name)  # raises for an unknown name
    settings = {**SHARED, **DEFAULTS[name]}
    return RunConfig(model, DataConfig(data, eval_windows=settings.pop("eval_windows")), **settings)


def changed_run(name: str, steps: int | None, optimizer: Mapping[str, Any], **changes: Any) -> RunConfig:
    """The run of a preset, without data, with changes; a new length sets the peak rate by the horizon rule.

    That rule counts steps of 524,288 tokens, whatever the batch of this run, and gives 0.02 below 5,000 of them.
    """
    try:
        run = replace(preset_run(name, ""), **changes)
        if steps is not None:
            horizon = max(1, round(steps * run.tokens_per_step / PAPER_BATCH_TOKENS))
            run = replace(run, steps=steps, optimizer=replace(run.optimizer, lr=peak_lr_for_horizon(horizon)))
        return replace(run, optimizer=replace(run.optimizer, **optimizer))
    except ValueError as error:
        raise UsageError(str(error)) from error


def with_data(run: RunConfig, data: Path | None, text: Sequence[str] = ()) -> RunConfig:
    """The run on a folder of tokens, with their vocabulary and fingerprint.

    Without a folder, prepare text files or else the Python standard library with a BPE of the model's vocabulary size.
    """
    if data is not None and text:
        raise UsageError(f"give --text or --data, not both: {data} holds tokens that were prepared before")
    vocab = run.decoder.vocab
    if text:
        # The folder's name depends on the paths and contents of the files.
        paths, digest = matching_files(text), hashlib.blake2b(digest_size=4)
        for path in paths:
            digest.update(f"{path.resolve()} {path.stat().st_size} ".encode("utf-8", "surrogateescape"))
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        letters = "".join(letter if letter.isalnum() else "-" for letter in paths[0].name.partition(".")[0])
        data = DEFAULT_DATA / f"{letters}-bpe{vocab}-{digest.hexdigest()}"
        prepare_corpus(data, Corpus("text", files=tuple(map(str, paths)), vocab=vocab))
    elif data is None:
        data = default_data(vocab)
    fitting = replace(run.decoder, vocab=read_record(data).padded_vocab)
    return replace(run, model=fitting, data=with_tokens(replace(run.tokens, path=str(data)), fitting))


def default_data(vocab: int) -> Path:
    """Prepare the Python standard library with a BPE of this size, unless it is prepared already."""
    folder = DEFAULT_DATA / f"python-bpe{vocab}"
    prepare_corpus(folder, Corpus(vocab=vocab))
    return folder


# Defaults for a user's task. Its losses may have any scale, so only a huge or non-finite loss counts as diverged.
TASK_DEFAULTS: Mapping[str, Any] = {"steps": 1000, "lr": 0.003, "weight_decay": 0.1, "diverged": 1e6}
NOT_FOR_TASKS = ("model", "data", "task", "optimizer", "schedule", "parallel", "batch", "seed", "arm")


def task_run(task: TaskConfig, checked: Checked, *, seed: int = 0, **settings: Any) -> RunConfig:
    """The run of a user's task with these settings, those in its file, and defaults, in this order of priority."""
    chosen = {**TASK_DEFAULTS, **checked.settings, **settings}
    parts: dict[type, dict[str, Any]] = {OptimizerConfig: {}, ScheduleConfig: {}, RunConfig: {}}
    names = {s.name: kind for kind in parts for s in fields(kind) if s.name not in NOT_FOR_TASKS}
    for name, value in chosen.items():
        if name not in names:
            raise UsageError(f"{task.name}: {unknown('setting in SETTINGS', name, list(names))}")
        parts[names[name]][name] = value
    try:
        steps = chosen["steps"] if isinstance(chosen["steps"], int) else 0  # from_data refuses anything else
        intervals = {"eval_every": steps // 20, "checkpoint_every": steps // 10, "telemetry_every": steps // 100}
        watching = {name: max(1, every) for name, every in intervals.items()} | parts[RunConfig]
        split = {"optimizer": parts[OptimizerConfig], "schedule": parts[ScheduleConfig], "task": as_data(task)}
        return from_data(RunConfig, {**watching, **split, "batch": checked.rows, "seed": seed})
    except (ValueError, TypeError) as error:
        raise UsageError(f"{task.name}: {error}") from error
