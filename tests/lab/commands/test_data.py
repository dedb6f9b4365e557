"""`muonsw data`: what it prepares, says and refuses."""

import io
import json
import os
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass

import pytest
import tyro
from rich.console import Console

from muonsw.lab.base.errors import UsageError
from muonsw.lab.base.progress import showing
from muonsw.lab.commands.data import PREPARING, Data, Tally
from muonsw.lab.data.prepare import Group, prepare_default, read_record
from tests.lab.data.small_shards import damage

SMALL = ["--source", "synthetic", "--limit-characters", "70000", "--vocab", "300", "--group-characters", "20000"]


@dataclass(frozen=True)
class Other:
    """A command beside `data`, as `muonsw` has them."""

    number: int = 0

    def run(self) -> int:
        return self.number


def muonsw(*arguments):
    commands = {"data": Data, "other": Other}
    return tyro.extras.subcommand_cli_from_dict(commands, prog="muonsw", args=list(map(str, arguments))).run()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "data"
    with redirect_stdout(io.StringIO()):
        assert muonsw("data", "prepare", folder, *SMALL) == 0
    return folder


@pytest.fixture
def folder(prepared, tmp_path):
    """A copy, which a test may break."""
    return shutil.copytree(prepared, tmp_path / "data")


def test_prepare_writes_shards_and_says_so(tmp_path, capsys):
    assert muonsw("data", "prepare", tmp_path, *SMALL) == 0
    printed, record = capsys.readouterr().out, read_record(tmp_path)
    assert record.complete
    assert len(record.groups) == 4
    assert f"{record.documents:,} documents" in printed
    assert f"{record.tokens('train'):,} train and {record.tokens('validation'):,} validation tokens" in printed
    assert f"wrote {tmp_path}" in printed
    assert "\x1b" not in printed


def test_the_options_reach_the_record(tmp_path):
    (tmp_path / "b.txt").write_text("b" * 100, encoding="utf-8")
    (tmp_path / "a.md").write_text("a" * 100, encoding="utf-8")
    files = ["--files", str(tmp_path / "b.txt"), f"{tmp_path}/*.md"]
    options = ["--tokenizer", "bytes", "--validation-fraction", "0", "--group-characters", "1"]
    assert muonsw("data", "prepare", tmp_path / "out", "--source", "text", *files, *options) == 0
    record = read_record(tmp_path / "out")
    assert [group.tokens for group in record.groups] == [{"train": 101}] * 2
    assert record.recipe["corpus"]["files"] == files[1:]
    assert record.recipe["made_with"] == {"kind": "bytes"}
    assert (record.validation_fraction, record.group_characters) == (0.0, 1)


def test_a_folder_means_all_its_files_that_can_be_read(tmp_path):
    for name in ("b.txt", "deep/a.md", ".hidden.txt", "deep/.git/c.txt", "picture.png"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name[0] * 100, encoding="utf-8")
    options = ["--tokenizer", "bytes", "--validation-fraction", "0", "--source", "text", "--files"]
    assert muonsw("data", "prepare", tmp_path / "out", *options, tmp_path / "texts") == 0
    assert read_record(tmp_path / "out").documents == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no file that can be read: put \.txt"):
        muonsw("data", "prepare", tmp_path / "other", *options, tmp_path / "empty")


def test_the_command_and_the_function_agree(tmp_path):
    given = ["--source", "synthetic", "--limit-characters", "60000", "--vocab", "300"]
    assert muonsw("data", "prepare", tmp_path / "command", *given) == 0
    prepare_default(tmp_path / "function", source="synthetic", limit_characters=60_000, vocab=300)
    same = (tmp_path / "command" / "data.json").read_text(encoding="utf-8") == (
        tmp_path / "function" / "data.json"
    ).read_text(encoding="utf-8")
    assert same


def test_verify_reads_everything(folder, capsys):
    assert muonsw("data", "verify", folder) == 0
    record = read_record(folder)
    tokens = record.tokens("train") + record.tokens("validation")
    assert f"{tokens:,} good tokens read, all is well" in capsys.readouterr().out


def test_verify_names_every_bad_shard(folder, capsys):
    shards = read_record(folder).paths(folder, "train")
    damage(shards[1])
    shards[2].write_bytes(shards[0].read_bytes())
    os.truncate(shards[3], shards[3].stat().st_size - 2)
    (held_out := read_record(folder).paths(folder, "validation")[0]).unlink()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert muonsw("data", "verify", folder) == 1
    printed = capsys.readouterr().out
    bad = [line for line in printed.splitlines() if line.startswith("bad: ")]
    assert "tokenizer.json is not a tokenizer" in bad[0]
    assert f"{shards[1].name} was altered" in bad[1]
    assert shards[2].name in bad[2]
    assert f"{shards[3].name} has" in bad[3]
    assert f"{held_out.name} cannot be read" in bad[4]
    assert "5 problems" in printed
    assert len(bad) == 5


