"""What the engine knows of what it trains, and batches of any shape: moved to a device, cut into rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

Batch: TypeAlias = Any  # tensors in tuples, lists and dicts, as the loss wants them
LossParts: TypeAlias = (
    Any  # a NamedTuple of tensors: `total` is minimised, further scalars and then others are recorded
)


class Task(ABC):
    """A model, batches as a function of seed and step, a loss, an evaluation."""

    unit: ClassVar[str] = "samples"  # what an update consists of, in the plural
    per_step: int  # how many of those it has
    flops: float = 0.0  # of training on one of them; 0 where that is not known
    prefetches: bool = False  # whether batches may be drawn by another thread

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model with its initial weights."""

    def computing_loss(self, model: nn.Module) -> nn.Module:
        """A module whose forward pass is the loss of a batch: what is replicated, divided and compiled."""
        return model

    def patterns(self, model: nn.Module, weight_decay: float) -> Mapping[str, dict[str, Any]]:  # noqa: ARG002
        """Options for parameters by name or role, as `MuonSW.for_model` takes them, under a lambda."""
        return {}

    def join_ranks(self, model: nn.Module, ranks: int) -> None:  # noqa: B027
        """Let a model compute over the batches of all ranks what it must."""

    @abstractmethod
    def loss(self, forward: Callable[..., Any], batch: Batch) -> LossParts:
        """The loss of a batch and its parts; `forward` is `computing_loss`, perhaps replicated or compiled."""

    @abstractmethod
    def evaluation(self, forward: Callable[..., Any], batch: Batch) -> Mapping[str, Tensor]:
        """What is measured on a validation batch, `loss` first, each a mean over its rows."""

    @abstractmethod
    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[Batch]:
        """What one rank trains on in an update, counted from 0; the data do not depend on how they are divided."""

    @abstractmethod
    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[Batch, int]]:
        """What one rank evaluates, and how many rows of each batch count; as many batches on every rank."""

    def blamed(self) -> AbstractContextManager[None]:
        """What turns errors of a user's code into messages that name it, while an update or an evaluation runs."""
        return nullcontext()

    def epochs(self, steps: int) -> float | None:  # noqa: ARG002
        """How often so many updates visit the data; None where that is not known."""
        return None

    def record(self, values: Tensor) -> dict[str, Any]:  # noqa: ARG002
        """What is recorded of the parts of a loss that are no scalars, one after the other."""
        return {}

    @abstractmethod
    def data(self, steps: int) -> str:
        """What is trained on in so many updates, in words."""


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch with every tensor replaced; what is neither tensor nor container stays.

    Examples:
        >>> map_tensors(lambda x: x + 1, {"x": torch.zeros(2), "names": ("a", torch.ones(1))})
        {'x': tensor([1., 1.]), 'names': ('a', tensor([2.]))}
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(function, value) for key, value in batch.items()}
        # Another kind, such as a BatchEncoding, may have its values as attributes too.
        return changed if isinstance(batch, dict) else type(batch)(changed)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_make"):
        return batch._make(map_tensors(function, value) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def tensors_of(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, batch)
    return found


def rows_of(batch: Batch) -> int:
    """Rows of a batch: the length of its first tensor that has an axis; 1 where there is none.

    Examples:
        >>> rows_of({"images": torch.zeros(64, 3, 8, 8), "labels": torch.zeros(64)})
        64
    """
    return next((tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()), 1)


def rows_between(batch: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch; tensors of another length are for all of them.

    Examples:
        >>> rows_between((torch.arange(4), torch.tensor(0.5)), 1, 3)
        (tensor([1, 2]), tensor(0.5000))
    """
    rows = rows_of(batch)
    return map_tensors(lambda tensor: tensor[start:stop] if tensor.shape[:1] == (rows,) else tensor, batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device; from pinned memory, so that the host need not wait."""
    if device.type != "cuda":
        return batch
    return map_tensors(lambda tensor: _sent(tensor, device), batch)


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.device.type == "cuda" else tensor.pin_memory().to(device, non_blocking=True)
