"""Text to token ids and back: raw bytes, a byte-level BPE trained on a corpus, and GPT-2's.

Text never becomes the end-of-document token, whatever it spells; only the code that joins documents writes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from muonsw.lab.base.errors import UsageError, needed
from muonsw.lab.base.storage import parse_json, write_atomically

TokenIds: TypeAlias = npt.NDArray[np.uint32]

END_TEXT = "<|endoftext|>"
BYTES = 256
# tensor cores want the vocabulary in multiples of 64: GPT-2's 50,257 become 50,304
VOCAB_MULTIPLE = 64
BPE_FILE = "tokenizer.json"
GPT2_FILES = ("vocab.bpe", "encoder.json")
FILES = {"bpe": (BPE_FILE,), "gpt2": GPT2_FILES}


def padded_vocab(vocab_size: int) -> int:
    """The rows of an embedding for so many tokens.

    Examples:
        >>> padded_vocab(50_257)
        50304
    """
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


class Tokenizer(ABC):
    """What the data and the sampling code know of a tokenizer.

    Every id is below `vocab_size`, and the last one is the end of a document. `identity`, 64 hexadecimal digits, is
    equal for two tokenizers exactly if everything that decides their ids is equal.
    """

    def __init__(self, vocab_size: int, identity: str) -> None:
        self.vocab_size, self.identity = vocab_size, identity
        self.end_of_document = vocab_size - 1

    @abstractmethod
    def encode(self, text: str) -> TokenIds:
        """The ids of a text, without an end of document."""

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[TokenIds]:  # noqa: ARG002
        """`encode` of every text, on so many threads where the library can."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD, an end of document `<|endoftext|>`."""
        tokens = [int(token) for token in ids]
        if bad := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(f"token {bad[0]} is outside the vocabulary of {self.vocab_size}")
        texts = (
            END_TEXT * len(list(run)) if is_end else self._decode_text(list(run))
            for is_end, run in groupby(tokens, lambda token: token == self.end_of_document)
        )
        return "".join(texts)

    @abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """The text of ids without any end of document among them."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, and 256 as the end of a document.

    Examples:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.encode("né").tolist(), tokenizer.decode([110, 195, 169, 256])
        ([110, 195, 169], 'né<|endoftext|>')
    """

    def __init__(self) -> None:
        super().__init__(BYTES + 1, _identity("bytes"))

    def encode(self, text: str) -> TokenIds:
        """The bytes of the text."""
        return np.frombuffer(_without_surrogates(text).encode(), dtype=np.uint8).astype(np.uint32)

    def _decode_text(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


class BPETokenizer(Tokenizer):
    """A byte-level BPE in the JSON of the `tokenizers` library; any text can be encoded.

    Its identity is taken from that JSON, so it does not change with the library.
    """

    def __init__(self, definition: str) -> None:
        canonical = json.dumps(parse_json(definition), sort_keys=True)
        self._definition, self._bpe = definition, _library("tokenizers").Tokenizer.from_str(definition)
        super().__init__(self._bpe.get_vocab_size() + 1, _identity("bpe", canonical))

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int) -> BPETokenizer:
        """Learn merges from documents, which are read once; a small corpus may give fewer tokens than asked for."""
        library = _library("tokenizers")
        bpe = library.Tokenizer(library.models.BPE())
        bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = library.decoders.ByteLevel()
        alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
        )
        bpe.train_from_iterator(map(_without_surrogates, documents), trainer)
        return cls(bpe.to_str())

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        """Read what `save` wrote, or another byte-level BPE of the library."""
        try:
            return cls(path.read_text(encoding="utf-8"))
        except UsageError:
            raise
        except Exception as error:  # the library raises bare Exception for JSON that is no tokenizer
            fix = "put the right file back, or prepare the data (or export the run) again"
            reason = getattr(error, "strerror", None)
            wrong = f"cannot be read: {reason}" if reason else f"is not a tokenizer of the tokenizers library: {error}"
            raise UsageError(f"{path} {wrong}; {fix}") from error

    def save(self, path: Path) -> Path:
        """Write the JSON of the library."""
        return write_atomically(path, self._definition)

    def encode(self, text: str) -> TokenIds:
        """The ids of the text."""
        return np.array(self._bpe.encode(_without_surrogates(text), add_special_tokens=False).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[TokenIds]:
        """`encode` of every text; with more than 1 thread, on as many as the library takes."""
        clean = [_without_surrogates(text) for text in texts]
        with _parallelism(threads > 1):
            encodings = self._bpe.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def _decode_text(self, ids: list[int]) -> str:
        return str(self._bpe.decode(ids, skip_special_tokens=False))


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-level BPE through tiktoken: 50,257 ids, padded to 50,304.

    Its `vocab.bpe` and `encoder.json` are in the folder `files`; None lets tiktoken download (and cache) them.
    """

    def __init__(self, files: Path | None = None) -> None:
        tiktoken = _library("tiktoken")
        self.files = files
        if files is None:
            try:
                self._bpe = tiktoken.get_encoding("gpt2")
            except Exception as error:  # whatever the network stack raises
                reason, fix = type(error).__name__, "give a folder with vocab.bpe and encoder.json instead"
                raise UsageError(f"GPT-2's vocabulary could not be downloaded ({reason}): {fix}") from error
        else:
            ranks = _ranks(files)
            pattern = _library("tiktoken_ext.openai_public").r50k_pat_str
            special = {END_TEXT: len(ranks)}
            self._bpe = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        size = self._bpe.n_vocab
        merges = (self._bpe.decode_single_token_bytes(token).hex() for token in range(size - 1))
        super().__init__(size, _identity("tiktoken", self._bpe._pat_str, *merges))

    def encode(self, text: str) -> TokenIds:
        """The ids of the text."""
        ids: TokenIds = self._bpe.encode_to_numpy(_without_surrogates(text), disallowed_special=())
        return ids

    def encode_batch(self, texts: Sequence[str], *, threads: int = 1) -> list[TokenIds]:
        """`encode` of every text; the library lets go of Python's lock, so that threads run side by side."""
        if threads <= 1:
            return [self.encode(text) for text in texts]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.encode, texts))

    def _decode_text(self, ids: list[int]) -> str:
        return str(self._bpe.decode(ids))


