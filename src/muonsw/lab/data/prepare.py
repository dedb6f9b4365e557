"""Documents to training and validation shards, in groups, so that memory is bounded and a killed run can resume.

A group is a stretch of consecutive documents; where it ends depends on their lengths alone. The record of finished
groups is written after each one, so a second run over the same documents only encodes what is missing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from muonsw.lab.config import differences
from muonsw.lab.data import shards
from muonsw.lab.data.documents import TRAINING_CHARACTERS, Corpus, Source, up_to
from muonsw.lab.data.shards import RECORD, RERUN, SPLITS, DataRecord, Group, Split, read_record, save_record, shard_path
from muonsw.lab.data.tokenizer import BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.files import locked, replacing

# What is encoded at a time: libraries need some hundred bytes for a token, so this keeps them below a gigabyte.
BATCH_CHARACTERS = 1 << 22
# Small corpora get several shards, so that a killed run loses little; large ones not too many to be open at once.
_SHARD_CHARACTERS: dict[Source, int] = {"python": 1 << 22, "synthetic": 1 << 22, "text": 1 << 24, "fineweb": 1 << 26}
_HELD_OUT: dict[Source, float] = {"python": 0.05, "synthetic": 0.05, "fineweb": 0.001}
# Of text files a share of the characters, small and large: a loss on a few held-out pages means little. This many
# characters are large, and no more are read to find the share.
SMALL_SHARE, LARGE_SHARE = 0.05, 0.01
_LARGE_CHARACTERS = 1 << 24
NO_DOCUMENT = "the source gave no document: check its path, and whether its files are empty"


def prepare_default(folder: Path, *, wait: float = 600.0, **settings: Any) -> DataRecord:
    """Prepare a folder once; an undamaged one with these settings (fields of `Corpus`) is taken as it is.

    Several processes may ask for the same folder: one prepares it, and the others wait.
    """
    corpus = Corpus(**settings)
    if (folder / RECORD).exists():
        record = read_record(folder)
        same = {**_sizes(corpus), **corpus.recipe()}.items() <= record.settings.items()
        if same and not any(shards.verify_folder(folder)):
            return record
    return prepare_corpus(folder, corpus, wait=wait)


def prepare_corpus(
    folder: Path, corpus: Corpus, *, wait: float = 0.0, finished: Callable[[Group], None] = lambda _: None
) -> DataRecord:
    """Make the tokenizer of a corpus, then its shards as `prepare` does."""
    sizes, recipe, trained_on = _sizes(corpus), corpus.recipe(), None
    _earlier_groups(folder, {**sizes, **recipe})  # refuses other data before the tokenizer is made
    tokenizer: Tokenizer
    if corpus.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif corpus.tokenizer == "gpt2":
        tokenizer = GPT2Tokenizer(corpus.gpt2_files)
    else:
        allowed = (text for text in corpus.documents() if not is_validation(text, sizes["validation_fraction"]))
        sample = list(up_to(allowed, TRAINING_CHARACTERS))
        trained_on, _ = digest_of(sample)
        tokenizer = BPETokenizer.train(sample, corpus.vocab)
    recipe["trained_on"] = trained_on
    return prepare(corpus.documents(), tokenizer, folder, **sizes, recipe=recipe, wait=wait, finished=finished)


def _sizes(corpus: Corpus) -> dict[str, Any]:
    """The held-out share and the size of a group: those given, or those of the source."""
    fraction = corpus.validation_fraction
    if fraction is None:
        text = corpus.source == "text"
        fraction = held_out_fraction(corpus.documents()) if text else _HELD_OUT[corpus.source]
    characters = corpus.group_characters or _SHARD_CHARACTERS[corpus.source]
    return {"validation_fraction": fraction, "group_characters": characters}


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float = 0.01,
    group_characters: int = 1 << 24,
    recipe: dict[str, Any] | None = None,
    wait: float = 0.0,
    finished: Callable[[Group], None] = lambda _: None,
) -> DataRecord:
    """Encode documents, in a fixed order, into the shards of a folder, each followed by an end of document.

    What an earlier run with the same settings finished is kept. A share of the documents, chosen by a hash of their
    text, is held out. One group of documents is in memory at a time; it ends with the document that reaches
    `group_characters`. `finished` is called after every group, those of an earlier run included.

    Raises:
        UsageError: If there is no document, or the folder cannot be written, holds data with other settings (`recipe`
            included), or is being prepared by another process for longer than `wait` seconds.
    """
    record = DataRecord(tokenizer.identity, tokenizer.vocab_size, validation_fraction, group_characters, recipe=recipe)
    documents = iter(documents)
    if (first := next(documents, None)) is None:
        raise UsageError(NO_DOCUMENT)
    busy = f"{folder} is being prepared by another process: wait for it to end, or choose another folder"
    with locked(folder, busy, wait=wait):
        earlier = _earlier_groups(folder, record.settings)
        record = replace(record, tokenizer_description=tokenizer.save(folder))
        if not earlier:
            save_record(folder, record)
        groups: list[Group] = []
        for number, texts in enumerate(grouped(chain([first], documents), group_characters)):
            digest, size = digest_of(texts)
            group = earlier[number] if number < len(earlier) else None
            if group is None or group.digest != digest or any(shards.problems(folder, number, group, record)):
                group = _write_group(folder, record, number, Group(digest, len(texts), {}, {}, size), texts, tokenizer)
                # Later groups stay on record until their documents have been compared.
                save_record(folder, replace(record, groups=(*groups, group, *earlier[number + 1 :])))
            groups.append(group)
            finished(group)
        record = replace(record, groups=tuple(groups), complete=True)
        save_record(folder, record)
        # Shards of documents that have changed since they were written.
        for split in SPLITS:
            for path in set(folder.glob(f"{split}-*.tokens")) - set(record.paths(folder, split)):
                path.unlink()
    return record


def _earlier_groups(folder: Path, settings: dict[str, Any]) -> tuple[Group, ...]:
    """The groups that a folder holds; settings that both sides have must be equal."""
    if not (folder / RECORD).exists() or not (record := read_record(folder)).groups:
        return ()
    shared = [name for name in settings if name in record.settings]
    before, now = ({name: each[name] for name in shared} for each in (record.settings, settings))
    if changed := differences(before, now):
        different = ", ".join(f"{name} {old} (now {new})" for name, (old, new) in changed.items())
        raise UsageError(f"{folder} holds data with other settings: {different}; choose another folder or delete it")
    return record.groups


def _write_group(
    folder: Path, record: DataRecord, number: int, group: Group, texts: Sequence[str], tokenizer: Tokenizer
) -> Group:
    """Write the shards of a group, one for each split that got documents, and add their sizes and checksums."""
    parts: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for text in texts:
        parts["validation" if is_validation(text, record.validation_fraction) else "train"].append(text)
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    tokens: dict[Split, int] = {}
    checksums: dict[Split, str] = {}
    for split, part in parts.items():
        if not part:
            continue
        checksum, count = hashlib.sha256(), 0
        with replacing(shard_path(folder, split, number, group), remedy=RERUN) as file:
            for batch in grouped(part, BATCH_CHARACTERS):
                ids = np.concatenate([each for document in tokenizer.encode_batch(batch) for each in (document, end)])
                data = ids.astype(record.dtype).tobytes()
                checksum.update(data)
                file.write(data)
                count += ids.size
        tokens[split], checksums[split] = count, checksum.hexdigest()
    return replace(group, tokens=tokens, checksums=checksums)


def grouped(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Consecutive documents together; a group ends with the document that reaches this many characters."""
    rest = iter(documents)
    while group := list(up_to(rest, characters)):
        yield group


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone, so copies of it are never on both sides."""
    return _lot(text) < fraction * 2.0**64


def _lot(text: str) -> int:
    digest = hashlib.blake2b(_utf8(text), digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "little")


def held_out_fraction(documents: Iterable[str]) -> float:
    """The fraction for `is_validation` that holds out at least 5% of the characters of a text, 1% of a large one.

    At least one document is held out and at least one is not, however few there are.
    """
    sizes: Counter[int] = Counter()
    for text in up_to(documents, _LARGE_CHARACTERS):
        sizes[_lot(text)] += len(text)
    if not sizes:
        raise UsageError(NO_DOCUMENT)
    total, held_out = sum(sizes.values()), 0
    share = SMALL_SHARE if total < _LARGE_CHARACTERS else LARGE_SHARE
    *candidates, _largest = sorted(sizes)
    if not candidates:
        fix = "give several documents, or a text file of 12 kB or more"
        nothing = "`muonsw data prepare` with --validation-fraction 0 holds out nothing"
        raise UsageError(
            f"one document ({total:,} characters) cannot be both trained on and held out: {fix} ({nothing})"
        )
    for lot in candidates:
        held_out += sizes[lot]
        if held_out >= share * total:
            break
    return float(np.nextafter(lot / 2.0**64, 1.0))


def digest_of(texts: Iterable[str]) -> tuple[str, int]:
    """A hash of documents, and their size in UTF-8."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    for data in map(_utf8, texts):
        digest.update(len(data).to_bytes(8, "little"))  # tells ["ab", "c"] from ["a", "bc"]
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
