"""What can be trained: the paper's decoder on tokens, or the functions of a user's file (see `task_template.py`).

Torch's, numpy's and Python's generators are seeded before each batch and each model of a user's file, so code that
draws from them depends only on the seed and the step.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import random
import shlex
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import Dataset

from muonsw.lab.data.loader import TokenBatch, TokenLoader, ValidationLoader, open_split, read_record
from muonsw.lab.data.loader import fingerprint as token_fingerprint
from muonsw.lab.errors import UsageError
from muonsw.lab.model import Decoder, Losses, ModelConfig, count
from muonsw.lab.model.layers import MoE
from muonsw.registry import unknown
from muonsw.text import counted

Batch: TypeAlias = Any  # tensors in tuples, lists and dicts, as the loss wants them
# A NamedTuple of tensors: `total` is minimised; the other scalars, then the other tensors, are recorded.
LossParts: TypeAlias = Any

# The functions of a user's file and the arguments that the lab passes; further arguments are options.
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
# Every run is validated on the same batches, whatever its seed: 16 if the source has no length.
VALIDATION_SEED, EVAL_BATCHES = 0, 16
# Names that metrics cannot have: keys of an evaluation record.
RESERVED = ("kind", "step", "loss")


@dataclass(frozen=True)
class DataConfig:
    """The tokens to train and validate on."""

    path: str  # a folder that `muonsw data prepare` filled
    # A hash of all tokens; None takes the folder's, and a run records it and requires it.
    fingerprint: str | None = None
    eval_windows: int | None = 256  # validation windows, the same for every run; None reads all
    # Train only on the first windows, as if there were no more text; None takes all.
    train_windows: int | None = None

    def __post_init__(self) -> None:
        for name in ("train_windows", "eval_windows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class TaskConfig:
    """A task of the user's own."""

    path: str  # a Python file
    options: tuple[str, ...] = ()  # its options that differ from their defaults, as `name=value`
    # A hash of the file; None takes today's, and a run records it and requires it.
    fingerprint: str | None = None
    # Validation batches; None takes all of a list, and the first 16 of anything without a length.
    eval_batches: int | None = None

    def __post_init__(self) -> None:
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ValueError(f"task.eval_batches={self.eval_batches} must be at least 1")

    @property
    def name(self) -> str:
        return Path(self.path).name


