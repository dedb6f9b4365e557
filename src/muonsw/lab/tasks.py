"""What can be trained: the paper's decoder on tokens, or the functions of a user's file (see `task_template.py`).

The generators of torch, numpy and Python are seeded before each call of a user's `model` and each batch, so their
numbers depend only on the seed and the step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import random
import reprlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from muonsw.lab.data.loader import TokenBatch, TokenLoader, ValidationLoader, open_split, read_record
from muonsw.lab.data.loader import fingerprint as token_fingerprint
from muonsw.lab.errors import Ending, UsageError
from muonsw.lab.model import Decoder, Losses, ModelConfig
from muonsw.lab.model.layers import MoE
from muonsw.registry import unknown
from muonsw.text import counted

Batch: TypeAlias = Any  # whatever the loss takes: tensors in tuples, lists and dicts
# A NamedTuple of scalars: `total` is minimised, and all are recorded.
LossParts: TypeAlias = Any

# The functions of a user's file with the arguments that the lab passes. All further arguments are options.
CALLS = {
    "model": ("seed",),
    "batches": ("split", "seed"),
    "loss": ("model", "batch"),
    "metrics": ("model", "batch"),
    "patterns": ("model", "weight_decay"),
}
OPTIONAL = ("metrics", "patterns")
TRAIN: Final = "train"
VALIDATION: Final = "validation"
# All seeds validate on the same batches.
VALIDATION_SEED, EVAL_BATCHES = 0, 16
# Keys of an evaluation record, which metrics cannot use as names.
RESERVED = ("kind", "step", "loss")


@dataclass(frozen=True)
class DataConfig:
    """The tokens to train and validate on."""

    path: str  # a folder that `muonsw data prepare` filled
    # A hash of all tokens. None accepts any; the run then records the hash and requires it when it resumes.
    fingerprint: str | None = None
    eval_windows: int | None = 256  # validation windows, the same for every run; None for all
    # Train only on the first windows, as if there were no more text; None for all.
    train_windows: int | None = None

    def __post_init__(self) -> None:
        for name in ("train_windows", "eval_windows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class TaskConfig:
    RETIRED: ClassVar[Mapping[str, Any]] = {"eval_batches": None}
    path: str  # a Python file
    options: tuple[str, ...] = ()  # options that differ from their defaults, as `name=value`
    # A hash of the file. None accepts any; the run then records the hash and requires it when it resumes.
    fingerprint: str | None = None

    @property
    def name(self) -> str:
        return Path(self.path).name


class Task(ABC):
    """What the training loop needs: a model, batches as a function of seed and step, a loss, an evaluation."""

    unit: ClassVar[str] = "samples"  # what `per_step` counts
    per_step: int  # units in a step

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model with its initial weights."""

    def computing_loss(self, model: nn.Module) -> nn.Module:
        """A module whose forward pass is the loss of a batch; it is what gets replicated, sharded and compiled."""
        return model

    def patterns(self, model: nn.Module, weight_decay: float) -> Mapping[str, dict[str, Any]]:  # noqa: ARG002
        """Optimizer options by parameter name or role, as in `MuonSW.for_model`."""
        return {}

    def join_ranks(self, model: nn.Module, ranks: int) -> None:  # noqa: B027
        """Let the model average over the batches of all ranks."""

    def loss(self, forward: Callable[..., Any], batch: Batch) -> LossParts:
        """The loss of a batch and its parts; `forward` is the result of `computing_loss`, perhaps compiled."""
        return forward(batch)

    def evaluation(self, forward: Callable[..., Any], batch: Batch) -> Mapping[str, Tensor]:
        """Measurements on a validation batch, `loss` first, each a mean over its rows."""
        measured: Mapping[str, Tensor] = forward(batch, measured=True)
        return measured

    @abstractmethod
    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[Batch]:
        """One rank's part of a step, counted from 0. The data of a step do not depend on how it is divided."""

    @abstractmethod
    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[Batch, int]]:
        """One rank's validation batches, each with the number of rows to count; every rank gets equally many."""

    def epochs(self, steps: int) -> float | None:  # noqa: ARG002
        return None

    @abstractmethod
    def data(self, steps: int) -> str:
        """Describe the data of this many steps."""


