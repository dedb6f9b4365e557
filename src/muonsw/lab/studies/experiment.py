"""Experiments as data: a name, the hypotheses they satisfy, their settings, and the function that runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from muonsw.lab.claims.claim import Outcome
from muonsw.registry import Registry

Progress = Callable[[float], None]


def silent(fraction: float) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True)
class Context:
    """What a run is given besides its settings.

    Attributes:
        generator: Source of every random number of the experiment.
        progress: Told the fraction that is done, now and then.
    """

    generator: torch.Generator
    progress: Progress = silent


@dataclass(frozen=True)
class Experiment:
    """One block of claims that are checked together.

    Attributes:
        name: How it is called within its study.
        title: One line for lists.
        hypotheses: What the claims assume; the function checks it and raises `HypothesisError`.
        settings: A frozen dataclass, the setting that is run by default.
        function: Runs it, given settings and context.
        cost: Rough seconds, so that the longest is started first.
    """

    name: str
    title: str
    hypotheses: tuple[str, ...]
    settings: Any
    function: Callable[[Any, Context], Outcome]
    cost: float = 1.0

    def run(self, seed: int = 0, *, settings: Any = None, progress: Progress = silent) -> Outcome:
        """Run with random numbers that depend on the seed and the name alone, so that order does not matter."""
        generator = torch.Generator().manual_seed(seed_for(seed, self.name))
        chosen = self.settings if settings is None else settings
        return self.function(chosen, Context(generator, progress))


@dataclass(frozen=True)
class Study:
    """Experiments that are reproduced together under one name, and the pictures drawn from them.

    Attributes:
        name: What `muonsw reproduce` is given.
        title: One line for lists.
        experiments: In the order in which they are shown.
        draw: Writes figures from the outcomes into a folder and returns their paths.
    """

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    draw: Callable[[Mapping[str, Outcome], Path], list[Path]]

    def select(self, name: str) -> Study:
        """The study with one of its experiments only."""
        known: Registry[Experiment] = Registry(f"experiment of {self.name}")
        for experiment in self.experiments:
            known.register(experiment.name, experiment)
        return Study(self.name, self.title, (known[name],), self.draw)


def seed_for(seed: int, name: str) -> int:
    """A seed of its own for each named experiment, the same on every machine.

    Examples:
        >>> seed_for(0, "scalar") == seed_for(0, "scalar") != seed_for(1, "scalar")
        True
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
