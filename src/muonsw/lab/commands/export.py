"""`muonsw export` and `muonsw sample`: a trained model as files, and as text."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from muonsw.lab.console import harmless, say
from muonsw.lab.errors import UsageError
from muonsw.lab.train.config import LARGEST
from muonsw.lab.train.export import export, load_model, sample


@dataclass(frozen=True)
class Export:
    """Write the model of a run as safetensors, a config and its tokenizer."""

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """A folder that `muonsw train` filled."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Output folder; default RUN/export."""
    best: FlagCreatePairsOff[bool] = False
    """Take the checkpoint with the lowest validation loss instead of the newest."""

    def run(self) -> int:
        folder = export(self.run_folder, self.out or self.run_folder / "export", best=self.best, note=_warn)
        say(Console(), f"wrote {folder}; see what it learned with: muonsw sample {shlex.quote(str(folder))}")
        return 0


def _warn(text: str) -> None:
    say(Console(stderr=True), f"muonsw: {text}")


@dataclass(frozen=True)
class Sample:
    """Let a model continue a text."""

    model: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """A run, or what `muonsw export` wrote."""
    prompt: str = ""
    """The text to continue; empty starts a document."""
    tokens: int = 200
    """Tokens to generate, at most."""
    temperature: float = 0.8
    """Temperature of the softmax; 0 always takes the likeliest token."""
    top_k: int = 50
    """Sample from this many of the likeliest tokens; 0 samples from all."""
    seed: int = 0
    """Seed of the sampling."""

    def run(self) -> int:
        if self.tokens < 1 or self.top_k < 0 or not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError("--tokens must be at least 1, --temperature finite, and it and --top-k not negative")
        if not 0 <= self.seed < LARGEST:
            raise UsageError(f"--seed must be at least 0 and below 2**63, got {self.seed}")
        model, tokenizer = load_model(self.model, note=_warn)
        drawn = sample(
            model,
            tokenizer,
            self.prompt,
            tokens=self.tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            seed=self.seed,
        )
        ids: list[int] = []
        shown = self.prompt
        print(harmless(shown), end="")
        for token in drawn:
            ids.append(token)
            text = self.prompt + tokenizer.decode(ids)
            if not text.endswith("\ufffd"):  # half a character: wait for the rest
                print(harmless(text[len(shown) :]), end="", flush=True)
                shown = text
        print()
        return 0
