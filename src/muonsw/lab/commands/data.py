"""What goes into training and what comes out of it: `muonsw data`, `muonsw export` and `muonsw sample`."""

from __future__ import annotations

import math
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import OmitArgPrefixes, Positional, arg, subcommand

from muonsw.lab.commands.training import contents
from muonsw.lab.console import harmless, say, showing
from muonsw.lab.data.loader import Group, read_record, verify_folder
from muonsw.lab.data.prepare import Corpus, prepare_corpus
from muonsw.lab.errors import UsageError
from muonsw.lab.options import unset
from muonsw.lab.train.config import LARGEST
from muonsw.lab.train.export import export, load_model, sample
from muonsw.text import counted


@dataclass(frozen=True)
class Prepare:
    """Encode documents into token shards that `muonsw train` reads.

    Rerun the same command to resume; it does nothing if all is done.
    """

    out: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder for the shards, data.json and the tokenizer."""

    corpus: OmitArgPrefixes[Corpus] = field(default_factory=Corpus)
    """Documents, and how to tokenize them."""

    def run(self) -> int:
        console, start, documents, size = Console(), time.perf_counter(), 0, 0
        with showing(console, {"preparing": self.corpus.limit_characters}) as view:

            def finished(group: Group) -> None:
                nonlocal documents, size
                documents, size = documents + group.documents, size + group.bytes
                rate = size / 1e6 / max(time.perf_counter() - start, 1e-9)
                numbers = {"documents": f"{documents:,}", "MB": f"{size / 1e6:,.1f}", "MB/s": f"{rate:.1f}"}
                view.update("preparing", size, numbers)

            record = prepare_corpus(self.out, self.corpus, reread=True, wait=0.0, finished=finished)
        say(console, f"{contents(record)}, in {time.perf_counter() - start:.1f} s; wrote {self.out}")
        return 0


@dataclass(frozen=True)
class Verify:
    """Read every shard of a folder and compare it with its checksum.

    Every bad shard is named. Exit codes: 0 when all are well, 1 if one is bad.
    """

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder that `muonsw data prepare` filled."""

    def run(self) -> int:
        console, problems = Console(), list(verify_folder(self.folder))
        verdict = counted(len(problems), "problem") if problems else "all is well"
        say(console, f"{self.folder}: {contents(read_record(self.folder))}, {verdict}")
        for problem in problems:
            say(console, f"bad: {problem}")
        return int(bool(problems))


Data = (
    Annotated[Prepare, subcommand("prepare", prefix_name=False)]
    | Annotated[Verify, subcommand("verify", prefix_name=False)]
)


@dataclass(frozen=True)
class Export:
    """Write the model of a run as safetensors, a config and its tokenizer."""

    run_folder: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run folder that `muonsw train` wrote."""
    out: Annotated[Path | None, unset(metavar="DIR")] = None
    """Output folder. Default: RUN/export."""

    def run(self) -> int:
        folder = export(self.run_folder, self.out or self.run_folder / "export", note=_warn)
        say(Console(), f"wrote {folder}; see what it learned with: muonsw sample {shlex.quote(str(folder))}")
        return 0


def _warn(text: str) -> None:
    say(Console(stderr=True), f"muonsw: {text}")


@dataclass(frozen=True)
class Sample:
    """Let a model continue a text."""

    model: Annotated[Path, Positional, arg(metavar="FOLDER")]
    """Run folder, or folder that `muonsw export` wrote."""
    prompt: Annotated[str, unset()] = ""
    """The text to continue; empty starts a document."""
    tokens: int = 200
    """Tokens to generate, at most."""
    temperature: float = 0.8
    """Temperature of the softmax; 0 always takes the likeliest token."""
    top_k: int = 50
    """Sample from this many of the likeliest tokens; 0 samples from all."""
    seed: int = 0
    """Random seed."""

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
