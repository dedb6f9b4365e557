"""The paper's decoder on token shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.loader import TokenBatch, TokenLoader, ValidationLoader
from muonsw.lab.data.shards import fingerprint, open_split, read_record
from muonsw.lab.model import Decoder, Losses, ModelConfig, count
from muonsw.lab.model.moe import MoE
from muonsw.lab.tasks.task import Task


@dataclass(frozen=True)
class DataConfig:
    """Which tokens are trained on and which are validated on."""

    path: str  # a folder that `muonsw data prepare` filled
    # A hash of all its tokens; None takes the folder's, and a run writes it down and insists on it.
    fingerprint: str | None = None
    eval_windows: int | None = 256  # validation windows, the same for every run; None reads all
    # Train on so many windows alone, the first ones, as if there were no more text; None takes all.
    train_windows: int | None = None

    def __post_init__(self) -> None:
        for name in ("train_windows", "eval_windows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


class DecoderTask(Task):
    """A decoder that learns to predict tokens, in batches of so many sequences; `micro` of them are evaluated at once.

    Examples:
        >>> import tempfile
        >>> from itertools import islice
        >>> from muonsw.lab.data.prepare import prepare
        >>> from muonsw.lab.data.synthetic import MarkovSource
        >>> from muonsw.lab.data.tokenizer import ByteTokenizer
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = prepare(islice(MarkovSource(seed=0), 9), ByteTokenizer(), folder, validation_fraction=0.2)
        >>> small = ModelConfig(width=32, layers=1, head_dim=16, vocab=320, sequence=8)
        >>> task = DecoderTask(small, DataConfig(str(folder)), batch=4, micro=4, seed=0)
        >>> (batch,) = task.micro_batches(0, ranks=1, rank=0, accumulation=1)
        >>> task.per_step, sorted(task.loss(task.model(0), batch)._asdict())
        (32, ['balance', 'cross_entropy', 'load', 'total', 'z'])
    """

    unit: ClassVar[str] = "tokens"
    prefetches = True

    def __init__(self, model: ModelConfig, data: DataConfig, *, batch: int, micro: int, seed: int) -> None:
        self.config, self.path = model, data.path
        self.per_step = batch * model.sequence
        train, held_out = (open_split(Path(data.path), split) for split in ("train", "validation"))
        self.loader = TokenLoader(train, model.sequence, batch, seed, data.train_windows)
        self.held_out = ValidationLoader(held_out, model.sequence, micro, data.eval_windows)

    @property
    def flops(self) -> float:  # type: ignore[override]
        """Of training on a token."""
        return count(self.config).flops_per_token

    def model(self, seed: int) -> Decoder:
        """The decoder with its initial weights."""
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
        """The losses of predicting the targets."""
        losses: Losses = forward(*batch)
        return losses

    def evaluation(self, forward: Callable[..., Any], batch: TokenBatch) -> Mapping[str, Tensor]:
        """The cross-entropy, without what only balances experts."""
        return {"loss": forward(*batch).cross_entropy}

    def micro_batches(self, step: int, *, ranks: int, rank: int, accumulation: int) -> Iterator[TokenBatch]:
        """What one rank reads of a step."""
        return self.loader.micro_batches(step, ranks=ranks, rank=rank, accumulation=accumulation)

    def validation(self, *, ranks: int, rank: int) -> Iterator[tuple[TokenBatch, int]]:
        """The same windows for every run on this data."""
        return self.held_out.parts(ranks=ranks, rank=rank)

    def epochs(self, steps: int) -> float:
        """How often so many updates visit every window."""
        return self.loader.epochs(steps)

    def record(self, values: Tensor) -> dict[str, Any]:
        """How evenly experts are loaded, layer by layer."""
        experts = self.config.experts
        return {"load_entropy": load_entropy(values.view(-1, experts)).tolist()} if experts > 1 else {}

    def data(self, steps: int) -> str:
        """Which tokens, and how often."""
        return f"{self.epochs(steps):.2f} epochs of {self.path}"


def load_entropy(load_LE: Tensor) -> Tensor:
    """Entropy of the experts' load in each layer, relative to an even one.

    Examples:
        >>> load_entropy(torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]])).tolist()
        [1.0, 0.0]
    """
    entropy: Tensor = torch.special.entr(load_LE).sum(dim=1)
    return entropy / math.log(load_LE.shape[1])


def with_tokens(data: DataConfig, model: ModelConfig) -> DataConfig:
    """The data with the hash of its tokens, after checking that model and data fit together.

    Raises:
        UsageError: If the folder holds other tokens than the config says, or more kinds than the model has.
    """
    record = read_record(Path(data.path))
    if record.vocab_size > model.vocab:
        size = f"{data.path} has a vocabulary of {record.vocab_size} tokens"
        raise UsageError(f"{size}, more than model.vocab={model.vocab}: raise model.vocab")
    found = fingerprint(record)
    if data.fingerprint not in (None, found):
        other = f"{data.path} holds other tokens ({found}) than this run was started on ({data.fingerprint})"
        raise UsageError(f"{other}: give those with --data, or choose another folder for the run")
    return replace(data, fingerprint=found)
