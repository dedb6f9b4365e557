"""`muonsw data`: documents to token shards, and what is in a folder of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg, subcommand

from muonsw.lab.console import say, showing
from muonsw.lab.data.loader import SPLITS, DataRecord, Group, read_record, verify_folder
from muonsw.lab.data.prepare import Corpus, prepare_corpus
from muonsw.text import counted


@dataclass(frozen=True)
class Prepare:
    """Encode documents into token shards that `muonsw train` reads.

    Rerun the same command to resume; it does nothing if all is done.
    """

    out: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder for the shards, their record and the tokenizer."""

    corpus: OmitArgPrefixes[FlagCreatePairsOff[Corpus]] = field(default_factory=Corpus)
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

            record = prepare_corpus(self.out, self.corpus, finished=finished)
        say(console, f"{contents(record)}, in {time.perf_counter() - start:.1f} s; wrote {self.out}")
        return 0


@dataclass(frozen=True)
class Verify:
    """Read every shard of a folder and compare it with its checksum.

    Exits with 0 when all is well, with 1 when a shard is bad; every bad one is named.
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


@dataclass(frozen=True)
class Info:
    """Print what a folder of prepared data holds, without reading its tokens."""

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder that `muonsw data prepare` filled."""

    def run(self) -> int:
        console, record = Console(), read_record(self.folder)
        state = "complete" if record.complete else "not complete: rerun the same `muonsw data prepare` to resume"
        kind = (record.tokenizer_description or {}).get("kind", "unknown")
        recipe = (record.recipe or {}).get("corpus", {})
        chosen = [f"{name} {value}" for name, value in recipe.items() if value is not None and value is not False]
        say(console, f"{self.folder}: {state}")
        say(console, f"corpus      {', '.join(chosen) or 'not recorded'}")
        say(console, f"tokenizer   {kind}, {record.vocab_size:,} tokens, identity {record.tokenizer[:12]}")
        for split in SPLITS:
            shards = counted(len(record.shards(self.folder, split)), "shard")
            say(console, f"{split:<11} {record.tokens(split):,} tokens in {shards}")
        say(console, f"total       {contents(record)}")
        return 0


@dataclass(frozen=True)
class Data:
    """Prepare training data, verify it, or print what a folder of it holds."""

    action: Annotated[
        Annotated[Prepare, subcommand("prepare", prefix_name=False)]
        | Annotated[Verify, subcommand("verify", prefix_name=False)]
        | Annotated[Info, subcommand("info", prefix_name=False)],
        arg(name=""),
    ]

    def run(self) -> int:
        return self.action.run()


def contents(record: DataRecord) -> str:
    size = sum(group.bytes for group in record.groups)
    text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    tokens = " and ".join(f"{record.tokens(split):,} {split}" for split in SPLITS)
    return f"{counted(record.documents, 'document')}, {text} of text, {tokens} tokens"


def describe(folder: Path) -> str:
    """What was made of a text, and where it is."""
    record = read_record(folder)
    share = record.tokens("validation") / sum(map(record.tokens, SPLITS))
    held_out = f"({share:.1%} held out for validation)"
    return f"tokens: {contents(record)} {held_out}, vocabulary of {record.vocab_size:,}, in {folder}"
