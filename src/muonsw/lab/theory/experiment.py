"""Experiments as data: a name, the hypotheses they satisfy, their settings, and the function that runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from muonsw.lab.stats import Evidence

Progress = Callable[[float], None]


def silent(fraction: float) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Context:
    """What a run is given besides its settings."""

    generator: torch.Generator  # source of every random number of the experiment
    progress: Progress = silent  # called now and then with the completed fraction


@dataclass(frozen=True)
class Experiment:
    """A block of claims that are checked together."""

    name: str  # its name within the study
    title: str  # one line for lists
    hypotheses: tuple[str, ...]  # what the claims assume; the function checks it and raises `HypothesisError`
    settings: Any  # a frozen dataclass
    function: Callable[[Any, Context], Evidence]  # runs it, given settings and context
    cost: float = 1.0  # rough seconds, so that the longest is started first

    def run(self, seed: int = 0, *, progress: Progress = silent) -> Evidence:
        """Run with random numbers that depend on the seed and the name alone, so that order does not matter."""
        generator = torch.Generator().manual_seed(seed_for(seed, self.name))
        return self.function(self.settings, Context(generator, progress))


def seed_for(seed: int, name: str) -> int:
    """A separate seed for each experiment, the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