class DecoderTask(Task):
    """A decoder that predicts the next token; it evaluates `micro` sequences at once."""

    unit: ClassVar[str] = "tokens"

    def __init__(self, model: ModelConfig, data: DataConfig, *, batch: int, micro: int, seed: int) -> None:
        self.config, self.path = model, data.path
        self.per_step = batch * model.sequence
        train, held_out = open_split(Path(data.path), TRAIN), open_split(Path(data.path), VALIDATION)
        self.loader = TokenLoader(train, model.sequence, batch, seed, data.train_windows)
        self.held_out = ValidationLoader(held_out, model.sequence, micro, data.eval_windows)

    def model(self, seed: int) -> Decoder:
        return Decoder(self.config, seed=seed)

    def join_ranks(self, model: nn.Module, ranks: int) -> None:
        """Let routers balance load over the micro-batches of all ranks, as a single rank would."""

        def mean(share: Tensor) -> Tensor:
            dist.all_reduce(share)
            return share / ranks

        for module in model.modules():
            if isinstance(module, MoE):
                module.over_ranks = mean

    def loss(self, forward: Callable[..., Any], batch: TokenBatch) -> Losses:
        losses: Losses = forward(*batch)
        return losses

    def evaluation(self, forward: Callable[..., Any], batch: TokenBatch) -> Mapping[str, Tensor]:
        """The cross-entropy without the balancing losses."""
        return {"loss": forward(*batch).cross_entropy}

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[TokenBatch]:
        return self.loader.micro_batches(step, ranks=ranks, rank=rank, accumulation=accumulation)

    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[TokenBatch, int]]:
        return self.held_out.parts(ranks=ranks, rank=rank)

    def epochs(self, steps: int) -> float:
        return steps * self.loader.batch / self.loader.size

    def data(self, steps: int) -> str:
        return f"{self.epochs(steps):.2f} epochs of {self.path}"


def with_tokens(data: DataConfig, model: ModelConfig) -> DataConfig:
    """The data with the hash of its tokens; refuse tokens other than the config's, and too large a vocabulary."""
    record = read_record(Path(data.path))
    if record.vocab_size > model.vocab:
        size = f"{data.path} has a vocabulary of {record.vocab_size} tokens"
        raise UsageError(f"{size}, more than model.vocab={model.vocab}: raise model.vocab")
    current = token_fingerprint(record)
    if data.fingerprint not in (None, current):
        other = f"{data.path} holds other tokens ({current}) than this run was started on ({data.fingerprint})"
        raise UsageError(f"{other}: give the original tokens with --data, or choose another folder for the run")
    return replace(data, fingerprint=current)


class Functions(NamedTuple):
    """The functions of a user's file with their options set."""

    name: str  # of the file
    settings: Any  # its `SETTINGS`
    calls: Mapping[str, Callable[..., Any]]  # by name; optional functions may be missing


@contextmanager
def naming_lines(task: TaskConfig | None) -> Iterator[None]:
    """Turn an error in the code of a task's file into a `UsageError` that names the line."""
    try:
        yield
    except Ending:
        raise
    except (Exception, SystemExit) as error:
        file = None if task is None else str(Path(task.path).resolve())
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if task is None or not frames:
            raise
        place = f"{task.name}, line {frames[-1].lineno}, in {frames[-1].name}"
        raise UsageError(f"{place}: {type(error).__name__}: {error}") from error


def load_functions(config: TaskConfig) -> Functions:
    """Import a task's file, once per process, and set the options."""
    file = _file(config.path)
    module = _module(file, file.stat().st_mtime_ns)
    functions: dict[str, Callable[..., Any]] = {}
    defaults: dict[str, dict[str, Any]] = {}  # by function, its options
    for name, arguments in CALLS.items():
        function = getattr(module, name, None)
        if callable(function):
            try:
                inspect.signature(function).bind(*arguments)
            except TypeError as error:
                call = f"{name}({', '.join(arguments)})"
                raise UsageError(f"{config.name} cannot be called as {call}: {error}") from error
            extra = list(inspect.signature(function).parameters.values())[len(arguments) :]
            defaults[name] = {option.name: option.default for option in extra if option.default is not option.empty}
            functions[name] = function
        elif function is not None or name not in OPTIONAL:
            call = f"{name}({', '.join(arguments)})"
            raise UsageError(f"{config.name} has no {call}; `muonsw task new FILE` writes a complete example")

    known = {option: default for options in defaults.values() for option, default in options.items()}
    chosen = {}
    for text in config.options:
        option, equals, value = text.partition("=")
        if option not in known or not equals:
            hint = "an option is an argument with a default: def model(seed, depth=6) takes --task.depth 8"
            raise UsageError(f"{config.name}: {unknown('option', option, list(known))}; {hint}")
        chosen[option] = convert(value, known[option], f"--task.{option}")
    for name, options in defaults.items():
        functions[name] = partial(functions[name], **{key: chosen[key] for key in options.keys() & chosen})
    return Functions(config.name, getattr(module, "SETTINGS", {}), functions)


