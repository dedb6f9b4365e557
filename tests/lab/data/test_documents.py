"""Documents come in a fixed order, each once, and files that cannot be read are named."""

import gzip
import hashlib
import json
import lzma
import os
import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from muonsw.lab.data.prepare import ALPHABET, Corpus, MarkovSource, pieces, python_texts
from muonsw.lab.errors import UsageError

TEXTS = ["one\ntwo", "zwö", "third " * 5000, "ﬁn"]
ROWS = [{"text": text, "id": number} for number, text in enumerate([*TEXTS[:2], "", *TEXTS[2:]])]


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


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


def test_limits_count_documents_and_characters():
    chain = list(islice(MarkovSource(3), 50))
    assert list(Corpus("synthetic", seed=3, limit_documents=50).documents()) == chain
    for limit in (1, 1000, 5000, sum(map(len, chain[:20]))):
        taken = list(Corpus("synthetic", seed=3, limit_characters=limit).documents())
        assert taken == chain[: len(taken)]
        assert sum(map(len, taken)) >= limit > sum(map(len, taken[:-1]))
    assert list(Corpus("synthetic", seed=3, limit_documents=4, limit_characters=10**9).documents()) == chain[:4]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"source": "synthetic"}, "has no end: give --limit-documents"),
        ({"source": "text"}, "needs --files"),
        ({"files": ("a.txt",)}, "--files is for --source text: leave it out, or change --source"),
        ({"tokenizer": "bytes", "vocab": 300}, "--vocab is for --tokenizer bpe"),
        ({"tokenizer": "bytes", "gpt2_files": Path("x")}, "--gpt2-files is for --tokenizer gpt2"),
        ({"limit_characters": 0}, "--limit-characters must be at least 1, got 0"),
        ({"source": "synthetic", "seed": -1, "limit_documents": 1}, "--seed must be at least 0"),
        ({"vocab": 256}, "--vocab above 256"),
        ({"validation_fraction": 1.0}, "at least 0 and below 1, not 1.0"),
        ({"validation_fraction": float("nan")}, "at least 0 and below 1, not nan"),
    ],
)
def test_invalid_settings_are_refused(settings, match):
    with pytest.raises(UsageError, match=match):
        Corpus(**settings)


def test_the_recipe_names_files_by_their_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = Corpus("text", files=("*.txt",), limit_documents=3)
    assert corpus.recipe() == {
        "corpus": {
            "source": "text",
            "files": [os.path.join(tmp_path, "*.txt")],
            "limit_documents": 3,
            "limit_characters": None,
        },
        "made_with": {"kind": "bpe", "vocab": 1024, "training_characters": 4_194_304},
    }


def test_python_files_are_sorted_and_without_tests_and_copies(tmp_path):
    root = write(
        tmp_path,
        {
            "b.py": "b",
            "a.py": "a",
            "pkg/copy_of_a.py": "a",
            "pkg/c.py": "c",
            "pkg/tests/test_c.py": "t",
            "test/t.py": "t",
            "site-packages/p.py": "p",
            "note.txt": "n",
            "latin.py": b"# coding: latin-1\n# \xe9",
            "broken.py": b"# \xe9",
            "unknown.py": b"# coding: nothing-known\n",
        },
    )
    assert list(python_texts([root])) == ["a", "b", "# coding: latin-1\n# é", "c"]
    assert list(python_texts([root, root / "site-packages"])) == ["a", "b", "# coding: latin-1\n# é", "c", "p"]


def test_the_standard_library_is_the_default_and_its_order_is_fixed():
    first, second = (list(islice(Corpus().documents(), 40)) for _ in range(2))
    assert first == second
    assert len(set(first)) == 40
    assert any("abstract base classes" in text.lower() for text in first)


def test_text_files_of_every_kind_are_read_in_order(tmp_path):
    write(
        tmp_path,
        {
            "b.txt": "plain",
            "a.md": "# mark",
            "empty.txt": "",
            "c.jsonl": json_lines(ROWS[:3]) + b"\n\n",
            "deep/er/e.txt": "deep",
            "[odd].txt": "odd",
            "windows.txt": b"\xef\xbb\xbfmarked",
            "windows.jsonl": b'\xef\xbb\xbf{"text": "marked"}',
        },
    )
    in_order = ["odd", "# mark", "plain", "one\ntwo", "zwö", "deep", "marked", "marked"]
    assert texts(f"{tmp_path}/**/*.*") == in_order
    assert texts(tmp_path / "b.txt", f"{tmp_path}/*.txt") == ["plain", "odd", "marked"], "each file once"
    assert texts(tmp_path / "[odd].txt") == ["odd"]
    write(tmp_path, {"picture.png": "", ".hidden.txt": "h", "deep/.git/g.txt": "g"})
    assert texts(tmp_path) == in_order, "of a folder, what can be read and is not hidden"


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compression_changes_no_document(tmp_path, suffix):
    pytest.importorskip("datasets")
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](json_lines(ROWS)))
    assert texts(tmp_path) == TEXTS


def test_parquet_rows_come_in_order(tmp_path):
    for rows in (1, 2, 1000):
        path = write_parquet(tmp_path / "[a].parquet", [*ROWS, {"text": None, "id": 9}], row_group_size=rows)
        assert texts(path) == TEXTS


