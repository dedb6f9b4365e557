"""A corpus is settings: the same ones give the same documents, and those without sense are refused."""

import json
import os
import sys
from pathlib import Path

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.corpus import Corpus, fineweb_documents, python_roots, source_files
from muonsw.lab.data.synthetic import MarkovSource
from tests.lab.data.test_formats import write_parquet


def fineweb_rows(first, last):
    """Rows with the fields of FineWeb."""
    return [
        {
            "text": f"page {number} " * 20,
            "id": f"<urn:uuid:{number}>",
            "dump": "CC-MAIN-2024-10",
            "url": f"https://example.org/{number}",
            "date": "2024-02-20T22:51:33Z",
            "file_path": "s3://commoncrawl/crawl-data/x.warc.gz",
            "language": "en",
            "language_score": 0.97,
            "token_count": 60,
        }
        for number in range(first, last)
    ]


@pytest.fixture
def fineweb(tmp_path, monkeypatch):
    """A small local dataset in FineWeb's format, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the library is imported
    pytest.importorskip("datasets")
    folder = tmp_path / "fineweb" / "data"
    folder.mkdir(parents=True)
    for part in range(3):
        rows = fineweb_rows(50 * part, 50 * part + 50)
        write_parquet(folder / f"{part:03}_00000.parquet", rows, row_group_size=20, write_page_checksum=True)
    return tmp_path / "fineweb"


def test_fineweb_is_streamed_in_order(fineweb):
    expected = [row["text"] for row in fineweb_rows(0, 150)]
    corpus = Corpus("fineweb", dataset=str(fineweb))
    assert list(corpus.documents()) == expected == list(corpus.documents())
    assert list(Corpus("fineweb", dataset=str(fineweb), limit_documents=60).documents()) == expected[:60]
    assert corpus.size() is None


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda _: b"", lambda data: data[:50] + bytes(2000)])
def test_a_damaged_file_of_fineweb_is_named(fineweb, damage):
    path = fineweb / "data" / "001_00000.parquet"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UsageError, match=r"001_00000\.parquet cannot be read"):
        list(fineweb_documents(fineweb))


def test_fineweb_that_cannot_be_had_is_said(fineweb, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"the dataset unknown/dataset \(sample-10BT\) cannot be read"):
        list(fineweb_documents("unknown/dataset"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"needs the package datasets: run pip install '\.\[data\]'"):
        list(fineweb_documents(fineweb))


def test_limits_count_documents_and_characters():
    whole = [MarkovSource(3).document(number) for number in range(50)]
    assert list(Corpus("synthetic", seed=3, limit_documents=50).documents()) == whole
    for limit in (1, 1000, 5000, sum(map(len, whole[:20]))):
        taken = list(Corpus("synthetic", seed=3, limit_characters=limit).documents())
        assert taken == whole[: len(taken)]
        assert sum(map(len, taken)) >= limit > sum(map(len, taken[:-1]))
    both = Corpus("synthetic", seed=3, limit_documents=4, limit_characters=10**9)
    assert list(both.documents()) == whole[:4]


def test_the_standard_library_is_the_default_and_its_size_is_known():
    documents = list(Corpus().documents())
    assert documents == list(source_files(python_roots()))
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in documents)
    assert size <= Corpus().size() < 1.2 * size


def test_text_files_are_recorded_by_their_place(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abc", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    corpus = Corpus("text", files=("*.txt",))
    assert list(corpus.documents()) == ["abc"]
    assert corpus.recipe()["corpus"]["files"] == [os.path.join(tmp_path, "*.txt")]
    assert corpus.size() == 3
    assert json.loads(json.dumps(corpus.recipe())) == corpus.recipe()
    (tmp_path / "b.jsonl").write_text('{"text": "x"}', encoding="utf-8")
    assert Corpus("text", files=("*.*",)).size() is None


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"source": "synthetic"}, "has no end: give --limit-documents"),
        ({"source": "text"}, "needs --files"),
        ({"source": "python", "files": ("a.txt",)}, "--files is for --source text: leave it out, or change --source"),
        ({"source": "text", "files": ("a.txt",), "seed": 3}, "--seed is for --source synthetic"),
        ({"source": "text", "files": ("a.txt",), "packages": True}, "--packages is for --source python"),
        ({"source": "python", "dataset": "a"}, "--dataset is for --source fineweb"),
        ({"source": "python", "sample": "a"}, "--sample is for --source fineweb"),
        ({"tokenizer": "bytes", "vocab": 300}, "--vocab is for --tokenizer bpe"),
        ({"source": "pyhton"}, "no source 'pyhton': give python, text, fineweb, synthetic"),
        ({"limit_documents": 0}, "--limit-documents must be at least 1, got 0"),
        ({"limit_characters": -1}, "--limit-characters must be at least 1, got -1"),
        ({"source": "synthetic", "seed": -1, "limit_documents": 1}, "--seed must be at least 0"),
        ({"vocab": 256}, "--vocab above 256"),
        ({"tokenizer": "bpe2"}, "no tokenizer 'bpe2': give bytes, bpe, gpt2"),
        ({"tokenizer": "bytes", "gpt2_files": Path("x")}, "--gpt2-files is for --tokenizer gpt2"),
        ({"validation_fraction": 1.0}, "at least 0 and below 1, not 1.0"),
        ({"validation_fraction": float("nan")}, "at least 0 and below 1, not nan"),
        ({"group_characters": 0}, "--group-characters must be at least 1, got 0"),
    ],
)
def test_settings_without_sense_are_refused(settings, match):
    with pytest.raises(UsageError, match=match):
        Corpus(**settings)
