"""Whether a user's task can be trained: every function is called once, before anything is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from muonsw.lab.base.errors import UsageError
from muonsw.lab.tasks.functions import Functions, TaskConfig, load_functions, shown
from muonsw.lab.tasks.task import Batch, map_tensors, rows_of, tensors_of
from muonsw.lab.tasks.user import TRAIN, VALIDATION, VALIDATION_SEED, BatchSource, generators_seeded
from muonsw.text import counted

# What the records of an evaluation have anyway.
RESERVED = ("kind", "step", "loss")
LATER = 3  # a batch that is drawn besides the first


@dataclass(frozen=True)
class Checked:
    """What calling the functions of a task showed."""

    rows: int  # of a batch
    batch: str  # a batch in words: shapes and dtypes
    loss: float  # of the first batch, before any update
    metrics: Mapping[str, float]  # of the first validation batch
    settings: Mapping[str, Any]  # what the file says of steps, rates and so on
    # What a reader should know, in sentences: randomness that no seed decides, parameters without gradients.
    notes: tuple[str, ...]


def check_task(config: TaskConfig, seed: int = 0) -> Checked:
    """Call every function of a task, and look at what it returns.

    Raises:
        UsageError: With the function, what it returned and what was expected.
    """
    functions = load_functions(config)
    train, held_out = BatchSource(functions, TRAIN, seed), BatchSource(functions, VALIDATION, VALIDATION_SEED)
    batch = train.batch(0)
    _require_tensors(functions, TRAIN, batch)
    validation = next(held_out.first(1), None)
    _require_tensors(functions, VALIDATION, validation)
    model = _model(functions, seed)
    unequal = _made_again(functions, model, seed)  # before the loss, which may change buffers
    loss, idle = _loss(functions, model, batch, seed)
    _require_finite(functions, model, validation, seed)
    notes = [_drawn_again(functions, train, seed), _alike(train, validation), unequal, idle]
    return Checked(
        rows=rows_of(batch),
        batch=describe(batch),
        loss=loss,
        metrics=_metrics(functions, model, validation, seed),
        settings=functions.settings,
        notes=tuple(filter(None, notes)),
    )


def describe(batch: Batch) -> str:
    """Shapes and dtypes of a batch.

    Examples:
        >>> describe((torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64)))
        '64x1x8x8 float32, 64 int64'
    """
    shapes = ("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors_of(batch))
    dtypes = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors_of(batch))
    return ", ".join(f"{shape} {dtype}" for shape, dtype in zip(shapes, dtypes, strict=True))


def _require_tensors(functions: Functions, split: str, batch: Batch) -> None:
    if not tensors_of(batch):
        call = f"{functions.name}: the first batch of batches({split!r}, seed)"
        raise UsageError(f"{call} is {shown(batch)}; expected tensors, alone or in tuples, lists and dicts")


def _model(functions: Functions, seed: int) -> nn.Module:
    with generators_seeded(seed, "model"):
        model = functions("model", seed)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{functions.name}: model(seed) returned {shown(model)}; expected an nn.Module")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise UsageError(
            f"{functions.name}: model(seed) returned a {type(model).__name__} without a parameter to train"
        )
    for name, parameter in trained.items():
        if parameter.device.type != "cpu" or not parameter.is_floating_point():
            found = f"{name} is {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
            raise UsageError(f"{functions.name}: model(seed): {found}; expected floating point on the CPU")
    for name, value in model.state_dict().items():
        try:
            save({name: value.new_empty(0)})  # as checkpoints will
        except Exception as error:
            found = f"{name} of its state_dict is {describe(value) or shown(value)}"
            wanted = "expected a dense tensor that safetensors can save; persistent=False leaves a buffer out"
            raise UsageError(f"{functions.name}: model(seed): {found}; {wanted}") from error
    return model


def _loss(functions: Functions, model: nn.Module, batch: Batch, seed: int) -> tuple[float, str]:
    """The loss of a batch; and a note about parameters that it does not reach."""
    with generators_seeded(seed, "loss"):
        loss = functions("loss", model, map_tensors(Tensor.clone, batch))
    call = f"{functions.name}: loss(model, batch) returned"
    wanted = "expected a scalar tensor that depends on the model, such as cross_entropy(...)"
    if not isinstance(loss, Tensor):
        raise UsageError(f"{call} {shown(loss)}; {wanted}")
    if loss.dim():
        raise UsageError(f"{call} a tensor of shape {tuple(loss.shape)}; {wanted}: take its mean()")
    if not loss.requires_grad:
        raise UsageError(f"{call} {shown(loss)} without a gradient; {wanted}: is it detached, or under no_grad?")
    if not bool(loss.isfinite()):
        raise UsageError(f"{call} {loss.item()} for the first batch; expected a finite number")
    with functions.blamed("loss"):
        loss.backward()  # type: ignore[no-untyped-call]
    idle = [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None]
    model.zero_grad(set_to_none=True)
    few = f"{', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}"
    note = f"the loss does not depend on {counted(len(idle), 'parameter')} ({few}): freeze what is not trained"
    return float(loss.detach()), note if idle else ""


def _require_finite(functions: Functions, model: nn.Module, batch: Batch, seed: int) -> None:
    """Refuse a validation loss that is no number: whatever is trained, there would be none to compare."""
    model.eval()
    with torch.no_grad(), generators_seeded(seed, "loss"):
        found = functions("loss", model, map_tensors(Tensor.clone, batch))
    with functions.blamed("loss"):
        loss = float(found)
    if not math.isfinite(loss):
        call = f"{functions.name}: loss(model, batch) returned {loss} for the first batch of {VALIDATION!r}"
        raise UsageError(f"{call}; expected a finite number")


def _metrics(functions: Functions, model: nn.Module, batch: Batch, seed: int) -> dict[str, float]:
    if not functions.has("metrics"):
        return {}
    model.eval()
    with torch.no_grad(), generators_seeded(seed, "metrics"):
        found = functions("metrics", model, map_tensors(Tensor.clone, batch))
    call, wanted = f"{functions.name}: metrics(model, batch) returned", "expected a dict such as {'accuracy': 0.5}"
    if not isinstance(found, Mapping):
        raise UsageError(f"{call} {shown(found)}; {wanted}")
    for name, value in found.items():
        if not isinstance(name, str) or name in RESERVED:
            raise UsageError(f"{call} a metric called {name!r}; {wanted}, with other names than {', '.join(RESERVED)}")
        if not (isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim())):
            raise UsageError(f"{call} {shown(value)} as {name!r}; {wanted}, of numbers or scalar tensors")
    return {name: float(value) for name, value in found.items()}


def _drawn_again(functions: Functions, train: BatchSource, seed: int) -> str:
    """A note if a batch that is drawn a second time is another one."""
    again = BatchSource(functions, TRAIN, seed)
    if all(same(train.batch(number), again.batch(number)) for number in (0, LATER)):
        return ""
    return (
        "batches are not a function of (seed, i): drawn a second time, they were others. Arms do not see the same "
        "batches, and a run that is interrupted goes on with others; draw from torch's generators, or from one that "
        "(seed, i) seeds"
    )


def _alike(train: BatchSource, validation: Batch) -> str:
    """A note if batches repeat each other where they should not."""
    if same(train.batch(0), validation):
        return "the first batches of 'train' and 'validation' are equal: the loss would be measured on what is learned"
    if same(train.batch(0), train.batch(1)):
        return "batches 0 and 1 of 'train' are equal: is i used?"
    return ""


def _made_again(functions: Functions, model: nn.Module, seed: int) -> str:
    """A note if a second model of the same seed begins with other weights."""
    first, second = model.state_dict(), _model(functions, seed).state_dict()
    if first.keys() == second.keys() and same(list(first.values()), list(second.values())):
        return ""
    return "model(seed) gives other weights each time: arms do not begin equal; draw from torch's generators"


def same(one: Batch, other: Batch) -> bool:
    """Whether two batches have equal tensors."""
    ours, theirs = tensors_of(one), tensors_of(other)
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )
