"""Data from settings alone: made once, found again, and never mixed with other settings."""

import json
import shutil
import threading
from itertools import islice

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.storage import LOCK
from muonsw.lab.data import prepare as module
from muonsw.lab.data.corpus import DEFAULT_VOCAB, Corpus
from muonsw.lab.data.loader import TokenLoader, ValidationLoader
from muonsw.lab.data.prepare import (
    held_out_fraction,
    is_validation,
    locked,
    open_split,
    prepare_corpus,
    prepare_default,
)
from muonsw.lab.data.shards import load_tokenizer, read_record
from muonsw.lab.data.synthetic import MarkovSource
from muonsw.lab.data.tokenizers import BPETokenizer

SMALL = {"source": "synthetic", "vocab": 300, "limit_characters": 100_000}


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir() if path.name != LOCK}


def data_in(folder):
    return {name: data for name, (data, _) in contents(folder).items()}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare_default(folder, **SMALL)
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy, which a test may break."""
    return shutil.copytree(prepared, tmp_path / "data")


@pytest.fixture
def trainings(monkeypatch):
    """How often a tokenizer is trained."""
    counted, train = [], BPETokenizer.train
    monkeypatch.setattr(BPETokenizer, "train", lambda *given: counted.append(given) or train(*given))
    return counted


def test_the_default_can_be_trained_on(tmp_path):
    record = prepare_default(tmp_path, limit_characters=200_000)
    tokenizer = load_tokenizer(tmp_path)
    assert record.complete
    assert tokenizer.vocab_size == record.vocab_size == 1024
    assert TokenLoader(open_split(tmp_path, "train"), 64, 8, 0).batch_at(0)[0].shape == (8, 64)
    text = next(text for text in Corpus().documents() if not is_validation(text, record.validation_fraction))
    start = open_split(tmp_path, "train")[0].tokens[:200]
    assert text.startswith(tokenizer.decode(start)[:100])


def test_a_small_corpus_has_something_to_validate_on(folder):
    assert len(ValidationLoader(open_split(folder, "validation"), 64, 8)) > 0


def test_asking_again_touches_nothing_and_reads_nothing(folder, monkeypatch):
    before = contents(folder)
    monkeypatch.setattr(Corpus, "documents", None)
    record = prepare_default(folder, **SMALL)
    assert record.complete
    assert contents(folder) == before


def test_asking_again_repairs_what_is_missing(folder, trainings):
    before = data_in(folder)
    read_record(folder).paths(folder, "validation")[0].unlink()
    prepare_default(folder, **SMALL)
    assert data_in(folder) == before
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert not trainings, "the tokenizer was found in the folder"
    prepare_default(folder, **SMALL)
    assert len(trainings) == 1
    assert data_in(folder) == before, "training the tokenizer again gives the same one"


def test_an_interrupted_run_goes_on_with_its_tokenizer(folder, tmp_path, trainings):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_corpus(tmp_path / "again", Corpus(**SMALL), finished=stop)
    prepare_default(tmp_path / "again", **SMALL)
    assert len(trainings) == 1
    assert data_in(tmp_path / "again") == data_in(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"vocab": 310}, r"made_with\.vocab 300 \(now 310\)"),
        ({"limit_characters": 200_000}, r"corpus\.limit_characters 100000 \(now 200000\);"),
        ({"seed": 1}, r"corpus\.seed 0 \(now 1\);"),
        ({"tokenizer": "bytes", "vocab": DEFAULT_VOCAB}, r"made_with\.\w+ bpe \(now bytes\)"),
        ({"validation_fraction": 0.2}, r"validation_fraction 0\.05 \(now 0\.2\)"),
    ],
)
def test_other_settings_are_refused_before_any_work(folder, trainings, change, match):
    before = contents(folder)
    with pytest.raises(UsageError, match=f"holds data with other settings: {match}"):
        prepare_default(folder, **{**SMALL, **change})
    assert contents(folder) == before
    assert not trainings


def test_text_that_changed_under_its_tokenizer_is_noticed(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("the first text " * 100, encoding="utf-8")
    corpus = Corpus("text", files=(str(text),), vocab=300, validation_fraction=0.0)
    prepare_corpus(tmp_path / "data", corpus)
    text.write_text("another story " * 100, encoding="utf-8")
    with pytest.raises(UsageError, match="holds data with other settings: tokenizer"):
        prepare_corpus(tmp_path / "data", corpus)


def test_the_tokenizer_is_trained_on_a_bounded_part_that_is_not_held_out(tmp_path, monkeypatch):
    read, seen = [], Corpus("synthetic", limit_documents=400, vocab=300)
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 20_000)
    monkeypatch.setattr(
        BPETokenizer, "train", classmethod(lambda cls, texts, _: read.extend(texts) or cls(trained._definition))
    )
    trained = BPETokenizer.__new__(BPETokenizer)
    trained._definition = small_definition()
    prepare_corpus(tmp_path, seen)
    allowed = [text for text in seen.documents() if not is_validation(text, 0.05)]
    assert read == allowed[: len(read)]
    assert sum(map(len, read)) >= 20_000 > sum(map(len, read[:-1]))


def small_definition():
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([], trainer)
    return bpe.to_str()


def test_who_asks_for_a_folder_at_work_waits(folder):
    """The second asks while the first works; it gets the same data once that is done."""
    before, found = data_in(folder), []
    read_record(folder).paths(folder, "train")[0].unlink()
    waiting = threading.Thread(target=lambda: found.append(prepare_default(folder, **SMALL)))
    with locked(folder):
        with pytest.raises(UsageError, match="being prepared by another process"):
            prepare_default(folder, **SMALL, wait=0.0)
        waiting.start()
        waiting.join(0.2)
        assert not found
    waiting.join()
    assert found[0].complete
    assert data_in(folder) == before


def test_settings_without_sense_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--threads must be at least 1, got 0"):
        prepare_default(tmp_path, **SMALL, threads=0)
    with pytest.raises(UsageError, match="no file matches"):
        prepare_default(tmp_path / "no.txt", source="text", files=(f"{tmp_path}/no*",))


def test_the_record_says_where_documents_came_from(prepared):
    recipe = json.loads((prepared / "data.json").read_text(encoding="utf-8"))["recipe"]
    assert recipe["corpus"] == {"source": "synthetic", "seed": 0, "limit_documents": None, "limit_characters": 100_000}
    assert recipe["made_with"] == {"kind": "bpe", "vocab": 300, "training_characters": 4_194_304}


def words(characters, seed=0):
    """Paragraphs of a Markov chain, about so many characters of them."""
    lines = (text[start : start + 80] for text in MarkovSource(seed=seed) for start in range(0, len(text), 400))
    return "\n\n".join(islice(lines, characters // 82))


@pytest.mark.parametrize("characters", [5_000, 40_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
def test_one_text_file_has_a_twentieth_to_validate_on(tmp_path, characters):
    (tmp_path / "notes.txt").write_text(words(characters), encoding="utf-8")
    record = prepare_default(tmp_path / "data", vocab=300, source="text", files=(str(tmp_path / "notes.txt"),))
    train, held_out = record.tokens("train"), record.tokens("validation")
    # Documents are added until the share is reached, so that it is exceeded by less than the largest one, which is a
    # 32nd of a text or 2,048 characters; tokens are characters within the spread of this chain.
    largest = max(1 / 32, 2048 / characters)
    assert 0.045 < held_out / (train + held_out) < 1.1 * (0.05 + largest)


def test_text_files_get_the_same_split_whatever_their_number_and_order(tmp_path):
    texts = [f"{number} {words(3_000, seed=number)}" for number in range(20)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    fraction = held_out_fraction(texts)
    assert fraction == held_out_fraction(reversed(texts))
    assert 1 <= sum(is_validation(text, fraction) for text in texts) < 20


@pytest.mark.parametrize(
    ("name", "text", "characters"),
    [("line.txt", "one line", "8"), ("long.jsonl", json.dumps({"text": "word " * 20_000}), "100,000")],
)
def test_text_of_which_nothing_can_be_held_out_is_refused_before_any_work(tmp_path, name, text, characters):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"one document \({characters} characters\).*: give several documents"):
        prepare_default(tmp_path / "data", source="text", files=(str(tmp_path / name),))
    assert not (tmp_path / "data").exists()