def convert(text: str, default: Any, name: str) -> Any:
    """Parse an option as the type of its default, or as text if that is None.

    Examples:
        >>> convert("6", 1, "--task.depth"), convert("false", True, "--task.flip"), convert("a.wav", None, "x")
        (6, False, 'a.wav')
    """
    kind = str if default is None else type(default)
    if kind not in (bool, int, float, str):
        raise UsageError(f"{name} has a default of type {kind.__name__}; options are bool, int, float or str")
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{name} must be of type {kind.__name__}, not {text!r}") from error


def _file(path: str) -> Path:
    if not (path.endswith(".py") and Path(path).is_file() and os.access(path, os.R_OK)):
        write = "`muonsw task new FILE.py`"
        raise UsageError(f"there is no task file {path} that can be read: check the path, or write one with {write}")
    return Path(path).resolve()


@cache
def _module(file: Path, modified: int) -> ModuleType:
    """Import a file under a unique name; it can import files from its folder."""
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = f"muonsw_task_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{modified}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def with_file(task: TaskConfig) -> TaskConfig:
    """The task with the hash of its file, but not of files it imports; refuse a changed file without running it."""
    current = hashlib.sha256(_file(task.path).read_bytes()).hexdigest()[:16]
    if task.fingerprint not in (None, current):
        other = f"{task.path} has changed since this run was started ({current}, not {task.fingerprint})"
        raise UsageError(f"{other}: put it back, or choose another folder")
    return replace(task, fingerprint=current)


class Loss(NamedTuple):
    total: Tensor


class LossModule(nn.Module):
    """The loss as a module, so that DDP wraps it and the user's functions see the bare model."""

    def __init__(self, model: nn.Module, functions: Functions) -> None:
        super().__init__()
        self.model, self.functions = model, functions

    def forward(self, batch: Batch, *, measured: bool = False) -> Loss | Mapping[str, Tensor]:
        """The loss of a batch; with `measured`, the loss and the metrics by name."""
        calls = self.functions.calls
        loss = calls["loss"](self.model, batch)
        if not measured:
            return Loss(loss)
        return {"loss": loss, **(calls["metrics"](self.model, batch) if "metrics" in calls else {})}


class UserTask(Task):
    """The task of a user's file, in batches of `batch` rows."""

    def __init__(self, config: TaskConfig, *, batch: int, seed: int) -> None:
        self.config, self.per_step = config, batch
        self.functions = load_functions(config)
        self.train = BatchSource(self.functions, TRAIN, seed)
        self.held_out = BatchSource(self.functions, VALIDATION, VALIDATION_SEED)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)  # on every device
        seed_generators(seed, "model")
        model: nn.Module = self.functions.calls["model"](seed)
        return model

    def patterns(self, model: nn.Module, weight_decay: float) -> Mapping[str, dict[str, Any]]:
        if "patterns" not in self.functions.calls:
            return {}
        patterns: Mapping[str, dict[str, Any]] = self.functions.calls["patterns"](model, weight_decay)
        return patterns

    def computing_loss(self, model: nn.Module) -> nn.Module:
        return LossModule(model, self.functions)

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[Batch]:
        batch, parts = self.train.batch(step), ranks * accumulation
        seed_generators(self.train.seed, "update", step, rank, host_only=True)  # checkpoints hold torch's
        rows, left = divmod(rows_of(batch), parts)
        if left:
            split = f"{ranks} ranks x {accumulation} micro-batches"
            raise UsageError(f"{self.config.name}: batch {step} has {rows_of(batch)} rows, not a multiple of {split}")

        def part(micro: int) -> Batch:
            """A slice of the batch; tensors of another length stay as they are."""
            start = rows * (ranks * micro + rank)
            return map_tensors(lambda x: x[start : start + rows] if x.shape[:1] == (rows * parts,) else x, batch)

        return iter([batch]) if parts == 1 else map(part, range(accumulation))

    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[Batch, int]]:
        number = -1
        for number, batch in enumerate(self.held_out.for_validation()):
            if number % ranks == rank:
                yield batch, rows_of(batch)
        if number < 0:
            raise UsageError(f"{self.config.name}: batches({VALIDATION!r}, {VALIDATION_SEED}) has no batch")
        if number % ranks < rank:  # all ranks must take part in the forward pass of a sharded model
            yield batch, 0

    def data(self, steps: int) -> str:
        options = "".join(f" --task.{option.replace('=', ' ', 1)}" for option in self.config.options)
        return f"{steps * self.per_step:,} samples of {self.config.name}{options}"


