"""Progress at any width: every number is there whole, in terminals and in files."""

from io import StringIO

import pytest
from rich.console import Console

from muonsw.lab.base import progress
from muonsw.lab.base.progress import View, showing

NUMBERS = {"update": "12,345/110,000", "loss": "5.2345", "validation": "5.3456", "weight RMS": "0.1234"}


def drawn(view, width):
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(view)
    return console.file.getvalue()


def view_of(*names):
    view = View(Console(file=StringIO()), {name: progress.Activity(110_000.0) for name in names}, "runs", 2)
    for name in names:
        view.update(name, 12_000, NUMBERS)
        view.update(name, 12_345)
    return view


@pytest.mark.parametrize("width", [60, 72, 80, 120, 200])
@pytest.mark.parametrize("names", [("training",), ("constant, seed 0", "a very long name of an arm, seed 11")])
def test_no_number_is_cut_and_no_line_is_too_long(width, names):
    text = drawn(view_of(*names), width)
    for number in NUMBERS.values():
        assert text.count(number) == len(names)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text or len(names) > 1
    assert ("━" in text) == (len(names) == 1 or width >= 120)


@pytest.mark.parametrize("others", [(), ("b",)])
def test_a_name_cannot_steer_the_terminal(others):
    text = drawn(view_of("a\x1b]52;c;aGk=\x07", *others), 200)
    assert "a\\x1b]52;c;aGk=\\x07" in text
    assert "\x1b]" not in text


def test_at_eighty_columns_short_names_are_whole():
    text = drawn(view_of("constant, seed 0", "scaled, seed 0"), 80)
    assert "constant, seed 0 " in text
    assert "…" not in text


def test_a_file_gets_a_line_now_and_then_and_one_for_each_end(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    console = Console(file=StringIO(), width=80)
    with showing(console, {"a": 10, "b": 10}, workers=2) as view:
        view.update("a", 1, {"update": "1/10", "loss": "2.5"})
        view.finish("a", "validation loss 2.4000")
        view.say("a sentence")
    printed = console.file.getvalue().splitlines()
    assert printed == ["0 of 2 runs complete; a: update 1/10, loss 2.5", "a: validation loss 2.4000", "a sentence"]


def test_a_file_gets_no_line_before_there_is_a_number(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    console = Console(file=StringIO(), width=80)
    with showing(console, {"training": None}) as view:
        view.update("training", 0, {"update": "", "loss": ""}, total=10)
    assert console.file.getvalue() == ""


def test_what_is_left_follows_from_the_pace_and_the_number_at_a_time(monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    item = progress.Activity(total=100.0)
    item.advance(20.0)  # at 0 s
    item.done = 30.0
    assert item.pace == 1.0  # at 10 s
    monkeypatch.setattr(progress.time, "monotonic", lambda: 20.0)
    other = progress.Activity(total=100.0)
    view = View(Console(file=StringIO()), {"a": item, "b": other}, "runs", workers=2)
    assert view.summary() == "0 of 2 runs complete, about 2:50 left"  # 170 units at 2 s, two at a time
    item.complete = True
    assert view.summary() == "1 of 2 runs complete"
    assert item.time_left() == "done"


def test_an_unknown_amount_has_a_bar_and_no_end():
    view = View(Console(file=StringIO()), {"encoding": progress.Activity()}, "", 1)
    view.update("encoding", 5, {"documents": "1,234"})
    text = drawn(view, 80)
    assert "documents 1,234" in text
    assert "left" not in text


def test_more_runs_than_lines_leave_those_that_move():
    names = [f"run {number}" for number in range(60)]
    view = view_of(*names)
    for name in names[5:]:
        view.items[name].numbers.clear()
    view.finish("run 0")
    text = drawn(view, 80)
    assert [f"run {number} " in text for number in range(6)] == [False, True, True, True, True, False]
    assert "1 of 60 runs complete" in text