def test_verify_and_info_say_what_is_not_complete(folder, capsys):
    fields = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    (folder / "data.json").write_text(json.dumps({**fields, "complete": False}), encoding="utf-8")
    assert muonsw("data", "verify", folder) == 1
    assert "is not prepared to the end" in capsys.readouterr().out
    assert muonsw("data", "info", folder) == 0
    assert "not complete" in capsys.readouterr().out


def test_info_counts_what_there_is(folder, capsys):
    assert muonsw("data", "info", folder) == 0
    printed, record = capsys.readouterr().out, read_record(folder)
    for split in ("train", "validation"):
        size = sum(path.stat().st_size for path in record.paths(folder, split))
        shards = len(record.paths(folder, split))
        line = next(line for line in printed.splitlines() if line.startswith(split))
        assert line.endswith(f"{record.tokens(split):,} tokens in {shards} shards, {size:,} bytes")
    assert f"bpe, 300 tokens, identity {record.tokenizer[:12]}" in printed
    assert "source synthetic, seed 0, limit_characters 70000" in printed


def test_info_says_what_is_missing_or_truncated(folder, capsys):
    read_record(folder).paths(folder, "validation")[0].unlink()
    assert muonsw("data", "info", folder) == 0
    wrong = "missing or of another size than on record): run the same `muonsw data prepare` again"
    assert f"not complete (1 shard {wrong}" in capsys.readouterr().out
    os.truncate(read_record(folder).paths(folder, "train")[0], 100)
    assert muonsw("data", "info", folder) == 0
    assert f"not complete (2 shards {wrong}" in capsys.readouterr().out
    assert muonsw("data", "prepare", folder, *SMALL) == muonsw("data", "info", folder) == 0
    assert f"{folder}: complete" in capsys.readouterr().out


def test_tokens_without_their_record_are_not_taken_for_text(folder, capsys):
    (folder / "data.json").unlink()
    for command in ("info", "verify"):
        with pytest.raises(UsageError, match=r"has no data.json\): `muonsw data prepare") as refused:
            muonsw("data", command, folder)
        assert "--text" not in str(refused.value)
    assert muonsw("data", "prepare", folder, *SMALL) == muonsw("data", "verify", folder) == 0
    assert "all is well" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["prepare", "{folder}", *SMALL, "--seed", "1"], "holds data with other settings"),
        (["prepare", "{folder}/new", "--source", "synthetic"], "has no end"),
        (["prepare", "{folder}/new", "--source", "text", "--files", "{folder}/*.txt"], "no file matches"),
        (["prepare", "{folder}/new", "--vocab", "5"], "--vocab above 256"),
        (["prepare", "{folder}/new", "--threads", "0"], "at least 1"),
        (["prepare", "{folder}/data.json/new", *SMALL], "cannot write to the folder"),
        (["prepare", "{folder}/new", "--tokenizer", "gpt2", "--gpt2-files", "{folder}"], "no GPT-2 vocabulary"),
        (["verify", "{folder}/none"], "holds no prepared data"),
        (["info", "{folder}/none"], "holds no prepared data"),
    ],
)
def test_mistakes_are_usage_errors(folder, arguments, match):
    with pytest.raises(UsageError, match=match):
        muonsw("data", *(argument.format(folder=folder) for argument in arguments))


@pytest.mark.parametrize("arguments", [["data"], ["data", "prepare"], ["data", "prepair", "x"]])
def test_a_malformed_command_line_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        muonsw(*arguments)
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_names_every_action(capsys):
    with pytest.raises(SystemExit):
        muonsw("data", "--help")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("prepare", "verify", "info"))


def shown(*, terminal, size):
    """What is drawn while two groups are finished."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    with showing(console, {PREPARING: None}) as view:
        watch = Tally(view, size)
        watch.begun("tokenizer")
        watch.begun("documents")
        watch.finished(Group("a", 3, {}, {}, bytes=2_000_000))
    return console.file.getvalue()


def test_progress_counts_documents_and_bytes(monkeypatch):
    monkeypatch.setattr("muonsw.lab.base.progress.SECONDS_BETWEEN_LINES", -1.0)
    for size in (12_000_000, None):
        lines = shown(terminal=False, size=size).splitlines()
        assert lines[:2] == ["making the tokenizer", "encoding"]
        assert lines[2].startswith("preparing: documents 3, MB 2.0, MB/s ")


def test_progress_is_a_bar_in_a_terminal():
    drawn = shown(terminal=True, size=4_000_000)
    assert "documents 3  MB 2.0" in drawn
    assert "making the tokenizer" in drawn