class BatchSource:
    """The batches of a split by number, whatever `batches(split, seed)` returned."""

    def __init__(self, functions: Functions, split: str, seed: int) -> None:
        self.functions, self.split, self.seed = functions, split, seed
        self._call = f"{functions.name}: batches({split!r}, {seed})"
        source, length = self._make(), None
        with suppress(TypeError, NotImplementedError):  # a DataLoader over data without a length
            length = len(source)
        self._length: int | None = length
        # A function of the number, or None if batches must be iterated over.
        self._numbered: Callable[[int], Batch] | None = source if callable(source) else None
        if length and hasattr(source, "__getitem__"):
            self._numbered = lambda number: source[number % length]
        # The current iterator, the number of its next batch, and the last batch that it gave.
        self._iterator: Iterator[Batch] | None = None
        self._next, self._last = 0, None

    def batch(self, number: int) -> Batch:
        """Batch `number`; after the last one, sequences and iterables start over."""
        if self._numbered is not None:
            with generators_seeded(self.seed, self.split, number):
                return self._numbered(number)
        # An iterator that is past the batch starts over and skips to it.
        if self._iterator is None or number < self._next - 1:
            self._iterator, self._next = _endless(self._make(), self._call), 0
        while self._next <= number:
            with generators_seeded(self.seed, self.split, self._next):
                self._last = next(self._iterator)
            self._next += 1
        return self._last

    def for_validation(self) -> Iterator[Batch]:
        """All batches if the source has a length, else the first 16, without repeats."""
        limit = self._length or EVAL_BATCHES
        batches = map(self._numbered, range(limit)) if self._numbered else iter(self._make())
        for number in range(limit):
            with generators_seeded(self.seed, self.split, number):
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _make(self) -> Any:
        with generators_seeded(self.seed, self.split):
            source = self.functions.calls["batches"](self.split, self.seed)
        empty = isinstance(source, Sequence) and not source
        if empty or isinstance(source, Dataset) or not (callable(source) or isinstance(source, Iterable)):
            kinds = "a function of i, or batches in a sequence or an iterable: a Dataset needs a DataLoader around it"
            raise UsageError(f"{self._call} returned {reprlib.repr(source)}; expected {kinds}")
        return source


def _endless(source: Iterable[Batch], call: str) -> Iterator[Batch]:
    """Repeat batches endlessly.

    Not a method: a reference cycle would keep the iterator alive, and with it a DataLoader's workers.
    """
    number, before = 0, -1
    while number > before:
        before = number
        for batch in source:
            number += 1
            yield batch
    fix = "yield batches endlessly, or return something that can be iterated over again"
    raise UsageError(f"{call} ended after {counted(number, 'batch', 'batches')}: {fix}")


def seed_generators(*key: object, host_only: bool = False) -> None:
    """Seed the generators of torch, numpy and Python with a hash of the key; `host_only` skips torch's."""
    number = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")
    if not host_only:
        torch.default_generator.manual_seed(number >> 1)  # GPU generators, used by dropout, stay as they are
    np.random.seed(number % (1 << 32))
    random.seed(number)


@contextmanager
def generators_seeded(*key: object) -> Iterator[None]:
    """Seed the generators for the block, then restore them."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_generators(*key)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@dataclass(frozen=True)
class Checked:
    """The result of `check_task`."""

    rows: int  # in a batch
    batch: str  # shapes and dtypes
    loss: float  # of the first batch, before any step
    metrics: Mapping[str, float]  # of the first validation batch
    settings: Mapping[str, Any]  # the file's `SETTINGS`
    notes: tuple[str, ...]  # warnings, such as unseeded randomness or parameters without gradients


def check_task(config: TaskConfig, seed: int = 0) -> Checked:
    """Call every function of a task before training; an error names the line, or the function's unusable result."""
    with naming_lines(config):
        return _check_task(config, seed)


