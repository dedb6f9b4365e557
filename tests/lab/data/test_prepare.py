"""Documents come in a fixed order, and a second run only encodes what is missing."""

import gzip
import json
import lzma
import shutil
import sys
import threading
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from muonsw.lab.data import prepare as module
from muonsw.lab.data.loader import load_tokenizer, open_split, read_record, verify_folder
from muonsw.lab.data.prepare import (
    Corpus,
    is_validation,
    pieces,
    prepare,
    prepare_corpus,
    python_texts,
)
from muonsw.lab.data.tokenizer import BPETokenizer, ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.files import LOCK, locked
from tests.lab.texts import markov_texts, write_texts

TEXTS = ["one\ntwo", "zwö", "third " * 5000, "ﬁn"]
ROWS = [{"text": text, "id": number} for number, text in enumerate([*TEXTS[:2], "", *TEXTS[2:]])]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
DOCUMENTS = [text[:100] for text in islice(markov_texts(seed=0), 200)]
SETTINGS = {"validation_fraction": 0.1, "group_characters": 2000}


# ---- Documents


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_parquet(path, rows, **options):
    pytest.importorskip("datasets")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return path


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def texts(*patterns, **settings):
    return list(Corpus("text", files=tuple(map(str, patterns)), **settings).documents())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"source": "text"}, "needs --files"),
        ({"tokenizer": "bytes", "vocab": 300}, "--vocab is for --tokenizer bpe"),
        ({"limit_characters": 0}, "--limit-characters"),
        ({"validation_fraction": float("nan")}, "got nan"),
    ],
)
def test_invalid_settings_are_refused(settings, match):
    with pytest.raises(UsageError, match=match):
        Corpus(**settings)


