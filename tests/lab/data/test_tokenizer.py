"""Every tokenizer reproduces its text, never emits an end of document, and has a stable identity."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muonsw.lab.data.tokenizer import (
    BPE_FILE,
    END_TEXT,
    GPT2_FILES,
    BPETokenizer,
    ByteTokenizer,
    GPT2Tokenizer,
    restore,
)
from muonsw.lab.errors import UsageError

CORPUS = ["the quick brown fox jumps over the lazy dog. " * 20, "def the_function(there): return there\n" * 20]
FILES = {"bytes": None, "bpe": [BPE_FILE], "gpt2": list(GPT2_FILES)}


def gpt2_files(folder, merges=(("t", "h"), ("th", "e"), ("Ġ", "the"))):
    """A tiny vocabulary in the two files of GPT-2: bytes as printable characters, then merges in order."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    substitutes = [chr(256 + n) for n in range(256 - len(printable))]
    words = [chr(b) for b in printable] + substitutes + [first + second for first, second in merges] + [END_TEXT]
    folder.mkdir(exist_ok=True)
    (folder / "encoder.json").write_text(json.dumps({word: n for n, word in enumerate(words)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def make(kind, folder):
    if kind == "bytes":
        return ByteTokenizer()
    pytest.importorskip({"bpe": "tokenizers", "gpt2": "tiktoken"}[kind])
    return BPETokenizer.train(CORPUS, 300) if kind == "bpe" else GPT2Tokenizer(gpt2_files(folder))


@pytest.fixture(params=FILES, scope="module")
def tokenizer(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=100, deadline=None)
@given(text=st.text())
@example("né 日本 🎉\0\ufeff")
@example(f"a{END_TEXT}b")
@example("x" * 5000)
def test_any_text_comes_back_and_none_becomes_the_end_of_a_document(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert all(ids < tokenizer.end_of_document)
    assert tokenizer.decode(ids) == text


def test_the_end_of_a_document_is_shown_and_broken_bytes_are_replaced(tokenizer):
    assert tokenizer.end_of_document == tokenizer.vocab_size - 1
    end = tokenizer.end_of_document
    assert tokenizer.decode([*tokenizer.encode("one"), end, end, *tokenizer.encode("two")]) == f"one{END_TEXT * 2}two"
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("é")[:1])


def test_a_batch_is_every_text_by_itself(tokenizer):
    texts = [*CORPUS, "", "zwö " * 100, END_TEXT] * 10
    batch = tokenizer.encode_batch(texts)
    assert all(ids.dtype == np.uint32 for ids in batch)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("kind", FILES)
def test_a_saved_tokenizer_is_the_same(kind, tmp_path):
    tokenizer = make(kind, tmp_path / "origin")
    (tmp_path / "saved").mkdir()
    description = tokenizer.save(tmp_path / "saved")
    assert description == {"kind": kind, "files": FILES[kind]}
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == sorted(FILES[kind] or [])
    restored = restore(description, tmp_path / "saved")
    assert restored.identity == tokenizer.identity == make(kind, tmp_path / "second").identity
    assert restored.encode(CORPUS[0]).tolist() == tokenizer.encode(CORPUS[0]).tolist()


def test_identities_tell_tokenizers_apart_and_never_change(tmp_path):
    """Every prepared folder records one."""
    tokenizers = [make(kind, tmp_path) for kind in FILES]
    assert tokenizers[0].identity == "d72b15d3703053c31cd73973181b135f546669d5f0cd69893fd4f3bdd1aaf98b"
    assert tokenizers[2].identity == "ab9165e5f0f602df19307d402a1e2a0a37e6d8de15e726806e31ca5eb381a715"
    tokenizers.append(BPETokenizer.train(CORPUS, 299))
    tokenizers.append(GPT2Tokenizer(gpt2_files(tmp_path / "reordered", (("Ġ", "t"), ("t", "h"), ("th", "e")))))
    assert len({tokenizer.identity for tokenizer in tokenizers}) == len(tokenizers)


def test_gpt2_merges_apply_in_order_and_are_read_again_if_the_files_change(tmp_path):
    tokenizer = make("gpt2", tmp_path)
    assert tokenizer.encode("the the").tolist() == [257, 258]
    assert tokenizer.vocab_size == 260
    assert GPT2Tokenizer(gpt2_files(tmp_path, (("a", "b"),))).vocab_size == 258
    with pytest.raises(UsageError, match=r"nowhere .*vocab\.bpe and encoder\.json"):
        GPT2Tokenizer(tmp_path / "nowhere")
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nthere is\n", encoding="utf-8")
    with pytest.raises(UsageError, match="no GPT-2 vocabulary"):
        GPT2Tokenizer(tmp_path)
