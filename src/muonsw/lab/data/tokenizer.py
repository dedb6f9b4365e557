"""Tokenizers: raw bytes, a byte-level BPE trained on a corpus, and GPT-2's.

No text is encoded as the end-of-document token; only the code that joins documents writes it.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from muonsw import machine
from muonsw.lab.errors import UsageError, needed
from muonsw.lab.files import write_atomically

TokenIds: TypeAlias = npt.NDArray[np.uint32]

END_TEXT = "<|endoftext|>"
BYTES = 256
BPE_FILE = "tokenizer.json"
GPT2_FILES = ("vocab.bpe", "encoder.json")


class Tokenizer(ABC):
    """The interface of all tokenizers.

    Ids are below `vocab_size`, and the largest is the end of a document. `identity` is a hash of everything that
    decides the ids of a text.
    """

    kind: ClassVar[str]

    def __init__(self, vocab_size: int, *identity: str) -> None:
        self.vocab_size, self.end_of_document = vocab_size, vocab_size - 1
        self.identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of every text, without ends of documents; on all cores if the library can."""

    def encode(self, text: str) -> TokenIds:
        return self.encode_batch([text])[0]

    def save(self, folder: Path) -> dict[str, Any]:  # noqa: ARG002
        """Write the files that `restore` needs, and return the description that it needs."""
        return {"kind": self.kind, "files": None}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD, an end of document `<|endoftext|>`."""
        texts = (
            END_TEXT * len(list(run)) if is_end else self._decode_text(list(run))
            for is_end, run in groupby(map(int, ids), lambda token: token == self.end_of_document)
        )
        return "".join(texts)

    @abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """The text of ids without ends of documents."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, and 256 as the end of a document.

    Examples:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist(), tokenizer.decode([110, 195, 169, 256])
        ([110, 195, 169], 'né<|endoftext|>')
    """

    kind = "bytes"

    def __init__(self) -> None:
        super().__init__(BYTES + 1, "bytes")

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def _decode_text(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class BPETokenizer(Tokenizer):
    """A byte-level BPE in the JSON format of the `tokenizers` library; any text can be encoded.

    Its identity is a hash of that JSON, so it does not depend on the library's version.
    """

    kind = "bpe"

    def __init__(self, definition: str) -> None:
        canonical = json.dumps(json.loads(definition), sort_keys=True)
        self._definition, self._bpe = definition, _library("tokenizers").Tokenizer.from_str(definition)
        super().__init__(self._bpe.get_vocab_size() + 1, "bpe", canonical)

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn merges from documents, in one pass; a small corpus may give fewer tokens than `vocab_size`."""
        library = _library("tokenizers")
        bpe = library.Tokenizer(library.models.BPE())
        bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = library.decoders.ByteLevel()
        alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
        )
        bpe.train_from_iterator(documents, trainer)
        return cls(bpe.to_str())

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        _library("tokenizers")  # has its own error
        try:
            return cls(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises a bare Exception for other JSON
            reason = getattr(error, "strerror", None) or f"it is not a tokenizer of the tokenizers library ({error})"
            fix = "put the right file back, or prepare the data (or export the run) again"
            raise UsageError(f"{path} cannot be read: {reason}; {fix}") from error

    def save(self, folder: Path) -> dict[str, Any]:
        write_atomically(folder / BPE_FILE, self._definition)
        return {"kind": self.kind, "files": [BPE_FILE]}

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _decode_text(self, ids: list[int]) -> str:
        return str(self._bpe.decode(ids, skip_special_tokens=False))


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE by tiktoken.

    `files` is a folder with its `vocab.bpe` and `encoder.json`; with None, tiktoken downloads and caches them.
    """

    kind = "gpt2"

    def __init__(self, files: Path | None = None) -> None:
        tiktoken, self.files = _library("tiktoken"), files
        read = _library("tiktoken.load").data_gym_to_mergeable_bpe_ranks
        pattern = _library("tiktoken_ext.openai_public").r50k_pat_str
        try:
            if files is None:
                self._bpe = tiktoken.get_encoding("gpt2")
            else:
                # tiktoken caches files by path; the hashes keep it from using an older file with the same path.
                paths = [files / name for name in GPT2_FILES]
                hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
                ranks = read(*(str(path.resolve()) for path in paths), *hashes)
                special = {END_TEXT: len(ranks)}
                self._bpe = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        except Exception as error:  # the network and damaged files raise many kinds of errors
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
            fix = "pass --gpt2-files, a folder with GPT-2's vocab.bpe and encoder.json"
            raise UsageError(f"no GPT-2 vocabulary from {files or 'the network'} ({reason}): {fix}") from error
        size = self._bpe.n_vocab
        merges = (self._bpe.decode_single_token_bytes(token).hex() for token in range(size - 1))
        super().__init__(size, "tiktoken", self._bpe._pat_str, *merges)

    def save(self, folder: Path) -> dict[str, Any]:
        if self.files is None:
            return super().save(folder)
        if self.files.resolve() != folder.resolve():
            for name in GPT2_FILES:
                write_atomically(folder / name, (self.files / name).read_bytes())
        return {"kind": self.kind, "files": list(GPT2_FILES)}

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        encode = partial(self._bpe.encode_to_numpy, disallowed_special=())
        with ThreadPoolExecutor(machine.cores()) as pool:  # the library releases Python's lock
            return list(pool.map(encode, texts))

    def _decode_text(self, ids: list[int]) -> str:
        return str(self._bpe.decode(ids))


def restore(description: Mapping[str, Any], folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote."""
    match description.get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "bpe":
            return BPETokenizer.load(folder / BPE_FILE)
        case "gpt2":
            return GPT2Tokenizer(folder if description.get("files") else None)
    raise UsageError(f"{folder} does not say which tokenizer made it: prepare the data again")


def _library(name: str) -> Any:
    return needed(name, "this tokenizer needs", "lab")