class Task(ABC):
    """All that the training loop knows: a model, batches as a function of seed and step, a loss, an evaluation."""

    unit: ClassVar[str] = "samples"  # what a step consists of
    per_step: int  # units in a step
    flops: float = 0.0  # of training on one unit; 0 if unknown
    prefetches: bool = False  # whether another thread may draw batches

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model with its initial weights."""

    def computing_loss(self, model: nn.Module) -> nn.Module:
        """A module whose forward pass is the loss of a batch; it gets replicated, sharded and compiled."""
        return model

    def patterns(self, model: nn.Module, weight_decay: float) -> Mapping[str, dict[str, Any]]:  # noqa: ARG002
        """Options for parameters by name or role, as `MuonSW.for_model` takes them."""
        return {}

    def join_ranks(self, model: nn.Module, ranks: int) -> None:  # noqa: B027
        """Let a model average over the batches of all ranks."""

    def loss(self, forward: Callable[..., Any], batch: Batch) -> LossParts:
        """The loss of a batch and its parts; `forward` is `computing_loss`, perhaps replicated or compiled."""
        return forward(batch)

    def evaluation(self, forward: Callable[..., Any], batch: Batch) -> Mapping[str, Tensor]:
        """Measurements on a validation batch, `loss` first, each a mean over its rows."""
        measured: Mapping[str, Tensor] = forward(batch, measured=True)
        return measured

    @abstractmethod
    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[Batch]:
        """One rank's part of a step, counted from 0; how a step is divided does not change its data."""

    @abstractmethod
    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[Batch, int]]:
        """One rank's validation batches, each with the number of rows that count; equally many on every rank."""

    def blamed(self) -> AbstractContextManager[None]:
        """Turn errors of the user's code into messages that name it."""
        return nullcontext()

    def epochs(self, steps: int) -> float | None:  # noqa: ARG002
        return None

    def record(self, values: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """What to record of the parts of a loss that are not scalars, which come flattened."""
        return {}

    @abstractmethod
    def data(self, steps: int) -> str:
        """A description of the data of this number of steps."""


class DecoderTask(Task):
    """A decoder that learns to predict tokens; `micro` sequences are evaluated at once."""

    unit: ClassVar[str] = "tokens"
    prefetches = True

    def __init__(self, model: ModelConfig, data: DataConfig, *, batch: int, micro: int, seed: int) -> None:
        self.config, self.path = model, data.path
        self.per_step, self.flops = batch * model.sequence, count(model).flops_per_token
        train, held_out = open_split(Path(data.path), TRAIN), open_split(Path(data.path), VALIDATION)
        self.loader = TokenLoader(train, model.sequence, batch, seed, data.train_windows)
        self.held_out = ValidationLoader(held_out, model.sequence, micro, data.eval_windows)

    def model(self, seed: int) -> Decoder:
        return Decoder(self.config, seed=seed)

    def join_ranks(self, model: nn.Module, ranks: int) -> None:
        """Let routers balance the load over the micro-batch of all ranks, as one rank would."""

        def mean(share: Tensor) -> Tensor:
            dist.all_reduce(share)
            return share / ranks

        for module in model.modules():
            if isinstance(module, MoE) and self.config.balance_over == "batch":
                module.over_ranks = mean

    def loss(self, forward: Callable[..., Any], batch: TokenBatch) -> Losses:
        losses: Losses = forward(*batch)
        return losses

    def evaluation(self, forward: Callable[..., Any], batch: TokenBatch) -> Mapping[str, Tensor]:
        """The cross-entropy, without the losses that only balance experts."""
        return {"loss": forward(*batch).cross_entropy}

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[TokenBatch]:
        return self.loader.micro_batches(step, ranks=ranks, rank=rank, accumulation=accumulation)

    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[TokenBatch, int]]:
        """The same windows for every run on this data."""
        return self.held_out.parts(ranks=ranks, rank=rank)

    def epochs(self, steps: int) -> float:
        return self.loader.epochs(steps)

    def record(self, values: Tensor) -> dict[str, Any]:
        """The entropy of the experts' load in each layer, relative to an even one."""
        experts = self.config.experts
        if experts == 1:
            return {}
        entropy_L: Tensor = torch.special.entr(values.view(-1, experts)).sum(dim=1)
        return {"load_entropy": (entropy_L / math.log(experts)).tolist()}

    def data(self, steps: int) -> str:
        return f"{self.epochs(steps):.2f} epochs of {self.path}"


def with_tokens(data: DataConfig, model: ModelConfig) -> DataConfig:
    """The data with the hash of its tokens, after checking that model and data fit together.

    Raises:
        UsageError: If the folder holds different tokens from those in the config, or too large a vocabulary.
    """
    record = read_record(Path(data.path))
    if record.vocab_size > model.vocab:
        size = f"{data.path} has a vocabulary of {record.vocab_size} tokens"
        raise UsageError(f"{size}, more than model.vocab={model.vocab}: raise model.vocab")
    current = token_fingerprint(record)
    if data.fingerprint not in (None, current):
        other = (
            f"{data.path} holds different tokens ({current}) from those this run was started on ({data.fingerprint})"
        )
        raise UsageError(f"{other}: give those with --data, or choose another folder for the run")
    return replace(data, fingerprint=current)


