"""Every tokenizer gives back the text it was given, never invents an end of document, and knows who it is."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.tokenizers import END_TEXT, BPETokenizer, ByteTokenizer, GPT2Tokenizer, Tokenizer, padded_vocab

CORPUS = ["the quick brown fox jumps over the lazy dog. " * 20, "def the_function(there): return there\n" * 20]
NAMES = {"bytes": None, "bpe": "tokenizers", "gpt2": "tiktoken"}


def gpt2_files(folder, merges=(("t", "h"), ("th", "e"), ("Ġ", "the"))):
    """A tiny vocabulary in the two files of GPT-2: bytes as printable characters, then merges in order."""
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    rest = [chr(256 + n) for n in range(256 - len(printable))]
    words = [chr(b) for b in printable] + rest + [first + second for first, second in merges] + [END_TEXT]
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


def make(name, folder) -> Tokenizer:
    if NAMES[name]:
        pytest.importorskip(NAMES[name])
    if name == "bytes":
        return ByteTokenizer()
    return BPETokenizer.train(CORPUS, 300) if name == "bpe" else GPT2Tokenizer(gpt2_files(folder))


@pytest.fixture(params=NAMES, scope="module")
def tokenizer(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("tokenizer"))


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize(
    "text", ["", "\0", "\ufeff", "né 日本 🎉", "  \r\n\t  ", END_TEXT, f"a{END_TEXT}b", "x" * 5000]
)
def test_no_text_becomes_the_end_of_a_document(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_document not in ids
    assert tokenizer.decode(ids) == text


def test_the_end_of_a_document_is_shown(tokenizer):
    end = tokenizer.end_of_document
    assert tokenizer.decode([*tokenizer.encode("one"), end, end, *tokenizer.encode("two")]) == f"one{END_TEXT * 2}two"


def test_lone_surrogates_and_broken_bytes_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert "\ufffd" in tokenizer.decode(tokenizer.encode("é")[:1])


def test_sizes_fit_each_other(tokenizer):
    assert tokenizer.end_of_document == tokenizer.vocab_size - 1
    assert padded_vocab(tokenizer.vocab_size) % 64 == 0
    assert 0 <= padded_vocab(tokenizer.vocab_size) - tokenizer.vocab_size < 64
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match=f"token {bad} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([1, bad])


@pytest.mark.parametrize("name", NAMES)
def test_equal_tokenizers_have_equal_identities(name, tmp_path):
    first, second = make(name, tmp_path / "one"), make(name, tmp_path / "two")
    assert first.identity == second.identity
    assert len(bytes.fromhex(first.identity)) == 32


def test_identities_tell_tokenizers_apart(tmp_path):
    made = [make(name, tmp_path) for name in NAMES]
    made.append(BPETokenizer.train(CORPUS, 299))
    made.append(GPT2Tokenizer(gpt2_files(tmp_path / "reordered", (("Ġ", "t"), ("t", "h"), ("th", "e")))))
    assert len({tokenizer.identity for tokenizer in made}) == len(made)


def test_the_identity_of_bytes_is_pinned():
    """It is stored in every shard."""
    assert ByteTokenizer().identity == "d72b15d3703053c31cd73973181b135f546669d5f0cd69893fd4f3bdd1aaf98b"


def test_a_trained_tokenizer_is_saved_and_compresses(tmp_path):
    tokenizer = make("bpe", tmp_path)
    loaded = BPETokenizer.load(tokenizer.save(tmp_path / "tokenizer.json"))
    assert loaded.identity == tokenizer.identity
    assert loaded.encode(CORPUS[0]).tolist() == tokenizer.encode(CORPUS[0]).tolist()
    assert len(tokenizer.encode(CORPUS[0])) < len(CORPUS[0]) / 2
    assert tokenizer.vocab_size == 300
    assert BPETokenizer.train(["abc"], 10_000).vocab_size < 300, "a small corpus has few merges"


def test_a_tokenizer_needs_a_readable_file(tmp_path):
    pytest.importorskip("tokenizers")
    assert BPETokenizer.train(CORPUS, 257).vocab_size == 257
    (tmp_path / "broken.json").write_text('{"model": 1}', encoding="utf-8")
    for name in ("broken.json", "missing.json"):
        with pytest.raises(UsageError, match=name):
            BPETokenizer.load(tmp_path / name)


def test_merges_apply_in_order(tmp_path):
    tokenizer = make("gpt2", tmp_path)
    assert tokenizer.encode("the the").tolist() == [257, 258]
    assert tokenizer.vocab_size == 260


def test_a_vocabulary_that_changed_in_place_is_read_again(tmp_path):
    before = make("gpt2", tmp_path)
    after = GPT2Tokenizer(gpt2_files(tmp_path, (("a", "b"),)))
    assert after.vocab_size == 258
    assert after.identity != before.identity


def test_files_that_are_no_vocabulary_are_refused(tmp_path):
    pytest.importorskip("tiktoken")
    with pytest.raises(UsageError, match=r"nowhere .*vocab\.bpe and encoder\.json"):
        GPT2Tokenizer(tmp_path / "nowhere")
    files = gpt2_files(tmp_path)
    (files / "vocab.bpe").write_text("#version: 0.2\na b\n", encoding="utf-8")
    with pytest.raises(UsageError, match="no GPT-2 vocabulary could be read"):
        GPT2Tokenizer(files)


def test_a_failed_download_says_what_to_do(monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")

    def offline(_):
        raise ConnectionError

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(UsageError, match=r"ConnectionError.*folder with vocab\.bpe"):
        GPT2Tokenizer()


def test_a_missing_package_is_named(monkeypatch):
    for name in ("tokenizers", "tiktoken"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"needs the package tokenizers: run pip install"):
        BPETokenizer.train(CORPUS, 300)
    with pytest.raises(UsageError, match=r"needs the package tiktoken: run pip install"):
        GPT2Tokenizer()


@pytest.mark.skipif(
    "MUONSW_GPT2_FILES" not in os.environ, reason="MUONSW_GPT2_FILES names no folder with GPT-2's files"
)
def test_the_real_vocabulary_gives_the_known_ids():
    pytest.importorskip("tiktoken")
    tokenizer = GPT2Tokenizer(Path(os.environ["MUONSW_GPT2_FILES"]))
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (50_257, 50_256)
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert tokenizer.encode("def f(x):\n    return x").tolist() == [
        4299,
        277,
        7,
        87,
        2599,
        198,
        220,
        220,
        220,
        1441,
        2124,
    ]
    assert tokenizer.decode(tokenizer.encode("naïve 日本 🎉")) == "naïve 日本 🎉"
