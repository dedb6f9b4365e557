"""A tokenizer beside the tokens it made, so that a folder of data can be trained on and read back by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from muonsw.lab.data.record import cannot_write, read_record
from muonsw.lab.data.tokenizers import GPT2_FILES, BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.storage import write_atomically

BPE_FILE = "tokenizer.json"
_LOADERS: dict[str, Callable[[Path, bool], Tokenizer]] = {
    "bytes": lambda _folder, _own: ByteTokenizer(),
    "bpe": lambda folder, _own: BPETokenizer.load(folder / BPE_FILE),
    "gpt2": lambda folder, own: GPT2Tokenizer(folder if own else None),
}


def store_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any] | None:
    """Write into a folder what rebuilding the tokenizer needs.

    Returns:
        `{"kind": "bytes" | "bpe" | "gpt2", "files": names in the folder, or None}`, and `None` for a tokenizer of
        another kind. GPT-2's has no files where its vocabulary came from tiktoken's download.
    """
    try:
        if isinstance(tokenizer, ByteTokenizer):
            return {"kind": "bytes", "files": None}
        if isinstance(tokenizer, BPETokenizer):
            tokenizer.save(folder / BPE_FILE)
            return {"kind": "bpe", "files": [BPE_FILE]}
        if isinstance(tokenizer, GPT2Tokenizer):
            return {"kind": "gpt2", "files": _copied(tokenizer.files, folder)}
    except OSError as error:
        raise cannot_write(folder, error) from error
    return None


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a prepared folder.

    Raises:
        UsageError: If the folder has no record, or what it holds is not the tokenizer on record.
    """
    record = read_record(folder)
    description = record.tokenizer_description
    if description is None or description.get("kind") not in _LOADERS:
        raise UsageError(f"{folder} does not say which tokenizer made it: prepare the data again")
    tokenizer = _LOADERS[description["kind"]](folder, description.get("files") is not None)
    if tokenizer.identity != record.tokenizer:
        ids = f"{tokenizer.identity[:12]}..., not {record.tokenizer[:12]}..."
        raise UsageError(f"the tokenizer in {folder} is not the one that made its tokens ({ids}): prepare them again")
    return tokenizer


def _copied(files: Path | None, folder: Path) -> list[str] | None:
    if files is None:
        return None
    if files.resolve() != folder.resolve():
        for name in GPT2_FILES:
            write_atomically(folder / name, (files / name).read_bytes())
    return list(GPT2_FILES)