@dataclass(frozen=True)
class Functions:
    """The functions of a user's file, with their options filled in."""

    module: ModuleType
    calls: Mapping[str, Callable[..., Any]]  # by name, without the optional ones that the file leaves out

    @property
    def name(self) -> str:
        return Path(str(self.module.__file__)).name

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Call a function; raise a `UsageError` with the line if it raises something."""
        with self.blamed(function):
            return self.calls[function](*arguments)

    @contextmanager
    def blamed(self, function: str | None = None) -> Iterator[None]:
        """Turn whatever the file's code raises into an error that names the function and the line.

        Without `function`, name the one in which the error arose, and leave errors of other code alone.
        """
        try:
            yield
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == self.module.__file__]
            if function is None and not frames:
                raise
            called = function or frames[0].name
            call = f"{called}({', '.join(CALLS.get(called, ()))})"
            line = f" (line {frames[-1].lineno})" if frames else ""
            raise UsageError(f"{self.name}: {call} raised {type(error).__name__}: {error}{line}") from error


def load_functions(config: TaskConfig) -> Functions:
    """Import a task's file, once in a process, and fill in the options that were set.

    Raises:
        UsageError: If it cannot be imported, lacks a function, or does not know an option.
    """
    module = _module(config.path)
    functions: dict[str, Callable[..., Any]] = {}
    defaults: dict[str, dict[str, Any]] = {}  # by function, its options
    for name, arguments in CALLS.items():
        function = getattr(module, name, None)
        if callable(function):
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
    calls = {
        name: partial(function, **{option: chosen[option] for option in defaults[name] if option in chosen})
        for name, function in functions.items()
    }
    return Functions(module, calls)


def convert(text: str, default: Any, name: str) -> Any:
    """Parse the text of an option as the type of its default; a default of None takes a number or a text.

    Examples:
        >>> convert("6", 1, "--task.depth"), convert("no", True, "--task.flip"), convert("1e-3", None, "x")
        (6, False, 0.001)
    """
    kind = type(default)
    if default is None:
        with suppress(ValueError):
            return float(text) if "." in text or "e" in text else int(text)
        return text
    if kind not in (bool, int, float, str):
        raise UsageError(f"{name} has a default of type {kind.__name__}; options are bool, int, float or str")
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    try:
        return words[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{name} must be of type {kind.__name__}, not {text!r}") from error


def _file(path: str) -> Path:
    if not path.endswith(".py"):
        raise UsageError(f"{path} is not a task: give a Python file, whose name ends in .py")
    if not Path(path).is_file():
        write = f"`muonsw task new {shlex.quote(path)}`"
        raise UsageError(f"there is no task file {path}: check the path, or write one with {write}")
    return Path(path).resolve()


def _module(path: str) -> ModuleType:
    """Import a file under a name that nothing else has; it can import files next to it."""
    file = _file(path)
    name = f"muonsw_task_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stat().st_mtime_ns}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the last of a script that runs when it is imported
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = f", line {lines[-1]}" if lines else ""
        raise UsageError(f"{path} cannot be imported{line}: {type(error).__name__}: {error}") from error
    return module


def with_file(task: TaskConfig) -> TaskConfig:
    """The task with the hash of its file, before any of it runs; files that it imports do not count.

    Raises:
        UsageError: If it is not the file that the run was started with.
    """
    try:
        current = hashlib.sha256(_file(task.path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise UsageError(f"{task.path} cannot be read: {error.strerror or error}") from error
    if task.fingerprint not in (None, current):
        other = f"{task.path} has changed since this run was started ({current}, not {task.fingerprint})"
        raise UsageError(f"{other}: put it back, or choose another folder")
    return replace(task, fingerprint=current)


class Loss(NamedTuple):
    """What is minimised."""

    total: Tensor


class LossModule(nn.Module):
    """A model and its functions as one module, so that the functions see the model and not a wrapper around it."""

    def __init__(self, model: nn.Module, functions: Functions) -> None:
        super().__init__()
        self.model, self.functions = model, functions

    def forward(self, batch: Batch, *, measured: bool = False) -> Loss | Mapping[str, Tensor]:
        """The loss of a batch; or with `measured` the loss and the metrics by name."""
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
        torch.manual_seed(seed)  # of every device
        seed_generators(seed, "model")
        model: nn.Module = self.functions("model", seed)
        return model

    def patterns(self, model: nn.Module, weight_decay: float) -> Mapping[str, dict[str, Any]]:
        if "patterns" not in self.functions.calls:
            return {}
        patterns = self.functions("patterns", model, weight_decay)
        if not isinstance(patterns, Mapping) or not all(isinstance(options, dict) for options in patterns.values()):
            wanted = "expected a dict of dicts such as {'role:lora': {'algorithm': 'muon'}}"
            raise UsageError(f"{self.config.name}: patterns(model, weight_decay) returned {shown(patterns)}; {wanted}")
        return patterns

    def computing_loss(self, model: nn.Module) -> nn.Module:
        return LossModule(model, self.functions)

    def blamed(self) -> AbstractContextManager[None]:
        return self.functions.blamed()

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[Batch]:
        batch, parts = self.train.batch(step), ranks * accumulation
        seed_generators(self.train.seed, "update", step, rank, host_only=True)  # a checkpoint only holds torch's
        rows, rest = divmod(rows_of(batch), parts)
        if rest:
            split = f"{ranks} ranks x {accumulation} micro-batches"
            raise UsageError(f"{self.config.name}: batch {step} has {rows_of(batch)} rows, not a multiple of {split}")
        starts = [rows * (ranks * micro + rank) for micro in range(accumulation)]
        return iter([batch] if parts == 1 else [rows_between(batch, start, start + rows) for start in starts])

    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[Batch, int]]:
        first, number = None, -1
        for number, batch in enumerate(self.held_out.first(self.config.eval_batches)):
            first = batch if first is None else first
            if number % ranks == rank:
                yield batch, rows_of(batch)
        if number < 0:
            raise UsageError(f"{self.config.name}: batches({VALIDATION!r}, {VALIDATION_SEED}) has no batch")
        if number % ranks < rank:  # a sharded model needs all ranks for a forward pass
            yield first, 0

    def data(self, steps: int) -> str:
        options = "".join(f" --task.{option.replace('=', ' ', 1)}" for option in self.config.options)
        return f"{steps * self.per_step:,} samples of {self.config.name}{options}"


class BatchSource:
    """The batches of a split by number, whatever `batches(split, seed)` returned."""

    def __init__(self, functions: Functions, split: str, seed: int) -> None:
        self.functions, self.split, self.seed = functions, split, seed
        self._call = f"{functions.name}: batches({split!r}, {seed})"
        made = self._make()
        try:
            self._length: int | None = len(made)
        except (TypeError, NotImplementedError):  # as of a DataLoader of data without a length
            self._length = None
        # A function of the number; None for what must be iterated.
        self._numbered: Callable[[int], Batch] | None = made if callable(made) else None
        if length := hasattr(made, "__getitem__") and self._length:
            self._numbered = lambda number: made[number % length]
        # What is iterated: the iterator, the number of its next batch, and the batch before that.
        self._iterator: Iterator[Batch] | None = None
        self._next, self._last = 0, None

    def batch(self, number: int) -> Batch:
        """Batch `number`; a sequence, and what can be iterated over again, starts over at its end."""
        if self._numbered is not None:
            with self._drawing(number):
                return self._numbered(number)
        # An iterator that is past the batch starts over; batches before it are skipped.
        if self._iterator is None or number < self._next - 1:
            self._iterator, self._next = _endless(self._make(), self._call), 0
        while self._next <= number:
            with self._drawing(self._next):
                self._last = next(self._iterator)
            self._next += 1
        return self._last

    def first(self, number: int | None = None) -> Iterator[Batch]:
        """The first batches, each once: all of a source that has a length unless a number is given."""
        wanted = min(number or self._length, self._length) if self._length else number or EVAL_BATCHES
        if self._numbered is not None:
            yield from map(self.batch, range(wanted))
            return
        iterator, end = iter(self._make()), object()
        for place in range(wanted):
            with self._drawing(place):
                batch = next(iterator, end)
            if batch is end:
                return
            yield batch

    def _make(self) -> Any:
        with generators_seeded(self.seed, self.split):
            made = self.functions("batches", self.split, self.seed)
        kinds = "a function of i, a sequence of batches, or something to iterate over"
        if isinstance(made, Dataset) or not (callable(made) or isinstance(made, Iterable)):
            raise UsageError(
                f"{self._call} returned {shown(made)}; expected {kinds}: a Dataset needs a DataLoader around it"
            )
        if isinstance(made, Sequence) and not made:
            raise UsageError(f"{self._call} returned {shown(made)}, which has no batch; expected {kinds}")
        return made

    @contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        with generators_seeded(self.seed, self.split, number), self.functions.blamed("batches"):
            yield


def _endless(made: Iterable[Batch], call: str) -> Iterator[Batch]:
    """Iterate over batches again and again.

    Not a method of the source: a reference cycle would keep the iterator alive, and with it a DataLoader's workers.
    """
    number, before = 0, -1
    while number > before:
        before = number
        for batch in made:
            number += 1
            yield batch
    fix = "yield batches endlessly, or return something that can be iterated over again"
    raise UsageError(f"{call} ended after {counted(number, 'batch', 'batches')}: {fix}")


def seed_generators(*key: object, host_only: bool = False) -> None:
    """Seed torch's, numpy's and Python's generators with a hash of the key; `host_only` leaves torch's alone."""
    number = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")
    if not host_only:
        torch.default_generator.manual_seed(number >> 1)  # and not those of GPUs, which dropout draws from
    np.random.seed(number % (1 << 32))
    random.seed(number)


@contextmanager
def generators_seeded(*key: object) -> Iterator[None]:
    """Seed the generators while the block runs, and restore them afterwards."""
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
    """What a check of a task found."""

    rows: int  # of a batch
    batch: str  # shapes and dtypes of a batch
    loss: float  # of the first batch, before any step
    metrics: Mapping[str, float]  # of the first validation batch
    settings: Mapping[str, Any]  # the file's own steps, rates and so on
    notes: tuple[str, ...]  # warnings, such as unseeded randomness or parameters without gradients


def check_task(config: TaskConfig, seed: int = 0) -> Checked:
    """Call every function of a task before anything is trained, and check what it returns.

    Raises:
        UsageError: With the function, what it returned and what was expected.
    """
    functions = load_functions(config)
    settings, notes = getattr(functions.module, "SETTINGS", {}), []
    if not isinstance(settings, Mapping):
        raise UsageError(f"{config.name}: SETTINGS is {shown(settings)}; make it a dict such as {{'lr': 0.003}}")

    train, again = (BatchSource(functions, TRAIN, seed) for _ in range(2))
    batch, next_batch = train.batch(0), train.batch(1)
    validation = next(BatchSource(functions, VALIDATION, VALIDATION_SEED).first(1), None)
    for split, first in ((TRAIN, batch), (VALIDATION, validation)):
        if not tensors_of(first):
            call = f"{config.name}: the first batch of batches({split!r}, seed)"
            raise UsageError(f"{call} is {shown(first)}; expected tensors, alone or in tuples, lists and dicts")
    if not all(same(train.batch(number), again.batch(number)) for number in (0, 3)):
        notes.append(
            "batches are not a function of (seed, i): drawing them again gave different ones. Arms will see different "
            "batches, and so will a resumed run; draw from torch's generators, or from one seeded with (seed, i)"
        )
    if same(batch, validation):
        notes.append(
            "the first batches of 'train' and 'validation' are the same: validation would not measure unseen data"
        )
    elif same(batch, next_batch):
        notes.append("batches 0 and 1 of 'train' are the same: does batches() use i?")

    model = _checked_model(functions, seed)
    weights, other_weights = model.state_dict(), _checked_model(functions, seed).state_dict()
    if weights.keys() != other_weights.keys() or not same(weights, other_weights):
        notes.append(
            "model(seed) gives different weights each time, so arms do not start equal; draw from torch's generators"
        )
    loss = _checked_loss(functions, model, batch, TRAIN, seed)
    with functions.blamed("loss"):
        loss.backward()  # type: ignore[no-untyped-call]
    idle = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if idle:
        few = f"{', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}"
        notes.append(
            f"the loss does not depend on {counted(len(idle), 'parameter')} ({few}): freeze what is not trained"
        )

    model.eval()
    metrics: Any = {}
    _checked_loss(functions, model, validation, VALIDATION, seed)
    if "metrics" in functions.calls:
        with torch.no_grad(), generators_seeded(seed, "metrics"):
            metrics = functions("metrics", model, map_tensors(Tensor.clone, validation))
    numbers = isinstance(metrics, Mapping) and all(isinstance(v, int | float | Tensor) for v in metrics.values())
    if not numbers or any(name in RESERVED for name in metrics):
        wanted = f"expected a dict of numbers such as {{'accuracy': 0.5}}, under names other than {', '.join(RESERVED)}"
        raise UsageError(f"{config.name}: metrics(model, batch) returned {shown(metrics)}; {wanted}")
    with functions.blamed("metrics"):
        measured = {name: float(value) for name, value in metrics.items()}
    return Checked(rows_of(batch), describe(batch), float(loss.detach()), measured, dict(settings), tuple(notes))


def _checked_model(functions: Functions, seed: int) -> nn.Module:
    with generators_seeded(seed, "model"):
        model = functions("model", seed)
    call = f"{functions.name}: model(seed)"
    if not isinstance(model, nn.Module):
        raise UsageError(f"{call} returned {shown(model)}; expected an nn.Module")
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained or not all(param.device.type == "cpu" for param in trained):
        raise UsageError(f"{call} returned a {type(model).__name__} with no trainable parameters on the CPU")
    for name, value in model.state_dict().items():
        try:
            save({name: value.new_empty(0)})  # as checkpoints will
        except Exception as error:
            wanted = "expected a dense tensor that safetensors can save; persistent=False leaves a buffer out"
            entry = f"{name} of its state_dict is {describe(value) or shown(value)}"
            raise UsageError(f"{call}: {entry}; {wanted}") from error
    return model


def _checked_loss(functions: Functions, model: nn.Module, batch: Batch, split: str, seed: int) -> Tensor:
    learning = split == TRAIN
    with generators_seeded(seed, "loss"), torch.set_grad_enabled(learning):
        loss = functions("loss", model, map_tensors(Tensor.clone, batch))
    if isinstance(loss, Tensor) and not loss.dim() and loss.requires_grad >= learning and bool(loss.isfinite()):
        return loss
    text = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.dim() else shown(loss)
    wanted = "expected a finite scalar tensor with a gradient, such as cross_entropy(...)"
    call = f"{functions.name}: loss(model, batch) returned {text} for the first batch of {split!r}"
    raise UsageError(f"{call}; {wanted}")


def shown(value: Any) -> str:
    """A value as errors show it: its type, and its text if short."""
    text, kind = repr(value), type(value).__name__
    return f"{kind} {text}" if len(text) <= 40 and "\n" not in text else f"a {kind}"


def describe(batch: Batch) -> str:
    """Shapes and dtypes of a batch, as in '64x1x8x8 float32, 64 int64'."""
    texts = []
    for tensor in tensors_of(batch):
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        texts.append(f"{shape} {str(tensor.dtype).removeprefix('torch.')}")
    return ", ".join(texts)


def same(batch: Batch, other: Batch) -> bool:
    ours, theirs = tensors_of(batch), tensors_of(other)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch with every tensor replaced; everything else stays.

    Examples:
        >>> map_tensors(lambda x: x + 1, {"x": torch.zeros(2), "names": ("a", torch.ones(1))})
        {'x': tensor([1., 1.]), 'names': ('a', tensor([2.]))}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(function, value) for key, value in batch.items()}
        # Another mapping, such as a BatchEncoding, may have its values as attributes too.
        return changed if isinstance(batch, dict) else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(map_tensors(function, value) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def tensors_of(batch: Batch) -> list[Tensor]:
    tensors: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return tensors


def rows_of(batch: Batch) -> int:
    """Rows of a batch: the length of its first tensor that has an axis; 1 if there is none."""
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()), 1)


def rows_between(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch; tensors of another length belong to all rows."""
    rows = rows_of(batch)
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.shape[:1] == (rows,) else tensor, batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device; from pinned memory, so that the host need not wait."""

    def send(tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cuda" else tensor.pin_memory().to(device, non_blocking=True)

    return map_tensors(send, batch) if device.type == "cuda" else batch
