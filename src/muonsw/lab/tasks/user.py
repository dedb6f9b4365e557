"""A task of the user's own: functions `model`, `batches`, `loss` and perhaps `metrics`.

Torch's, numpy's and Python's generators are seeded before each batch and each model, so that code which draws from them
is a function of seed and step without knowing it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from muonsw.lab.base.errors import UsageError
from muonsw.lab.tasks.functions import Functions, TaskConfig, fingerprint, listed, load_functions, shown
from muonsw.lab.tasks.task import Batch, Task, rows_between, rows_of

TRAIN, VALIDATION = "train", "validation"
# Validation batches of what has no length.
EVAL_BATCHES = 16
# Every run is validated on the same batches, whatever its own seed.
VALIDATION_SEED = 0
KINDS = "a function of i, a sequence of batches, or something to iterate over"


class Loss(NamedTuple):
    """What is minimised."""

    total: Tensor


class LossModule(nn.Module):
    """A model and its functions as one module, so that those see the model itself and no wrapper around it."""

    def __init__(self, model: nn.Module, functions: Functions) -> None:
        super().__init__()
        self.model, self.loss = model, functions.bound("loss")
        self.metrics = functions.bound("metrics") if functions.has("metrics") else None

    def forward(self, batch: Batch, *, measured: bool = False) -> Loss | Mapping[str, Tensor]:
        """The loss of a batch; or with `measured` the loss and the metrics by name."""
        loss = self.loss(self.model, batch)
        if not measured:
            return Loss(loss)
        return {"loss": loss, **(self.metrics(self.model, batch) if self.metrics else {})}


class UserTask(Task):
    """The task of a file or module, in batches of so many rows.

    Examples:
        >>> from muonsw.lab.tasks import template
        >>> task = UserTask(TaskConfig(template.__name__), batch=128, seed=0)
        >>> rows_of(next(task.micro_batches(3, ranks=2, rank=1, accumulation=1)))
        64
    """

    def __init__(self, config: TaskConfig, *, batch: int, seed: int) -> None:
        self.config, self.per_step = config, batch
        self.functions = load_functions(config)
        self.train = BatchSource(self.functions, TRAIN, seed)
        self.held_out = BatchSource(self.functions, VALIDATION, VALIDATION_SEED)

    def model(self, seed: int) -> nn.Module:
        """The model with its initial weights; the generators stay seeded, for dropout."""
        torch.manual_seed(seed)  # of every device
        seed_generators(seed, "model")
        model: nn.Module = self.functions("model", seed)
        return model

    def patterns(self, model: nn.Module, weight_decay: float) -> Mapping[str, dict[str, Any]]:
        """What the file says of the routing; by default roles decide.

        Raises:
            UsageError: If it says so in another form.
        """
        if not self.functions.has("patterns"):
            return {}
        found = self.functions("patterns", model, weight_decay)
        if not isinstance(found, Mapping) or not all(isinstance(one, dict) for one in found.values()):
            wanted = "expected a dict of dicts such as {'role:lora': {'algorithm': 'muon'}}"
            raise UsageError(f"{self.config.name}: patterns(model, weight_decay) returned {shown(found)}; {wanted}")
        return found

    def computing_loss(self, model: nn.Module) -> nn.Module:
        """The model with its loss."""
        return LossModule(model, self.functions)

    def loss(self, forward: Callable[..., Any], batch: Batch) -> Loss:
        """The scalar that the user's function returns."""
        found: Loss = forward(batch)
        return found

    def evaluation(self, forward: Callable[..., Any], batch: Batch) -> Mapping[str, Tensor]:
        """The loss, and the metrics where there are some."""
        found: Mapping[str, Tensor] = forward(batch, measured=True)
        return found

    def blamed(self) -> AbstractContextManager[None]:
        """Errors that name the user's function and its line."""
        return self.functions.blamed()

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[Batch]:
        """The rows of batch `step` that one rank trains on, one micro-batch at a time."""
        batch, parts = self.train.batch(step), ranks * accumulation
        seed_host_generators(self.train.seed, "update", step, rank)  # no checkpoint has them, as it has torch's
        rows, rest = divmod(rows_of(batch), parts)
        if rest:
            split = f"{ranks} ranks x {accumulation} micro-batches"
            raise UsageError(f"{self.config.name}: batch {step} has {rows_of(batch)} rows, not a multiple of {split}")
        starts = [rows * (ranks * micro + rank) for micro in range(accumulation)]
        return iter([batch] if parts == 1 else [rows_between(batch, start, start + rows) for start in starts])

    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[Batch, int]]:
        """Whole validation batches, one rank after the other."""
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
        """The file, its options, and how much is seen."""
        options = f" {listed(self.config.options)}" if self.config.options else ""
        return f"{steps * self.per_step:,} samples of {self.config.name}{options}"


