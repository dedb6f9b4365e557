"""Documents become shards once, and a second run only does what is missing."""

import os
from itertools import islice

import numpy as np
import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data import prepare as module
from muonsw.lab.data.loader import TokenLoader, ValidationLoader
from muonsw.lab.data.prepare import RECORD, is_validation, open_split, prepare, read_record
from muonsw.lab.data.shards import ShardError, verify_folder
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.data.tokenizers import ByteTokenizer
from tests.lab.data.small_shards import damage

DOCUMENTS = list(islice(MarkovSource(seed=0, mean_length=100.0), 200))
SETTINGS = {"validation_fraction": 0.1, "group_characters": 2000}


class Counting(ByteTokenizer):
    """Bytes, and how many documents were encoded; the process may be stopped at one."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.encoded, self.stop_at = 0, stop_at

    def encode(self, text):
        if self.encoded == self.stop_at:
            raise KeyboardInterrupt
        self.encoded += 1
        return super().encode(text)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def texts(folder, split):
    ids = np.concatenate([shard.tokens for shard in open_split(folder, split)])
    return ByteTokenizer().decode(ids).split("<|endoftext|>")[:-1]


@pytest.fixture
def folder(tmp_path):
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "data", **SETTINGS)
    return tmp_path / "data"


def test_every_document_is_in_its_split_in_order(folder):
    held_out = [is_validation(text, 0.1) for text in DOCUMENTS]
    assert texts(folder, "train") == [text for text, out in zip(DOCUMENTS, held_out, strict=True) if not out]
    assert texts(folder, "validation") == [text for text, out in zip(DOCUMENTS, held_out, strict=True) if out]
    assert 5 <= sum(held_out) <= 40, "about a tenth: 20 +- 5 deviations of 4.2"
    record = read_record(folder)
    assert record.complete
    assert len(record.groups) > 5
    assert sum(group.documents for group in record.groups) == len(DOCUMENTS)
    assert record.tokens("train") + record.tokens("validation") == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)
    assert not [checked.problem for checked in verify_folder(folder) if checked.problem]


def test_the_split_follows_the_text_alone(folder, tmp_path):
    prepare(reversed(DOCUMENTS), ByteTokenizer(), tmp_path / "reversed", validation_fraction=0.1)
    assert sorted(texts(folder, "validation")) == sorted(texts(tmp_path / "reversed", "validation"))
    assert {t for t in DOCUMENTS if is_validation(t, 0.1)} <= {t for t in DOCUMENTS if is_validation(t, 0.2)}
    assert not any(is_validation(text, 0.0) for text in DOCUMENTS)


def test_what_was_prepared_can_be_loaded(folder):
    loader = TokenLoader(open_split(folder, "train"), 32, 4, 0)
    assert loader.batch_at(10)[0].shape == (4, 32)
    assert len(ValidationLoader(open_split(folder, "validation"), 32, 4)) > 0


@pytest.mark.parametrize("stop_at", [0, 1, 30, 77, 199])
def test_a_stopped_run_goes_on_without_redoing_finished_shards(folder, tmp_path, stop_at):
    again, stopped = tmp_path / "again", Counting(stop_at)
    with pytest.raises(KeyboardInterrupt):
        prepare(DOCUMENTS, stopped, again, **SETTINGS)
    if stop_at > 40:
        with pytest.raises(UsageError, match="not prepared to the end"):
            open_split(again, "train")
    kept = sum(group.documents for group in read_record(again).groups) if (again / RECORD).exists() else 0
    resumed = Counting()
    prepare(DOCUMENTS, resumed, again, **SETTINGS)
    assert resumed.encoded == len(DOCUMENTS) - kept
    assert contents(again) == contents(folder)


def test_a_finished_folder_is_left_as_it_is(folder):
    before, counting, heard = contents(folder), Counting(), []
    record = prepare(DOCUMENTS, counting, folder, **SETTINGS, finished=heard.append)
    assert counting.encoded == 0
    assert tuple(heard) == record.groups
    assert contents(folder) == before


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: os.truncate(path, 10), damage])
def test_a_lost_cut_or_altered_shard_is_refused_and_made_again(folder, harm):
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


def test_a_kill_between_a_shard_and_its_record_changes_nothing_even_if_the_sizes_agree(folder, monkeypatch):
    """The shards of other texts have other names, so the record still speaks of its own."""
    before, swapped = contents(folder), [text.translate(str.maketrans("ab", "ba")) for text in DOCUMENTS]
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_record", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(swapped, ByteTokenizer(), folder, **SETTINGS)
    held_out = [is_validation(text, 0.1) for text in DOCUMENTS]
    assert texts(folder, "train") == [text for text, out in zip(DOCUMENTS, held_out, strict=True) if not out]
    prepare(DOCUMENTS, ByteTokenizer(), folder, **SETTINGS)
    assert contents(folder) == before


def stop(*_):
    raise KeyboardInterrupt


def test_other_settings_in_the_same_folder_are_refused(folder):
    before = contents(folder)
    with pytest.raises(UsageError, match=r"validation_fraction 0\.1 \(now 0\.2\); choose another folder"):
        prepare(DOCUMENTS, ByteTokenizer(), folder, **{**SETTINGS, "validation_fraction": 0.2})
    foreign = ByteTokenizer()
    foreign.identity = "0" * 64
    with pytest.raises(UsageError, match=f"tokenizer .*now {foreign.identity}"):
        prepare(DOCUMENTS, foreign, folder, **SETTINGS)
    assert contents(folder) == before


def test_what_cannot_be_used_is_named(tmp_path):
    with pytest.raises(UsageError, match="gave no document"):
        prepare([], ByteTokenizer(), tmp_path / "none")
    with pytest.raises(UsageError, match="holds no prepared data"):
        open_split(tmp_path, "train")
    prepare(["one"], ByteTokenizer(), tmp_path / "one", validation_fraction=0.0)
    with pytest.raises(UsageError, match="has no validation tokens"):
        open_split(tmp_path / "one", "validation")
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        prepare(["one"], ByteTokenizer(), tmp_path / "x", validation_fraction=1.0)


def test_documents_are_read_no_further_than_the_group_at_hand(tmp_path):
    read, done = [], []

    def stream():
        for text in DOCUMENTS:
            read.append(text)
            yield text

    def finished(group):
        done.append(group.documents)
        assert len(read) == sum(done)

    prepare(stream(), ByteTokenizer(), tmp_path, **SETTINGS, finished=finished)
    assert sum(done) == len(DOCUMENTS)
