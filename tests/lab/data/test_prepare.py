"""Documents become shards once, a second run only does what is missing, and settings are never mixed."""

import json
import os
import shutil
import threading
from itertools import islice

import numpy as np
import pytest

from muonsw.lab.data import prepare as module
from muonsw.lab.data.loader import RECORD, ShardError, load_tokenizer, open_split, read_record, verify_folder
from muonsw.lab.data.prepare import (
    DEFAULT_VOCAB,
    Corpus,
    MarkovSource,
    held_out_fraction,
    is_validation,
    prepare,
    prepare_corpus,
    prepare_default,
)
from muonsw.lab.data.tokenizer import BPETokenizer, ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.files import LOCK, locked

DOCUMENTS = list(islice(MarkovSource(seed=0, mean_length=100.0), 200))
SETTINGS = {"validation_fraction": 0.1, "group_characters": 2000}
SMALL = {"source": "synthetic", "vocab": 300, "limit_characters": 100_000}


class Counting(ByteTokenizer):
    """Bytes, and how many documents were encoded; stops the process at one of them."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.encoded, self.stop_at = 0, stop_at

    def encode(self, text):
        if self.encoded == self.stop_at:
            raise KeyboardInterrupt
        self.encoded += 1
        return super().encode(text)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}


def texts(folder, split):
    ids = np.concatenate([shard.tokens for shard in open_split(folder, split)])
    return load_tokenizer(folder).decode(ids).split("<|endoftext|>")[:-1]


def words(characters, seed=0):
    """Paragraphs of a Markov chain, about this many characters of them."""
    lines = (text[start : start + 80] for text in MarkovSource(seed=seed) for start in range(0, len(text), 400))
    return "\n\n".join(islice(lines, characters // 82))


def stop(*_):
    raise KeyboardInterrupt


@pytest.fixture
def folder(tmp_path):
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "data", **SETTINGS)
    return tmp_path / "data"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare_default(folder, **SMALL)
    return folder


@pytest.fixture
def default(prepared, tmp_path):
    """A copy, which a test may break."""
    return shutil.copytree(prepared, tmp_path / "default")


def test_every_document_is_in_its_split_in_order(folder):
    held_out = [text for text in DOCUMENTS if is_validation(text, 0.1)]
    assert texts(folder, "train") == [text for text in DOCUMENTS if text not in held_out]
    assert texts(folder, "validation") == held_out
    assert 5 <= len(held_out) <= 40, "about a tenth: 20 +- 5 deviations of 4.2"
    record = read_record(folder)
    assert record.complete
    assert len(record.groups) > 5
    assert record.documents == len(DOCUMENTS)
    assert record.tokens("train") + record.tokens("validation") == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)
    assert not list(verify_folder(folder))


def test_the_split_follows_the_text_alone(folder, tmp_path):
    prepare(reversed(DOCUMENTS), ByteTokenizer(), tmp_path / "reversed", validation_fraction=0.1)
    assert sorted(texts(folder, "validation")) == sorted(texts(tmp_path / "reversed", "validation"))
    assert {t for t in DOCUMENTS if is_validation(t, 0.1)} <= {t for t in DOCUMENTS if is_validation(t, 0.2)}
    assert not any(is_validation(text, 0.0) for text in DOCUMENTS)


@pytest.mark.parametrize("stop_at", [0, 1, 77, 199])
def test_a_stopped_run_resumes_without_redoing_finished_groups(folder, tmp_path, stop_at):
    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        prepare(DOCUMENTS, Counting(stop_at), again, **SETTINGS)
    with pytest.raises(UsageError, match="not prepared to the end"):
        open_split(again, "train")
    finished, resumed = read_record(again).documents, Counting()
    assert stop_at - 50 < finished <= stop_at, "a group has about 20 documents"
    prepare(DOCUMENTS, resumed, again, **SETTINGS)
    assert resumed.encoded == len(DOCUMENTS) - finished
    assert contents(again) == contents(folder)


def test_a_finished_folder_is_left_as_it_is(folder):
    before, counting, heard = contents(folder), Counting(), []
    record = prepare(DOCUMENTS, counting, folder, **SETTINGS, finished=heard.append)
    assert counting.encoded == 0
    assert tuple(heard) == record.groups
    assert contents(folder) == before


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: os.truncate(path, 10),
        lambda path: path.write_bytes(path.read_bytes() + b"\0\0"),
        lambda path: path.write_bytes(path.read_bytes()[::-1]),
    ],
    ids=["lost", "cut", "longer", "altered"],
)
def test_a_broken_shard_is_refused_and_made_again(folder, harm):
    before, counting, path = contents(folder), Counting(), read_record(folder).paths(folder, "train")[1]
    harm(path)
    with pytest.raises(ShardError, match=path.name):
        open_split(folder, "train")
    prepare(DOCUMENTS, counting, folder, **SETTINGS)
    assert counting.encoded == read_record(folder).groups[1].documents
    assert contents(folder) == before


def test_changed_documents_are_encoded_again_and_nothing_else_is_left(folder):
    changed = ["new " + DOCUMENTS[0], *DOCUMENTS[1:100]]
    record = prepare(changed, ByteTokenizer(), folder, **SETTINGS)
    assert sorted(texts(folder, "train") + texts(folder, "validation")) == sorted(changed)
    assert set(folder.glob("*.tokens")) == {*record.paths(folder, "train"), *record.paths(folder, "validation")}


def test_other_settings_in_the_same_folder_are_refused(folder):
    before, foreign = contents(folder), ByteTokenizer()
    with pytest.raises(UsageError, match=r"validation_fraction 0\.1 \(now 0\.2\); choose another folder"):
        prepare(DOCUMENTS, ByteTokenizer(), folder, **{**SETTINGS, "validation_fraction": 0.2})
    foreign.identity = "0" * 64
    with pytest.raises(UsageError, match=f"tokenizer .*now {foreign.identity}"):
        prepare(DOCUMENTS, foreign, folder, **SETTINGS)
    assert contents(folder) == before


def test_no_document_is_an_error_before_a_folder_is_made(tmp_path):
    with pytest.raises(UsageError, match="gave no document"):
        prepare([], ByteTokenizer(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_asking_again_touches_nothing_and_reads_nothing(default, monkeypatch):
    before = {path: path.stat().st_mtime_ns for path in default.iterdir()}
    monkeypatch.setattr(Corpus, "documents", None)
    assert prepare_default(default, **SMALL).complete
    assert {path: path.stat().st_mtime_ns for path in default.iterdir()} == before


def test_asking_again_repairs_what_is_missing_or_damaged(default):
    before = contents(default)
    read_record(default).paths(default, "validation")[0].unlink()
    (default / "tokenizer.json").write_text("{}", encoding="utf-8")
    prepare_default(default, **SMALL)
    assert contents(default) == before, "training the tokenizer again gives the same one"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab": 310}, r"made_with\.vocab 300 \(now 310\)"),
        ({"seed": 1}, r"corpus\.seed 0 \(now 1\);"),
        ({"tokenizer": "bytes", "vocab": DEFAULT_VOCAB}, r"made_with\.\w+ bpe \(now bytes\)"),
        ({"validation_fraction": 0.2}, r"validation_fraction 0\.05 \(now 0\.2\)"),
    ],
)
def test_another_corpus_is_refused_before_any_work(default, monkeypatch, change, match):
    before = contents(default)
    monkeypatch.setattr(BPETokenizer, "train", None)
    with pytest.raises(UsageError, match=f"holds data with other settings: {match}"):
        prepare_default(default, **{**SMALL, **change})
    assert contents(default) == before


def test_text_that_changed_under_its_tokenizer_is_noticed(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("the first text " * 100, encoding="utf-8")
    corpus = Corpus("text", files=(str(text),), vocab=300, validation_fraction=0.0)
    prepare_corpus(tmp_path / "data", corpus)
    text.write_text("another story " * 100, encoding="utf-8")
    with pytest.raises(UsageError, match="holds data with other settings: tokenizer"):
        prepare_corpus(tmp_path / "data", corpus)


def test_the_tokenizer_is_trained_on_a_bounded_part_that_is_not_held_out(tmp_path, monkeypatch):
    read, train, corpus = [], BPETokenizer.train, Corpus("synthetic", limit_documents=400, vocab=300)
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 20_000)
    monkeypatch.setattr(BPETokenizer, "train", lambda sample, vocab: read.extend(sample) or train(sample, vocab))
    prepare_corpus(tmp_path, corpus)
    allowed = [text for text in corpus.documents() if not is_validation(text, 0.05)]
    assert read == allowed[: len(read)]
    assert sum(map(len, read)) >= 20_000 > sum(map(len, read[:-1]))


def test_a_second_process_waits_for_the_first(default):
    before, results = contents(default), []
    read_record(default).paths(default, "train")[0].unlink()
    waiting = threading.Thread(target=lambda: results.append(prepare_default(default, **SMALL)))
    with locked(default, ""):
        with pytest.raises(UsageError, match="being prepared by another process: wait for it"):
            prepare_default(default, **SMALL, wait=0.0)
        waiting.start()
        waiting.join(0.2)
        assert not results
    waiting.join()
    assert results[0].complete
    assert contents(default) == before


@pytest.mark.parametrize("characters", [5_000, 40_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_one_text_file_has_a_twentieth_to_validate_on(tmp_path, characters):
    (tmp_path / "notes.txt").write_text(words(characters), encoding="utf-8")
    record = prepare_default(tmp_path / "data", vocab=300, source="text", files=(str(tmp_path / "notes.txt"),))
    train, held_out = record.tokens("train"), record.tokens("validation")
    # Documents are added until the share is reached, so that it is exceeded by less than the largest one, which is a
    # 32nd of a text or 2,048 characters; tokens are characters within the spread of this chain.
    largest = max(1 / 32, 2048 / characters)
    assert 0.045 < held_out / (train + held_out) < 1.1 * (0.05 + largest)


def test_the_held_out_share_does_not_depend_on_the_order_of_the_texts():
    several = [f"{number} {words(3_000, seed=number)}" for number in range(20)]
    fraction = held_out_fraction(several)
    assert fraction == held_out_fraction(reversed(several))
    assert 1 <= sum(is_validation(text, fraction) for text in several) < 20


@pytest.mark.parametrize(
    ("name", "text", "characters"),
    [("line.txt", "one line", "8"), ("long.jsonl", json.dumps({"text": "word " * 20_000}), "100,000")],
)
def test_text_that_cannot_be_held_out_is_refused_before_any_work(tmp_path, name, text, characters):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"one document \({characters} characters\).*: give several documents"):
        prepare_default(tmp_path / "data", source="text", files=(str(tmp_path / name),))
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / RECORD).exists()