@dataclass
class BatchSource:
    """The batches of a split, by number: what `batches(split, seed)` returns, whichever kind it is."""

    functions: Functions
    split: str
    seed: int
    made: Any = field(init=False)
    _last: tuple[int, Batch] | None = None
    _iterator: Iterator[Batch] | None = None
    _next: int = 0

    def __post_init__(self) -> None:
        self.made = self._make()

    def batch(self, number: int) -> Batch:
        """Batch `number`; a sequence, and what can be iterated over again, begins anew at its end."""
        if self._last is None or self._last[0] != number:
            self._last = number, self._drawn(number)
        return self._last[1]

    def first(self, count: int | None = None) -> Iterator[Batch]:
        """The first batches: all of what has a length unless a number is given."""
        length = length_of(self.made)
        wanted = min(count or length, length) if length else count or EVAL_BATCHES
        if self.is_sequence or callable(self.made):
            yield from map(self._drawn, range(wanted))
            return
        iterator = iter(self._make())
        for number in range(wanted):
            with self._drawing(number):
                found = list(islice(iterator, 1))
            if not found:
                break
            yield found[0]

    @property
    def is_sequence(self) -> bool:
        """Whether it has a length and batches by index."""
        return length_of(self.made) is not None and hasattr(self.made, "__getitem__")

    @property
    def _call(self) -> str:
        """What made the batches, for errors."""
        return f"{self.functions.name}: batches({self.split!r}, {self.seed})"

    def _make(self) -> Any:
        with generators_seeded(self.seed, self.split):
            made = self.functions("batches", self.split, self.seed)
        if not callable(made) and not isinstance(made, Iterable | Dataset):
            raise UsageError(f"{self._call} returned {shown(made)}; expected {KINDS}")
        if isinstance(made, Dataset):
            fix = "whose items are samples and not batches: wrap it in a DataLoader, or return a function of i"
            raise UsageError(f"{self._call} returned a {type(made).__name__}, {fix}")
        if length_of(made) == 0:
            raise UsageError(f"{self._call} returned {shown(made)}, without a batch; expected {KINDS}")
        return made

    @contextmanager
    def _drawing(self, number: int) -> Iterator[None]:
        with generators_seeded(self.seed, self.split, number), self.functions.blamed("batches"):
            yield

    def _drawn(self, number: int) -> Batch:
        if not self.is_sequence and not callable(self.made):
            return self._iterated_to(number)
        with self._drawing(number):
            return self.made[number % len(self.made)] if self.is_sequence else self.made(number)

    def _iterated_to(self, number: int) -> Batch:
        """The batch of an iterator, which begins anew where it is past that batch; those before it are skipped."""
        if self._iterator is None or number < self._next:
            self._iterator, self._next = _for_ever(self._make(), self._call), 0
        for place in range(self._next, number + 1):
            with self._drawing(place):
                batch = next(self._iterator)
        self._next = number + 1
        return batch


def _for_ever(made: Iterable[Batch], call: str) -> Iterator[Batch]:
    """Batches from the beginning again at each end.

    No method of a source: the two would hold each other, and the workers of a DataLoader end only with its iterator.
    """
    count, before = 0, -1
    while count > before:
        before = count
        for batch in made:
            count += 1
            yield batch
    fix = "yield batches for ever, or return something that can be iterated over again"
    raise UsageError(f"{call} ended after {count}: {fix}")


def length_of(made: Any) -> int | None:
    """How many batches there are; None where that is not known, as in a DataLoader of data without a length."""
    try:
        return len(made)
    except (TypeError, NotImplementedError):
        return None


def seed_generators(*key: object) -> None:
    """Seed torch's, numpy's and Python's generators with a hash of the key."""
    torch.default_generator.manual_seed(_hashed(key) >> 1)  # and not those of GPUs, which dropout draws from
    seed_host_generators(*key)


def seed_host_generators(*key: object) -> None:
    """Seed numpy's and Python's generators with a hash of the key."""
    np.random.seed(_hashed(key) % (1 << 32))
    random.seed(_hashed(key))


def _hashed(key: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


@contextmanager
def generators_seeded(*key: object) -> Iterator[None]:
    """Seed the generators while the block runs, and put them back where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed_generators(*key)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def with_file(task: TaskConfig) -> TaskConfig:
    """The task with the hash of its code, before any of it runs.

    Raises:
        UsageError: If it is not the code that the run was started with.
    """
    found = fingerprint(task.path)
    if task.fingerprint not in (None, found):
        other = f"{task.path} has changed since this run was started, or a module that it imports"
        raise UsageError(f"{other} ({found}, not {task.fingerprint}): put it back, or choose another folder")
    return replace(task, fingerprint=found)