def store(tokenizer: Tokenizer, folder: Path) -> dict[str, Any] | None:
    """Write into a folder what rebuilding the tokenizer needs.

    Returns:
        `{"kind": "bytes" | "bpe" | "gpt2", "files": names in the folder, or None}`, and `None` for a tokenizer of
        another kind. GPT-2's has no files where its vocabulary came from tiktoken's download.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return {"kind": "bytes", "files": None}
    if isinstance(tokenizer, BPETokenizer):
        tokenizer.save(folder / BPE_FILE)
        return {"kind": "bpe", "files": [BPE_FILE]}
    if not isinstance(tokenizer, GPT2Tokenizer):
        return None
    files = tokenizer.files
    if files is not None and files.resolve() != folder.resolve():
        for name in GPT2_FILES:
            write_atomically(folder / name, (files / name).read_bytes())
    return {"kind": "gpt2", "files": files and list(GPT2_FILES)}


def restore(description: Mapping[str, Any] | None, folder: Path) -> Tokenizer | None:
    """The tokenizer that `store` described; `None` if the description is of no known kind.

    Raises:
        UsageError: If its files in the folder are missing or damaged.
    """
    match (description or {}).get("kind"):
        case "bytes":
            return ByteTokenizer()
        case "bpe":
            return BPETokenizer.load(folder / BPE_FILE)
        case "gpt2":
            return GPT2Tokenizer(folder if (description or {}).get("files") else None)
    return None


def _ranks(files: Path) -> dict[bytes, int]:
    paths = [files / name for name in GPT2_FILES]
    try:
        # tiktoken caches by path alone; with the hash of today's file it never takes an older one of the same path
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
        names = [str(path.resolve()) for path in paths]
        ranks: dict[bytes, int] = _library("tiktoken.load").data_gym_to_mergeable_bpe_ranks(*names, *hashes)
    except UsageError:
        raise
    except Exception as error:  # a file that does not parse fails in many ways, an assertion among them
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        fix = "it must hold GPT-2's vocab.bpe and encoder.json"
        raise UsageError(f"no GPT-2 vocabulary could be read from {files} ({reason}): {fix}") from error
    return ranks


def _library(name: str) -> Any:
    return needed(name, "this tokenizer needs", "lab")


@contextmanager
def _parallelism(wanted: bool) -> Iterator[None]:
    """Let the tokenizers library use its threads or not; it reads this variable at every call."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if wanted else "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _identity(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _without_surrogates(text: str) -> str:
    """The text with lone surrogates, which JSON can hold and UTF-8 cannot, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
