"""`muonsw data`: what it prepares, prints and refuses."""

import os

import pytest

from muonsw.lab.cli import main
from muonsw.lab.data.loader import read_record
from muonsw.lab.data.prepare import SHARD_CHARACTERS
from tests.lab.texts import write_texts

OPTIONS = ["--vocab", "300", "--validation-fraction", "0.05"]
SMALL = ["--source", "text", "--files", "{folder}.jsonl", *OPTIONS]


def muonsw(command, folder, *arguments):
    return main(["data", command, str(folder), *(str(argument).format(folder=folder) for argument in arguments)])


@pytest.fixture
def folder(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(SHARD_CHARACTERS, "text", 20_000)
    write_texts(tmp_path / "data.jsonl", 140)
    assert muonsw("prepare", tmp_path / "data", *SMALL) == 0
    capsys.readouterr()
    return tmp_path / "data"


def test_the_options_reach_the_record(tmp_path):
    (tmp_path / "b.txt").write_text("b" * 100, encoding="utf-8")
    (tmp_path / "a.md").write_text("a" * 100, encoding="utf-8")
    files = ["--files", str(tmp_path / "b.txt"), f"{tmp_path}/*.md"]
    options = ["--tokenizer", "bytes", "--validation-fraction", "0"]
    assert muonsw("prepare", tmp_path / "out", "--source", "text", *files, *options) == 0
    record = read_record(tmp_path / "out")
    assert [group.tokens for group in record.groups] == [{"train": 202}]
    assert record.recipe["corpus"]["files"] == files[1:]
    assert record.recipe["made_with"] == {"kind": "bytes"}
    assert record.validation_fraction == 0.0


def test_verify_names_every_bad_shard_and_prepare_repairs_it(folder, capsys):
    assert muonsw("verify", folder) == 0
    assert "all is well" in capsys.readouterr().out
    shards = list(read_record(folder).shards(folder, "train"))
    shards[1].write_bytes(shards[1].read_bytes()[::-1])
    os.truncate(shards[3], shards[3].stat().st_size - 2)
    assert muonsw("verify", folder) == 1
    printed = capsys.readouterr().out
    assert all(path.name in printed.replace("\n", "") for path in (shards[1], shards[3]))
    assert "2 problems" in printed
    assert muonsw("prepare", folder, *SMALL) == muonsw("verify", folder) == 0


def test_tokens_without_their_record_are_not_taken_for_text(folder, capsys):
    (folder / "data.json").unlink()
    assert muonsw("verify", folder) == 2
    assert "muonsw data prepare" in capsys.readouterr().err
    assert muonsw("prepare", folder, *SMALL) == muonsw("verify", folder) == 0