def test_python_files_are_sorted_and_without_tests_and_copies(tmp_path):
    files = {
        "b.py": "b",
        "a.py": "a",
        "pkg/copy_of_a.py": "a",
        "pkg/c.py": "c",
        "pkg/tests/test_c.py": "t",
        "site-packages/p.py": "p",
        "note.txt": "n",
        "latin.py": b"# coding: latin-1\n# \xe9",
        "broken.py": b"# \xe9",
        "unknown.py": b"# coding: nothing-known\n",
    }
    root = write(tmp_path, files)
    assert list(python_texts(root)) == ["a", "b", "# coding: latin-1\n# é", "c"]
    first, second = (list(islice(Corpus().documents(), 40)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 40


def test_text_files_of_every_kind_are_read_in_order(tmp_path, monkeypatch):
    files = {
        "b.txt": "plain",
        "a.md": "# mark",
        "empty.txt": "",
        "c.jsonl": json_lines(ROWS[:3]) + b"\n\n",
        "deep/er/e.txt": "deep",
        "windows.txt": b"\xef\xbb\xbfmarked",
        "windows.jsonl": b'\xef\xbb\xbf{"text": "marked \\ud800"}',
    }
    write(tmp_path, files)
    in_order = ["# mark", "plain", "one\ntwo", "zwö", "deep", "marked \ufffd", "marked"]
    assert texts(f"{tmp_path}/**/*.*") == in_order
    assert texts(tmp_path / "b.txt", f"{tmp_path}/*.txt") == ["plain", "marked"], "each file once"
    write(tmp_path, {"picture.png": "", ".hidden.txt": "h", "deep/.git/g.txt": "g"})
    assert texts(tmp_path) == in_order, "of a folder, what can be read and is not hidden"
    write(tmp_path, {"zipped.jsonl.gz": ""})
    monkeypatch.setitem(sys.modules, "datasets", None)
    for pattern, match in {
        "*.rst": r"no file matches .*rst: give \.txt",
        "picture.png": r"unknown kind of file: .*picture\.png; give \.txt",
        "zipped.jsonl.gz": r"zipped\.jsonl\.gz needs the package datasets: run pip install '\.\[data\]'",
    }.items():
        with pytest.raises(UsageError, match=match):
            Corpus(
                "text", files=(f"{tmp_path}/b.txt", f"{tmp_path}/{pattern}")
            ).documents()  # before the first document


@pytest.mark.parametrize("suffix", [*COMPRESS, ".parquet"])
def test_compression_changes_no_document(tmp_path, suffix):
    pytest.importorskip("datasets")
    if suffix == ".parquet":
        write_parquet(tmp_path / "[a].parquet", [*ROWS, {"text": None, "id": 9}], row_group_size=2)
    else:
        (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](json_lines(ROWS)))
    assert texts(tmp_path) == TEXTS


def test_memory_does_not_grow_with_a_text_file(tmp_path):
    text = "Zwölf Wörter.\r\n\r\n" * 2_000_000
    (tmp_path / "a.txt").write_bytes(text.encode())
    tracemalloc.start()
    try:
        assert sum(map(len, Corpus("text", files=(str(tmp_path / "a.txt"),)).documents())) == len(text)
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "x" * 300_000, "line\r\n\r\n" * 100_000])
def test_a_long_text_is_cut_into_documents_that_join_to_it(text):
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert len(cut) == 1 if len(text) <= 2048 else len(cut) >= min(64, len(text) // 2048)
    assert all(1024 <= len(piece) <= max(2048, min(len(text) // 64, 65536)) for piece in cut[:-1])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": "cu', ", line 2: not"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": 3}', ", line 2: not"),
        ("a.txt", b"\xff\xfe", " cannot be read"),
        ("a.jsonl.gz", gzip.compress(json_lines(ROWS), mtime=0)[:100], " cannot be read"),
        ("a.parquet", None, " cannot be read"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, problem):
    if content is None:
        content = write_parquet(tmp_path / name, ROWS).read_bytes()[:-100]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=f"{name}{problem}"):
        texts(tmp_path / name)


def test_a_dataset_is_streamed_in_order_and_named_if_it_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the library is imported
    hub = tmp_path / "hub"
    for part in range(3):
        rows = [{"text": f"page {number}", "url": "u"} for number in range(50 * part, 50 * part + 50)]
        (hub / "data").mkdir(parents=True, exist_ok=True)
        write_parquet(hub / "data" / f"{part:03}_00000.parquet", rows, row_group_size=20)
    expected = [f"page {number}" for number in range(150)]
    assert list(Corpus("fineweb", dataset=str(hub)).documents()) == expected
    assert list(Corpus("fineweb", dataset=str(hub), limit_characters=60).documents()) == expected[:10]
    (hub / "data" / "001_00000.parquet").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=rf"the dataset {hub} cannot be read"):
        list(Corpus("fineweb", dataset=str(hub)).documents())


# ---- Shards


class Counting(ByteTokenizer):
    """Counts encoded documents, and stops the process at one of them."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.encoded, self.stop_at = 0, stop_at

    def encode_batch(self, texts):
        self.encoded += len(texts)
        if self.stop_at is not None and self.encoded > self.stop_at:
            raise KeyboardInterrupt
        return super().encode_batch(texts)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != LOCK}


def texts_of(folder, split):
    ids = np.concatenate(open_split(folder, split))
    return load_tokenizer(folder).decode(ids).split("<|endoftext|>")[:-1]


@pytest.fixture
def folder(tmp_path):
    prepare(DOCUMENTS, ByteTokenizer(), tmp_path / "data", **SETTINGS)
    return tmp_path / "data"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small corpus, and a folder with its tokens."""
    folder = tmp_path_factory.mktemp("small")
    files = (str(write_texts(folder / "texts.jsonl", 200)),)
    corpus = Corpus("text", files=files, vocab=300, validation_fraction=0.05)
    prepare_corpus(folder / "data", corpus)
    return corpus, folder / "data"


@pytest.fixture
def default(small, tmp_path):
    """The corpus, and a copy of its tokens that a test may break."""
    return small[0], shutil.copytree(small[1], tmp_path / "default")


def test_every_document_is_in_its_split_in_order(folder, tmp_path):
    held_out = [text for text in DOCUMENTS if is_validation(text, 0.1)]
    assert texts_of(folder, "train") == [text for text in DOCUMENTS if text not in held_out]
    assert texts_of(folder, "validation") == held_out
    assert 5 <= len(held_out) <= 40, "about a tenth: 20 +- 5 deviations of 4.2"
    record = read_record(folder)
    assert record.complete
    assert len(record.groups) > 5
    assert record.documents == len(DOCUMENTS)
    assert record.tokens("train") + record.tokens("validation") == sum(map(len, DOCUMENTS)) + len(DOCUMENTS)
    assert not list(verify_folder(folder))
    prepare(reversed(DOCUMENTS), ByteTokenizer(), tmp_path / "reversed", validation_fraction=0.1)
    assert sorted(held_out) == sorted(texts_of(tmp_path / "reversed", "validation")), "the text alone decides"


def test_a_stopped_run_resumes_without_redoing_finished_groups(folder, tmp_path):
    again, stop_at = tmp_path / "again", 77
    with pytest.raises(KeyboardInterrupt):
        prepare(DOCUMENTS, Counting(stop_at), again, **SETTINGS)
    with pytest.raises(UsageError, match="not prepared to the end"):
        open_split(again, "train")
    finished, resumed, heard = read_record(again).documents, Counting(), []
    assert stop_at - 50 < finished <= stop_at, "a group has about 20 documents"
    record = prepare(DOCUMENTS, resumed, again, **SETTINGS, finished=heard.append)
    assert resumed.encoded == len(DOCUMENTS) - finished
    assert tuple(heard) == record.groups
    assert contents(again) == contents(folder)


def test_a_rerun_changes_nothing_and_repairs_missing_or_damaged_files(default, monkeypatch):
    corpus, folder = default
    before, times = contents(folder), {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "documents", None)
        assert prepare_corpus(folder, corpus).complete
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    next(iter(read_record(folder).shards(folder, "validation"))).unlink()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    prepare_corpus(folder, corpus)
    assert contents(folder) == before, "training the tokenizer again gives the same one"


def test_another_corpus_is_refused_before_any_work(small, monkeypatch):
    corpus, folder = small
    monkeypatch.setattr(BPETokenizer, "train", None)
    with pytest.raises(UsageError, match=r"corpus\.limit_characters None \(now 9\), made_with\.vocab 300 \(now 310\)"):
        prepare_corpus(folder, replace(corpus, vocab=310, limit_characters=9))


def test_an_option_that_this_version_lacks_must_be_unset(default):
    corpus, folder = default
    fields = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    for value in (None, False, 7):
        fields["recipe"]["corpus"]["limit_documents"] = value
        (folder / "data.json").write_text(json.dumps(fields), encoding="utf-8")
        with nullcontext() if not value else pytest.raises(UsageError, match=r"limit_documents 7 \(now missing\)"):
            prepare_corpus(folder, corpus)


def test_the_tokenizer_is_trained_on_a_bounded_part_that_is_not_held_out(tmp_path, monkeypatch):
    files = (str(write_texts(tmp_path / "texts.jsonl", 400)),)
    read, train, corpus = [], BPETokenizer.train, Corpus("text", files=files, vocab=300, validation_fraction=0.05)
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 20_000)
    monkeypatch.setattr(BPETokenizer, "train", lambda sample, vocab: read.extend(sample) or train(sample, vocab))
    prepare_corpus(tmp_path / "data", corpus)
    allowed = [text for text in corpus.documents() if not is_validation(text, 0.05)]
    assert read == allowed[: len(read)]
    assert sum(map(len, read)) >= 20_000 > sum(map(len, read[:-1]))


def test_a_second_process_waits_for_the_first(default):
    corpus, folder = default
    before, results = contents(folder), []
    next(iter(read_record(folder).shards(folder, "train"))).unlink()
    waiting = threading.Thread(target=lambda: results.append(prepare_corpus(folder, corpus)))
    with locked(folder, ""):
        with pytest.raises(UsageError, match="being prepared by another process: wait for it"):
            prepare_corpus(folder, corpus, wait=0.0)
        waiting.start()
        waiting.join(0.2)
        assert not results
    waiting.join()
    assert results[0].complete
    assert contents(folder) == before


def test_a_twentieth_of_a_text_file_is_held_out_unless_it_is_too_short(tmp_path):
    lines = (text[start : start + 80] for text in markov_texts(seed=0) for start in range(0, len(text), 400))
    (tmp_path / "notes.txt").write_text("\n\n".join(islice(lines, 250)), encoding="utf-8")
    record = prepare_corpus(tmp_path / "data", Corpus("text", files=(str(tmp_path / "notes.txt"),), vocab=300))
    train, held_out = record.tokens("train"), record.tokens("validation")
    # Documents of at most 2,048 of the 20,000 characters are added until the share is reached.
    assert 0.045 < held_out / (train + held_out) < 1.1 * (0.05 + 0.1)
    (tmp_path / "line.txt").write_text("one line", encoding="utf-8")
    with pytest.raises(UsageError, match="one document"):
        prepare_corpus(tmp_path / "line", Corpus("text", files=(str(tmp_path / "line.txt"),)))
    assert not (tmp_path / "line").exists()
