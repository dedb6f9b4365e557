"""Progress: numbers are whole in a terminal of usual width, and a file gets plain lines."""

from io import StringIO

import pytest
from rich.console import Console

from muonsw.lab.base import progress
from muonsw.lab.base.progress import View, showing

NUMBERS = {"update": "12,345/110,000", "loss": "5.2345", "validation": "5.3456", "weight RMS": "0.1234"}


def view_of(*names):
    view = View(Console(file=StringIO()), dict.fromkeys(names, 110_000.0), "runs")
    for name in names:
        view.update(name, 12_345, NUMBERS)
    return view


def drawn(view, width=80):
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(view)
    return console.file.getvalue()


@pytest.mark.parametrize("names", [("training",), ("constant, seed 0", "a very long name of an arm, seed 11")])
def test_no_number_is_cut_and_no_line_is_too_long(names):
    text = drawn(view_of(*names))
    for number in NUMBERS.values():
        assert text.count(number) == len(names)
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_name_cannot_steer_the_terminal():
    text = drawn(view_of("a\x1b]52;c;aGk=\x07"), 200)
    assert "a\\x1b]52;c;aGk=\\x07" in text
    assert "\x1b]" not in text


def test_a_file_gets_a_line_now_and_then_and_one_for_each_end(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    console = Console(file=StringIO(), width=80)
    with showing(console, {"a": 10, "b": 10}) as view:
        view.update("b", 0, {"update": "", "loss": ""})
        view.update("a", 1, {"update": "1/10", "loss": "2.5"})
        view.finish("a", "validation loss 2.4000")
        view.say("a sentence")
    printed = console.file.getvalue().splitlines()
    assert printed == ["0 of 2 runs complete; a: update 1/10, loss 2.5", "a: validation loss 2.4000", "a sentence"]


def test_the_time_left_follows_from_the_pace_since_the_beginning(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    view = View(Console(file=StringIO()), {"a": 100.0, "b": 100.0, "c": None}, "runs")
    view.update("a", 20.0)  # resumed there
    view.update("a", 30.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 10.0)
    assert view.summary() == "0 of 3 runs complete, about 2:50 left"  # 170 units at a second each
    view.finish("b", "done")
    assert view.summary() == "1 of 3 runs complete, about 0:06 left"


def test_only_tasks_that_move_are_shown():
    view = view_of(*(f"run {number}" for number in range(6)))
    view.finish("run 0", "done")
    view.numbers["run 5"].clear()
    text = drawn(view)
    assert [f"run {number} " in text for number in range(6)] == [False, True, True, True, True, False]
    assert "1 of 6 runs complete" in text
