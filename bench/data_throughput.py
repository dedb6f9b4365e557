"""Time preparing data against the tokenizer library alone: same text, same cores, interleaved, medians.

    python bench/data_throughput.py
    python bench/data_throughput.py --gpt2-files DIR --characters 100000000

Both use all cores. The library is given lists of documents; preparing also hashes the texts,
splits off the validation documents, and writes checked shards.
Before anything is timed, the shards are compared with the library's tokens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from muonsw import machine
from muonsw.lab.bench.timing import chosen_device, environment, in_turn, save
from muonsw.lab.data.documents import Corpus, up_to
from muonsw.lab.data.prepare import grouped, prepare
from muonsw.lab.data.shards import open_split
from muonsw.lab.data.tokenizer import BPETokenizer, GPT2Tokenizer, Tokenizer

# what the library gets at a time: enough for its threads, and its working memory stays below a gigabyte
LIST_CHARACTERS = 1 << 22
GROUP_CHARACTERS = 1 << 22
TRAINING_CHARACTERS = 1 << 22
Ids = list[int]
Seconds = dict[str, list[tuple[float, float]]]


def bpe_alone(tokenizer: BPETokenizer, texts: list[str]) -> Iterator[Ids]:
    """The tokenizers library's fastest call."""
    for batch in grouped(texts, LIST_CHARACTERS):
        yield from (encoding.ids for encoding in tokenizer._bpe.encode_batch_fast(batch, add_special_tokens=False))


def gpt2_alone(tokenizer: GPT2Tokenizer, texts: list[str]) -> Iterator[Ids]:
    """The batch call of tiktoken."""
    for batch in grouped(texts, LIST_CHARACTERS):
        yield from tokenizer._bpe.encode_ordinary_batch(batch, num_threads=machine.cores())


ALONE: dict[str, Callable[..., Iterator[Ids]]] = {"bpe": bpe_alone, "gpt2": gpt2_alone}


def tokenizers(texts: list[str], vocab: int, gpt2_files: Path | None) -> dict[str, Tokenizer]:
    found: dict[str, Tokenizer] = {"bpe": BPETokenizer.train(up_to(texts, TRAINING_CHARACTERS), vocab)}
    return found if gpt2_files is None else {**found, "gpt2": GPT2Tokenizer(gpt2_files)}


def prepared(texts: list[str], tokenizer: Tokenizer, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    prepare(texts, tokenizer, folder, validation_fraction=0.0, group_characters=GROUP_CHARACTERS)


def check(kind: str, tokenizer: Tokenizer, texts: list[str], folder: Path) -> None:
    """Stop unless the shards hold the library's tokens and the ends of documents, and nothing else."""
    expected = ((*ids, tokenizer.end_of_document) for ids in ALONE[kind](tokenizer, texts))
    theirs = np.fromiter(chain.from_iterable(expected), dtype=np.int64)
    ours = np.concatenate([shard.tokens for shard in open_split(folder, "train")])
    if not np.array_equal(ours, theirs):
        raise SystemExit(f"{kind}: the shards differ from the library's tokens; nothing was timed")


def measure(kind: str, tokenizer: Tokenizer, texts: list[str], rounds: int) -> Seconds:
    """Seconds of each way on the clock and on all cores together, one way after the other in every round."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "data")
        ways: dict[str, Callable[[], None]] = {
            "library alone": lambda: [None for _ in ALONE[kind](tokenizer, texts)] and None,
            "prepare": lambda: prepared(texts, tokenizer, folder),
        }
        ways["prepare"]()
        check(kind, tokenizer, texts, folder)
        return in_turn({name: partial(clocked, way) for name, way in ways.items()}, rounds, warming=0)


def clocked(way: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock, and on all cores together."""
    wall, work = time.perf_counter(), worked()
    way()
    return time.perf_counter() - wall, worked() - work


def worked() -> float:
    """Seconds that this process and those it waited for kept a core busy."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def table(results: dict[str, Seconds], megabytes: float) -> str:
    """Medians; the work of all cores together also holds where others use the machine."""
    lines = [
        f"{'tokenizer':10} {'way':20} {'seconds':>8} {'MB/s':>7} {'vs library':>11} {'core-seconds':>13} {'vs':>6}"
    ]
    for kind, seconds in results.items():
        base_wall, base_work = (statistics.median(column) for column in zip(*seconds["library alone"], strict=True))
        for name, times in seconds.items():
            wall, work = (statistics.median(column) for column in zip(*times, strict=True))
            speed = f"{wall:8.2f} {megabytes / wall:7.2f} {base_wall / wall:10.2f}x"
            lines.append(f"{kind:10} {name:20} {speed} {work:13.2f} {base_work / work:5.2f}x")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--characters", type=int, default=100_000_000, help="how much of the installed Python to read")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens of the BPE")
    parser.add_argument("--gpt2-files", type=Path, default=None, help="folder with vocab.bpe and encoder.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=ALONE, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    texts = list(Corpus("python", packages=True, limit_characters=args.characters).documents())
    megabytes = sum(len(text.encode("utf-8", "replace")) for text in texts) / 1e6
    chosen = {
        kind: made for kind, made in tokenizers(texts, args.vocab, args.gpt2_files).items() if args.only in (None, kind)
    }
    results = {kind: measure(kind, made, texts, args.rounds) for kind, made in chosen.items()}
    print(f"{len(texts):,} documents, {megabytes:.1f} MB, {machine.cores()} cores; shards equal the library's tokens")
    print(table(results, megabytes))
    where = environment(chosen_device("cpu"), ("tokenizers", "tiktoken", "numpy")) | {"threads": machine.cores()}
    save({"environment": where, "megabytes": megabytes, "seconds": results}, args.json)


if __name__ == "__main__":
    main()