def _check_task(config: TaskConfig, seed: int) -> Checked:
    functions = load_functions(config)
    settings, notes = functions.settings, []
    if not isinstance(settings, Mapping):
        kind = type(settings).__name__
        raise UsageError(f"{config.name}: SETTINGS is {kind} {settings!r}; make it a dict such as {{'lr': 0.003}}")

    train, again = (BatchSource(functions, TRAIN, seed) for _ in range(2))
    batch = train.batch(0)
    validation = next(BatchSource(functions, VALIDATION, VALIDATION_SEED).for_validation(), None)
    for split, first in ((TRAIN, batch), (VALIDATION, validation)):
        if not tensors_of(first):
            call = f"{config.name}: the first batch of batches({split!r}, seed)"
            raise UsageError(f"{call} is {reprlib.repr(first)}; expected tensors, alone or in tuples, lists and dicts")
    if not all(same(train.batch(number), again.batch(number)) for number in (0, 3)):
        notes.append(
            "batches are not a function of (seed, i): drawing them again gave different ones. Arms will see different "
            "batches, and so will a resumed run; draw from torch's generators, or from one seeded with (seed, i)"
        )
    if same(batch, validation):
        notes.append(
            "the first batches of 'train' and 'validation' are the same: validation would not be on unseen data"
        )

    model = _checked_model(functions, seed)
    if not same(model.state_dict(), _checked_model(functions, seed).state_dict()):
        notes.append(
            "model(seed) gives different weights each time, so arms do not start equal; draw from torch's generators"
        )
    loss = _checked_loss(functions, model, batch, TRAIN, seed)
    loss.backward()  # type: ignore[no-untyped-call]
    idle = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if idle:
        few = f"{counted(len(idle), 'parameter')} ({', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''})"
        notes.append(f"the loss does not depend on {few}: freeze what is not trained")

    model.eval()
    metrics: Any = {}
    _checked_loss(functions, model, validation, VALIDATION, seed)
    if "metrics" in functions.calls:
        with torch.no_grad(), generators_seeded(seed, "metrics"):
            metrics = functions.calls["metrics"](model, map_tensors(Tensor.clone, validation))
    numbers = isinstance(metrics, Mapping) and all(isinstance(v, int | float | Tensor) for v in metrics.values())
    if not numbers or any(name in RESERVED for name in metrics):
        expected = f"a dict of numbers such as {{'accuracy': 0.5}}, under names other than {', '.join(RESERVED)}"
        raise UsageError(f"{config.name}: metrics(model, batch) returned {reprlib.repr(metrics)}; expected {expected}")
    measured = {name: float(value) for name, value in metrics.items()}
    return Checked(rows_of(batch), describe(batch), float(loss.detach()), measured, dict(settings), tuple(notes))


def _checked_model(functions: Functions, seed: int) -> nn.Module:
    with generators_seeded(seed, "model"):
        model = functions.calls["model"](seed)
    call = f"{functions.name}: model(seed)"
    if not isinstance(model, nn.Module):
        raise UsageError(f"{call} returned {reprlib.repr(model)}; expected an nn.Module")
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained or not all(param.device.type == "cpu" for param in trained):
        raise UsageError(f"{call} returned a {type(model).__name__} with no trainable parameters on the CPU")
    for name, value in model.state_dict().items():
        try:
            save({name: value.new_empty(0)})  # as checkpoints will
        except Exception as error:
            remedy = "checkpoints can only save dense tensors; persistent=False leaves a buffer out"
            raise UsageError(f"{call}: {name} of its state_dict cannot be saved ({error}): {remedy}") from error
    return model


def _checked_loss(functions: Functions, model: nn.Module, batch: Batch, split: str, seed: int) -> Tensor:
    learning = split == TRAIN
    with generators_seeded(seed, "loss"), torch.set_grad_enabled(learning):
        loss = functions.calls["loss"](model, map_tensors(Tensor.clone, batch))
    if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad >= learning and bool(loss.isfinite()):
        return loss
    text = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else reprlib.repr(loss)
    expected = "expected a finite scalar tensor with a gradient, such as cross_entropy(...)"
    call = f"{functions.name}: loss(model, batch) returned {text} for the first batch of {split!r}"
    raise UsageError(f"{call}; {expected}")


def describe(batch: Batch) -> str:
    """Shapes and dtypes of a batch, as in '64x1x8x8 float32, 64 int64'."""
    texts = []
    for tensor in tensors_of(batch):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        texts.append(f"{shape} {str(tensor.dtype).removeprefix('torch.')}")
    return ", ".join(texts)


def same(batch: Batch, other: Batch) -> bool:
    first, second = tensors_of(batch), tensors_of(other)
    return len(first) == len(second) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply a function to every tensor of a batch, and keep everything else."""

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Mapping):  # a kind that torch does not know, such as a BatchEncoding
            return type(leaf)(map_tensors(function, dict(leaf)))  # type: ignore[call-arg]
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(visit, batch)


def tensors_of(batch: Batch) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: (tensors.append(tensor), tensor)[1], batch)  # type: ignore[func-returns-value]
    return tensors


def rows_of(batch: Batch) -> int:
    """The length of the first tensor with at least one axis; 1 if there is none."""
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()), 1)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device, without waiting for the copy."""

    def send(tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cuda" else tensor.pin_memory().to(device, non_blocking=True)

    return map_tensors(send, batch) if device.type == "cuda" else batch
