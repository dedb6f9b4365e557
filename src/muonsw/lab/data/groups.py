"""A group of documents: where it ends, which of it is held out, and turning it into shards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from muonsw.lab.data.record import SPLITS, Group, Split, cannot_write, shard_path
from muonsw.lab.data.shards import Tokens, write_shard
from muonsw.lab.data.tokenizers import Tokenizer

# what is encoded at a time, for each thread: the libraries need some hundred bytes for a token while they work
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Job:
    """Everything but the tokenizer that decides a group's shards.

    Attributes:
        folder: Where the shards go.
        number: The group's place among the groups.
        texts: The documents.
        digest: A hash of them.
        bytes: Their size in UTF-8.
        validation_fraction: The share of documents that is held out.
    """

    folder: Path
    number: int
    texts: Sequence[str]
    digest: str
    bytes: int
    validation_fraction: float

    def write(self, tokenizer: Tokenizer, threads: int) -> Group:
        """Encode the documents, each followed by an end of document, into one shard for each split.

        Raises:
            UsageError: If a shard cannot be written, for example because the disk is full.
        """
        group = Group(self.digest, len(self.texts), tokens={}, checksums={}, bytes=self.bytes)
        for split, texts in self._sides().items():
            path = shard_path(self.folder, split, self.number)
            try:
                if not texts:
                    path.unlink(missing_ok=True)
                    continue
                pieces = encoded(texts, tokenizer, threads)
                header = write_shard(path, pieces, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.identity)
            except OSError as error:
                raise cannot_write(path, error) from error
            group.tokens[split], group.checksums[split] = header.count, header.checksum
        return group

    def _sides(self) -> dict[Split, list[str]]:
        sides: dict[Split, list[str]] = {split: [] for split in SPLITS}
        for text in self.texts:
            sides["validation" if is_validation(text, self.validation_fraction) else "train"].append(text)
        return sides


def encoded(texts: Iterable[str], tokenizer: Tokenizer, threads: int = 1) -> Iterator[Tokens]:
    """The tokens of documents and their ends, in pieces of many documents."""
    end = np.array([tokenizer.end_of_document], dtype=np.uint32)
    for batch in grouped(texts, _BATCH_CHARACTERS * threads):
        ids = tokenizer.encode_batch(batch, threads=threads)
        yield np.concatenate([part for document in ids for part in (document, end)])


def grouped(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Consecutive documents together; a group ends with the document that reaches so many characters.

    Examples:
        >>> list(grouped(["ab", "c", "defg", "h"], 3))
        [['ab', 'c'], ['defg'], ['h']]
    """
    group: list[str] = []
    size = 0
    for text in documents:
        group.append(text)
        size += len(text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: decided by its text alone, so copies of it are never on both sides."""
    digest = hashlib.blake2b(_utf8(text), digest_size=8, person=b"validation").digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def digest_of(texts: Iterable[str]) -> tuple[str, int]:
    """A hash of documents, and how many bytes they have in UTF-8.

    Examples:
        >>> digest_of(["ab", "c"])[1], digest_of(["ab", "c"]) == digest_of(["a", "bc"])
        (3, False)
    """
    digest, size = hashlib.blake2b(digest_size=16), 0
    for text in texts:
        data = _utf8(text)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
