"""Files of every kind give the same documents, and damage is named with the file."""

import gzip
import json
import lzma
import os
import sys
import tracemalloc

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.corpus import text_documents
from muonsw.lab.data.formats import pieces

TEXTS = ["one\ntwo", "zwö", "third " * 5000, "ﬁn"]
ROWS = [{"text": text, "id": str(number), "url": "none"} for number, text in enumerate([*TEXTS[:2], "", *TEXTS[2:]])]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("pyarrow").compress(data, codec="zstd", asbytes=True)


COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


def write_parquet(path, rows, **options):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return path


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compression_changes_nothing(tmp_path, suffix):
    (tmp_path / f"a.jsonl{suffix}").write_bytes(COMPRESS[suffix](json_lines(ROWS)))
    (tmp_path / f"b.txt{suffix}").write_bytes(COMPRESS[suffix](TEXTS[2].encode()))
    files = [tmp_path / f"a.jsonl{suffix}", tmp_path / f"b.txt{suffix}"]
    assert list(text_documents(files)) == [*TEXTS, *pieces(TEXTS[2])]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_the_mark_that_windows_puts_before_utf8_is_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (b'{"text": "plain"}' if name == "a.jsonl" else b"plain"))
    assert list(text_documents([tmp_path / name])) == ["plain"]


def test_zstandard_frames_follow_each_other(tmp_path):
    data = json_lines(ROWS)
    (tmp_path / "a.jsonl.zst").write_bytes(zstd(data[:77]) + zstd(data[77:78]) + zstd(b"") + zstd(data[78:]))
    assert list(text_documents([tmp_path / "a.jsonl.zst"])) == TEXTS


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_parquet_rows_come_in_order_whatever_the_row_groups(tmp_path, rows):
    path = write_parquet(tmp_path / "a.parquet", [*ROWS, {"text": None, "id": "x", "url": "y"}], row_group_size=rows)
    assert list(text_documents([path])) == TEXTS


def test_parquet_is_read_row_group_by_row_group(tmp_path):
    """Damage in a later row group does not keep an earlier one from being read."""
    rows = [{"text": f"{number} " + os.urandom(500).hex()} for number in range(1000)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=250, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 50_000] = bytes(50_000)
    path.write_bytes(data)
    documents, read = text_documents([path]), []
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read"):
        read.extend(documents)
    assert read[:250] == [row["text"] for row in rows[:250]]
    assert len(read) < len(rows)


def test_memory_does_not_grow_with_a_parquet_file(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    rows = [{"text": f"{number} " + "x" * 10_000, "other": "y" * 10_000} for number in range(2000)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=50, compression="none", use_dictionary=False)
    size, before, most = path.stat().st_size, arrow.total_allocated_bytes(), 0
    for _ in text_documents([path]):
        most = max(most, arrow.total_allocated_bytes() - before)
    assert size > 35e6
    assert 0 < most < size / 10


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_memory_does_not_grow_with_a_text_file(tmp_path, name):
    text = "Zwölf Wörter.\r\n\r\n" * 2_000_000
    (tmp_path / name).write_bytes(gzip.compress(text.encode(), 1) if name.endswith(".gz") else text.encode())
    whole = list(pieces(text))
    tracemalloc.start()
    try:
        for found, piece in zip(text_documents([tmp_path / name]), whole, strict=True):
            assert found == piece
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < len(text)


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst", ".parquet"])
@pytest.mark.parametrize("part", ["cut", "empty", "nonsense", "altered"])
def test_damage_is_named(tmp_path, suffix, part):
    path = tmp_path / f"a.jsonl{suffix}" if suffix != ".parquet" else tmp_path / "a.parquet"
    rows = [{"text": os.urandom(200).hex()} for _ in range(500)]
    if suffix == ".parquet":
        whole = write_parquet(path, rows, write_page_checksum=True).read_bytes()
    else:
        whole = COMPRESS[suffix](json_lines(rows))
    middle = len(whole) // 2
    damaged = {
        "cut": whole[:-10],
        "empty": b"",
        "nonsense": b"this is no such file",
        "altered": whole[:middle] + bytes(1000) + whole[middle + 1000 :],
    }
    path.write_bytes(damaged[part])
    with pytest.raises(UsageError, match=rf"{path.name}(, line \d+| cannot be read): ."):
        list(text_documents([path]))


def test_a_column_that_holds_no_text_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"a\.parquet has no column `text`, only txt, id"):
        list(text_documents([write_parquet(tmp_path / "a.parquet", [{"txt": "a", "id": 1}])]))
    with pytest.raises(UsageError, match=r"b\.parquet: its column `text` holds int64, not strings"):
        list(text_documents([write_parquet(tmp_path / "b.parquet", [{"text": 1}])]))


def test_a_compressed_parquet_is_of_no_known_kind(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(b"")
    with pytest.raises(UsageError, match=r"a\.parquet\.gz is of no known kind"):
        text_documents([tmp_path / "a.parquet.gz"])


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.zst"])
def test_a_missing_package_is_said_before_any_document(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"package pyarrow: run pip install '\.\[data\]'"):
        text_documents([tmp_path / name])


def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x", encoding="utf-8")
    documents = text_documents([tmp_path / "a.txt"])
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UsageError, match=r"a\.txt cannot be read: No such file"):
        list(documents)


@pytest.mark.parametrize("text", ["", "short", "x" * 300_000, "a b\n" * 50_000, "line\r\n\r\n" * 900_000])
def test_a_long_text_is_cut_into_documents_that_join_to_it(text):
    found = list(pieces(text))
    assert "".join(found) == text
    assert len(found) == 1 if len(text) <= 2048 else len(found) >= min(64, len(text) // 2048)
    assert all(1024 <= len(piece) <= max(2048, min(len(text) // 64, 65536)) for piece in found[:-1])
