"""Faults of the machine, a full disk or too little memory: a line says what to do, and nothing is lost."""

import errno
import json
import os

import pytest

from muonsw.lab import cli
from muonsw.lab.base import storage
from muonsw.lab.base.errors import MachineError, UsageError
from muonsw.lab.base.storage import write_json
from muonsw.lab.outcome import diverged_at
from muonsw.lab.studies import jobs
from muonsw.lab.train import loop
from muonsw.lab.train.loop import train
from tests.lab.base.test_storage import files_no_larger_than
from tests.lab.studies.small_comparisons import ARMS, KEY, WILD, by_arm, comparison
from tests.lab.train.small_runs import losses, small_run

FULL = "cannot be written: File too large; make room on the disk"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = tmp_path_factory.mktemp("whole") / "run"
    train(small_run(), run)
    return run


def full_for(name):
    """`write_json` on a disk that has no room for a file of this name."""

    def write(path, *given, **options):
        with files_no_larger_than(0 if path.name == name else 10**9):
            return write_json(path, *given, **options)

    return write


def test_a_result_that_cannot_be_written_is_reported_and_written_later(whole, tmp_path, monkeypatch):
    """The last file of a run; all others are there."""
    monkeypatch.setattr(loop, "write_json", full_for("result.json"))
    with pytest.raises(MachineError, match=rf"result\.json {FULL}"):
        train(small_run(), tmp_path)
    monkeypatch.undo()
    result = train(small_run(), tmp_path)
    assert result["final_loss"] == json.loads((whole / "result.json").read_text(encoding="utf-8"))["final_loss"]
    assert losses(tmp_path) == losses(whole)


def test_a_divergence_that_cannot_be_written_down_is_reported(tmp_path, monkeypatch):
    """The parent writes it, after the run in its own folder has ended."""
    one = comparison((ARMS[0], WILD), seeds=(0,), steps=20, diverged=1.0)
    monkeypatch.setattr(jobs, "write_json", full_for("result.json"))
    with pytest.raises(MachineError, match=rf"result\.json {FULL}"):
        by_arm(tmp_path).train([one])
    monkeypatch.undo()
    runs = by_arm(tmp_path).train([one])[KEY]
    assert diverged_at(runs["wild"][0]) is not None
    assert diverged_at(runs["constant"][0]) is None


def test_a_full_disk_is_the_machine_s_fault_and_a_bad_name_the_user_s(tmp_path, monkeypatch):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.tempfile, "TemporaryFile", full)
    with pytest.raises(MachineError, match=r"No space left on device; make room"):
        storage.prepare_folder(tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="choose another") as error:
        storage.prepare_folder(tmp_path / "file" / "below")
    assert error.value.exit_code == 2


def test_the_cli_says_when_memory_is_short(monkeypatch, capsys):
    def greedy(_arguments):
        raise MemoryError

    monkeypatch.setattr("muonsw.lab.cli.run", greedy)
    assert cli.main(["plan"]) == 3
    assert "not enough memory: ask for something smaller" in capsys.readouterr().err
