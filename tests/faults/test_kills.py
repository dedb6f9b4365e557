"""Ended by SIGKILL before every file operation, and in the middle of writes: the same command again leads to the same
end, and nothing is left behind."""

import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data.shards import verify_folder
from muonsw.lab.train.export import export, load_model
from muonsw.lab.train.loop import train
from tests.faults.folders import LONG, config, ending, fill_data, folders
from tests.faults.killing import killed_at, killed_at_size, operations

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")


def places(total: int, few: int) -> list[int]:
    """Every operation, or a few spread over all of them."""
    return list(range(1, total + 1)) if LONG else sorted({1 + round(n * (total - 1) / (few - 1)) for n in range(few)})


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


def train_after_kills(record_property, kill, cases):
    """Train, be ended, train on; the cases that ended otherwise than a run that was never disturbed, bit for bit."""
    settings, folder = config(folders().data), folders().root / "killed"
    expected, ended, wrong = (ending(folders().whole), []), 0, []
    for case in cases:
        shutil.rmtree(folder, ignore_errors=True)
        ended += kill(case, lambda: train(settings, folder), folder)
        train(settings, folder)
        if (ending(folder), hidden_files(folder)) != expected:
            wrong.append(case)
    record_property("cases", ("training ended by SIGKILL", ended, "repaired: the same command goes on, same bits"))
    return ended, wrong


def test_training_that_is_ended_before_any_file_operation_goes_on_to_the_same_bits(record_property):
    folder = folders().root / "killed"
    shutil.rmtree(folder, ignore_errors=True)
    settings = config(folders().data)
    total = operations(lambda: train(settings, folder), folder)
    assert total > 60
    cases = places(total, 3)
    ended, wrong = train_after_kills(record_property, killed_at, cases)
    assert ended > len(cases) // 2
    assert wrong == []


def test_training_that_is_ended_inside_a_write_goes_on_to_the_same_bits(record_property):
    sizes = range(0, 56_000, 397) if LONG else (100, 30_000)
    ended, wrong = train_after_kills(
        record_property, lambda size, work, _folder: killed_at_size(size, work), list(sizes)
    )
    assert ended > len(sizes) // 2
    assert wrong == []


def test_preparing_data_that_is_ended_goes_on_to_the_same_folder(record_property):
    expected = {path.name: path.read_bytes() for path in folders().data.iterdir()}
    folder, ended = folders().root / "killed-data", 0
    total = operations(lambda: fill_data(folder), folder)
    for number in places(total, 6):
        shutil.rmtree(folder, ignore_errors=True)
        ended += killed_at(number, lambda: fill_data(folder), folder)
        if (folder / "data.json").exists():  # whatever is on record is there: unfinished is the only thing wrong
            problems = list(verify_folder(folder))
            assert all("not prepared to the end" in problem for problem in problems), problems
        fill_data(folder)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected, f"after an end at {number}"
    record_property("cases", ("`data prepare` ended by SIGKILL", ended, "repaired: goes on to the same files"))
    assert ended > 3


def test_an_export_that_is_ended_is_whole_the_next_time_and_never_taken_for_whole_before(record_property):
    trained, folder, ended = folders().whole, folders().root / "killed-export", 0
    whole, _ = load_model(folders().export)
    shutil.rmtree(folder, ignore_errors=True)
    expected = {path.name: path.read_bytes() for path in folders().export.rglob("*") if path.is_file()}
    size = len(expected["model.safetensors"])
    ends = [partial(killed_at_size, one) for one in (size // 2, size - 1)]
    ends += [
        partial(killed_at, one, folder=folder) for one in places(operations(lambda: export(trained, folder), folder), 4)
    ]
    for killed in ends:
        shutil.rmtree(folder, ignore_errors=True)
        if killed(work=lambda: export(trained, folder)):
            ended += 1
            with suppress(UsageError):  # a whole model, or none
                model, _ = load_model(folder)
                assert all(map(torch.equal, model.state_dict().values(), whole.state_dict().values()))
        export(trained, folder)
        assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == expected
    record_property("cases", ("`export` ended by SIGKILL", ended, "repaired: written again whole"))
    assert ended > 2
