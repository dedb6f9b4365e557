"""A prepared folder carries its tokenizer, and notices when it is not the one that made the tokens."""

import os
from pathlib import Path

import numpy as np
import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.prepare import open_split, prepare, read_record
from muonsw.lab.data.shards import load_tokenizer
from muonsw.lab.data.tokenizers import BPE_FILE, GPT2_FILES, BPETokenizer, ByteTokenizer, GPT2Tokenizer
from tests.lab.data.test_tokenizers import CORPUS, gpt2_files

GPT2 = os.environ.get("MUONSW_GPT2_FILES")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))


def make(kind, folder):
    if kind == "bytes":
        return ByteTokenizer()
    pytest.importorskip({"bpe": "tokenizers", "gpt2": "tiktoken"}[kind])
    return BPETokenizer.train(CORPUS, 300) if kind == "bpe" else GPT2Tokenizer(gpt2_files(folder))


@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
def test_a_moved_folder_rebuilds_its_tokenizer(tmp_path, kind):
    tokenizer = make(kind, tmp_path / "origin")
    prepare(CORPUS, tokenizer, tmp_path / "data", validation_fraction=0.0)
    for path in (tmp_path / "origin").glob("*"):
        path.unlink()
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    loaded = load_tokenizer(moved)
    assert type(loaded) is type(tokenizer)
    assert loaded.identity == tokenizer.identity == read_record(moved).tokenizer
    ids = np.concatenate([shard.tokens for shard in open_split(moved, "train")])
    assert loaded.decode(ids).split("<|endoftext|>") == [*CORPUS, ""]
    files = {"bytes": None, "bpe": [BPE_FILE], "gpt2": list(GPT2_FILES)}[kind]
    assert read_record(moved).tokenizer_description == {"kind": kind, "files": files}
    assert all((moved / name).is_file() for name in files or [])


@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
def test_batches_and_threads_change_no_token(tmp_path, kind):
    tokenizer = make(kind, tmp_path / "origin")
    texts = [*CORPUS, "", "lone \ud800 surrogate", "zwö " * 100, "<|endoftext|>"] * 10
    expected = [tokenizer.encode(text).tolist() for text in texts]
    for threads in (1, 2):
        batch = tokenizer.encode_batch(texts, threads=threads)
        assert all(ids.dtype == np.uint32 for ids in batch)
        assert [ids.tolist() for ids in batch] == expected


@pytest.mark.parametrize("before", [None, "true", "false"])
def test_batches_leave_the_environment_alone(monkeypatch, before):
    tokenizer = make("bpe", None)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    tokenizer.encode_batch(CORPUS)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(tmp_path):
    prepare(CORPUS, make("bpe", None), tmp_path, validation_fraction=0.0)
    BPETokenizer.train(CORPUS, 280).save(tmp_path / BPE_FILE)
    with pytest.raises(UsageError, match="is not the one that made its tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / BPE_FILE).unlink()
    with pytest.raises(UsageError, match=rf"{BPE_FILE} cannot be read: No such file or directory; put the right"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="holds no prepared data"):
        load_tokenizer(tmp_path / "elsewhere")


def test_a_tokenizer_of_another_kind_is_not_made_up(tmp_path):
    class Other:
        """Bytes by another name, as someone else's class."""

        vocab_size, end_of_document, identity = 257, 256, "ab" * 32
        encode_batch = ByteTokenizer().encode_batch

    prepare(CORPUS, Other(), tmp_path, validation_fraction=0.0)
    assert len(open_split(tmp_path, "train")) == 1
    with pytest.raises(UsageError, match="does not say which tokenizer made it"):
        load_tokenizer(tmp_path)


@pytest.mark.skipif(GPT2 is None, reason="MUONSW_GPT2_FILES names no folder with GPT-2's files")
def test_the_real_gpt2_is_copied_with_the_data(tmp_path):
    prepare(CORPUS, GPT2Tokenizer(Path(GPT2)), tmp_path / "data", validation_fraction=0.0)
    loaded = load_tokenizer(tmp_path / "data")
    assert loaded.vocab_size == 50_257
    ids = np.concatenate([shard.tokens for shard in open_split(tmp_path / "data", "train")])
    assert loaded.decode(ids).split("<|endoftext|>") == [*CORPUS, ""]