def test_memory_does_not_grow_with_a_text_file(tmp_path):
    text = "Zwölf Wörter.\r\n\r\n" * 2_000_000
    (tmp_path / "a.txt").write_bytes(text.encode())
    in_memory = list(pieces(text))
    tracemalloc.start()
    try:
        documents = Corpus("text", files=(str(tmp_path / "a.txt"),)).documents()
        assert all(streamed == piece for streamed, piece in zip(documents, in_memory, strict=True))
        assert tracemalloc.get_traced_memory()[1] < len(text)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["", "short", "x" * 300_000, "a b\n" * 50_000, "line\r\n\r\n" * 900_000])
def test_a_long_text_is_cut_into_documents_that_join_to_it(text):
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert len(cut) == 1 if len(text) <= 2048 else len(cut) >= min(64, len(text) // 2048)
    assert all(1024 <= len(piece) <= max(2048, min(len(text) // 64, 65536)) for piece in cut[:-1])


def test_patterns_are_checked_before_the_first_document(tmp_path, monkeypatch):
    write(tmp_path, {"a.txt": "a", "b.pdf": "b", "c.pdf.gz": "c", "d.parquet": "d", "e.jsonl.gz": "e", "none/f": ""})
    for name in ("*.md", "none"):
        with pytest.raises(UsageError, match=rf"no file matches .*{name[-2:]}: give \.txt"):
            Corpus("text", files=(f"{tmp_path}/a.txt", f"{tmp_path}/{name}")).documents()
    for name in ("b.pdf", "c.pdf.gz"):
        with pytest.raises(UsageError, match=rf"{name} is of no known kind: give \.txt"):
            Corpus("text", files=(f"{tmp_path}/{name}",)).documents()
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("d.parquet", "e.jsonl.gz"):
        with pytest.raises(UsageError, match=rf"{name} needs the package datasets: run pip install '\.\[data\]'"):
            Corpus("text", files=(f"{tmp_path}/{name}",)).documents()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"txt": 1}\n', "a.jsonl, line 2: not a JSON object with a string"),
        ("a.jsonl", '{"text": "fine"}\n["text"]\n', "a.jsonl, line 2: not"),
        ("a.jsonl", '{"text": "fine"}\n{"text": "cu', "a.jsonl, line 2: not"),
        ("a.jsonl", '{"text": "fine"}\n{"text": 3}', "a.jsonl, line 2: not"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read"),
    ],
)
def test_a_file_without_text_is_named(tmp_path, name, content, match):
    write(tmp_path, {name: content})
    with pytest.raises(UsageError, match=match):
        texts(tmp_path / name)


@pytest.mark.parametrize("damage", ["nonsense", "altered"])
@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_damaged_file_and_one_without_text_are_named(tmp_path, name, damage):
    path, rows = tmp_path / name, [{"text": os.urandom(200).hex()} for _ in range(500)]
    good = write_parquet(path, rows).read_bytes() if name == "a.parquet" else COMPRESS[path.suffix](json_lines(rows))
    middle = len(good) // 2
    altered = good[:middle] + bytes(1000) + good[middle + 1000 :]
    path.write_bytes({"nonsense": b"this is no such file", "altered": altered}[damage])
    with pytest.raises(UsageError, match=rf"{name} cannot be read: ."):
        texts(path)
    for rows in ([{"txt": "a"}], [{"text": 1}]):
        with pytest.raises(UsageError, match=r"b\.parquet cannot be read: .*text"):
            texts(write_parquet(tmp_path / "b.parquet", rows))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A local dataset of three files, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when the library is imported
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    for part in range(3):
        rows = [{"text": f"page {number}", "url": "u"} for number in range(50 * part, 50 * part + 50)]
        write_parquet(folder / f"{part:03}_00000.parquet", rows, row_group_size=20)
    return tmp_path / "hub"


def test_a_dataset_is_streamed_in_order(hub):
    expected = [f"page {number}" for number in range(150)]
    assert list(Corpus("fineweb", dataset=str(hub)).documents()) == expected
    assert list(Corpus("fineweb", dataset=str(hub), limit_documents=60).documents()) == expected[:60]


def test_a_dataset_that_cannot_be_read_is_named(hub, monkeypatch):
    import datasets

    (hub / "data" / "001_00000.parquet").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=rf"the dataset {hub} cannot be read"):
        list(Corpus("fineweb", dataset=str(hub)).documents())
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"the dataset unknown/dataset \(sample-10BT\) cannot be read"):
        list(Corpus("fineweb", dataset="unknown/dataset").documents())
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"needs the package datasets: run pip install '\.\[data\]'"):
        list(Corpus("fineweb", dataset=str(hub)).documents())


def test_documents_follow_from_seed_and_index():
    source = MarkovSource(seed=3)
    documents = list(islice(source, 5))
    assert documents == list(islice(MarkovSource(seed=3), 5)) == [source.document(number) for number in range(5)]
    assert documents != list(islice(MarkovSource(seed=4), 5))
    assert len(set(documents)) == 5


def test_the_documents_never_change():
    """Runs that name the fingerprint of such data depend on every character."""
    text = "\n".join(islice(MarkovSource(seed=0), 20))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "7c9734d865210f5437eddf3a03cfacb7a2df4a9b515d3863b0a5128c1ac0db87"
    )


def test_documents_have_the_length_and_the_letters_of_the_chain():
    documents = list(islice(MarkovSource(seed=1, mean_length=50.0), 1000))
    lengths = [len(text) for text in documents]
    assert min(lengths) >= 1
    assert set("".join(documents)) == set(ALPHABET)
    assert abs(np.mean(lengths) - 50.0) < 5.0 * 50.0 / 1000**0.5, "geometric lengths: five deviations"
