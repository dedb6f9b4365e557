"""`muonsw data`: documents to token shards, and what is in a folder of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg, subcommand

from muonsw.lab.base.progress import View, showing
from muonsw.lab.base.terminal import say
from muonsw.lab.data.corpus import Corpus
from muonsw.lab.data.prepare import prepare_corpus
from muonsw.lab.data.shards import SPLITS, DataRecord, Group, read_record, verify_folder
from muonsw.text import counted

PREPARING = "preparing"
STAGES = {"tokenizer": "making the tokenizer", "documents": "encoding"}


@dataclass
class Tally:
    """Adds up what is prepared and shows it."""

    view: View
    size: int | None  # bytes that there are to read, where that is known
    documents: int = 0
    bytes: int = 0
    started: float = field(default_factory=time.perf_counter)

    def begun(self, stage: str) -> None:
        """A stage begins."""
        self.started = time.perf_counter()
        self.view.say(STAGES[stage])

    def finished(self, group: Group) -> None:
        """A group is done, now or earlier."""
        self.documents, self.bytes = self.documents + group.documents, self.bytes + group.bytes
        rate = self.bytes / 1e6 / max(time.perf_counter() - self.started, 1e-9)
        fraction = min(self.bytes / self.size, 1.0) if self.size else None
        numbers = {"documents": f"{self.documents:,}", "MB": f"{self.bytes / 1e6:,.1f}", "MB/s": f"{rate:.1f}"}
        self.view.update(PREPARING, fraction, numbers, total=None if fraction is None else 1.0)


@dataclass(frozen=True)
class Prepare:
    """Encode documents into token shards that `muonsw train` reads.

    The same command continues where an interrupted one stopped, and does nothing if all is done.
    """

    out: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder for the shards, their record and the tokenizer."""

    corpus: OmitArgPrefixes[FlagCreatePairsOff[Corpus]] = field(default_factory=Corpus)
    """Documents, and the tokens that they become."""

    threads: Annotated[int | None, arg(metavar="N")] = None
    """How many threads encode; one for each core unless given."""

    def run(self) -> int:
        """Prepare the folder and say what it holds."""
        console, start = Console(), time.perf_counter()
        with showing(console, {PREPARING: None}) as view:
            tally = Tally(view, self.corpus.size())
            record = prepare_corpus(
                self.out, self.corpus, threads=self.threads, finished=tally.finished, begun=tally.begun
            )
        say(console, f"{contents(record)}, in {time.perf_counter() - start:.1f} s; wrote {self.out}")
        return 0


@dataclass(frozen=True)
class Verify:
    """Read every shard of a folder and check its tokens against their checksums.

    Exits with 0 when all is well, with 1 when a shard is bad; every bad one is named.
    """

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder that `muonsw data prepare` filled."""

    def run(self) -> int:
        """Check all and print what is wrong."""
        console, problems, shards, tokens = Console(), 0, 0, 0
        for checked in verify_folder(self.folder):
            shards, tokens = shards + (checked.path != self.folder), tokens + checked.tokens
            if checked.problem is not None:
                problems += 1
                say(console, f"bad: {checked.problem}")
        verdict = counted(problems, "problem") if problems else "all is well"
        say(console, f"{self.folder}: {counted(shards, 'shard')} and {tokens:,} good tokens read, {verdict}")
        return int(problems > 0)


@dataclass(frozen=True)
class Info:
    """Say what a folder of prepared data holds, without reading its tokens."""

    folder: Annotated[Path, Positional, arg(metavar="DIR")]
    """Folder that `muonsw data prepare` filled."""

    def run(self) -> int:
        """Print the record."""
        console, record = Console(), read_record(self.folder)
        shards = [(path, group.tokens[split]) for split in SPLITS for path, group in record.shards(self.folder, split)]
        sizes = {path: path.stat().st_size if path.exists() else 0 for path, _ in shards}
        wrong = sum(sizes[path] != tokens * record.dtype.itemsize for path, tokens in shards)
        lacks = f" ({counted(wrong, 'shard')} missing or of another size than on record)" if wrong else ""
        again = f"not complete{lacks}: run the same `muonsw data prepare` again"
        state = "complete" if record.complete and not wrong else again
        kind = (record.tokenizer_description or {}).get("kind", "unknown")
        recipe = (record.recipe or {}).get("corpus", {})
        chosen = ", ".join(
            f"{name} {value}" for name, value in recipe.items() if value is not None and value is not False
        )
        say(console, f"{self.folder}: {state}")
        say(console, f"corpus      {chosen or 'not recorded'}")
        say(console, f"tokenizer   {kind}, {record.vocab_size:,} tokens, identity {record.tokenizer[:12]}")
        for split in SPLITS:
            paths = record.paths(self.folder, split)
            size = sum(sizes[path] for path in paths)
            held = f"{record.tokens(split):,} tokens in {counted(len(paths), 'shard')}, {size:,} bytes"
            say(console, f"{split:<11} {held}")
        say(console, f"total       {contents(record)}")
        return 0


@dataclass(frozen=True)
class Data:
    """Prepare training data, verify it, or say what a folder of it holds."""

    action: Annotated[
        Annotated[Prepare, subcommand("prepare", prefix_name=False)]
        | Annotated[Verify, subcommand("verify", prefix_name=False)]
        | Annotated[Info, subcommand("info", prefix_name=False)],
        arg(name=""),
    ]

    def run(self) -> int:
        """Do what was asked."""
        return self.action.run()


def contents(record: DataRecord) -> str:
    """What a folder holds, in a few words."""
    size = sum(group.bytes for group in record.groups)
    text = f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
    tokens = " and ".join(f"{record.tokens(split):,} {split}" for split in SPLITS)
    return f"{counted(record.documents, 'document')}, {text} of text, {tokens} tokens"


def describe(folder: Path) -> str:
    """What was made of a text, in a sentence that says where it is."""
    record = read_record(folder)
    share = record.tokens("validation") / sum(map(record.tokens, SPLITS))
    held_out = f"({share:.1%} held out for validation)"
    return f"tokens: {contents(record)} {held_out}, vocabulary of {record.vocab_size:,}, in {folder}"
