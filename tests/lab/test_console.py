"""Tables and progress show every number, and no name can control the terminal."""

import io
import re

import pytest
from rich.console import Console

from muonsw.lab import console
from muonsw.lab.console import Cell, Column, Table, View, plain_text, print_table, say, showing

NUMBERS = ("0.1", "5.2345 ± 0.0123", "5.1234 ± 0.0321", "0.123 ± 0.004", "-60 %", "0.0456", "12.345")
HEADINGS = ("lambda", "final loss", "best loss", "weight RMS at the end", "change since largest", "update at peak", "N")
PROGRESS = {"step": "12,345/110,000", "loss": "5.2345", "validation": "5.3456", "weight RMS": "0.1234"}
COLUMNS = (Column("arm"), *(Column(title, number=True) for title in HEADINGS))
WIDE = Table("arms", "Arms", COLUMNS, [("constant", *NUMBERS), ("scaled", *NUMBERS)], note="Means over seeds.")


def printed(table, width, capsys):
    print_table(Console(force_terminal=True, width=width, color_system=None), table)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 200])
def test_a_table_shows_every_number_within_the_terminal(width, capsys):
    text = printed(WIDE, width, capsys)
    assert max(map(len, text.splitlines())) <= width
    for number in NUMBERS:
        assert len(re.findall(rf"(?<!\S){re.escape(number)}(?!\S)", text)) == 2
    assert (text.count("scaled") == 1) == (width == 200), "each row of columns begins with the name"


def test_a_pipe_gets_every_column_as_plain_text(capsys):
    print_table(Console(force_terminal=False, width=40), WIDE)
    lines = capsys.readouterr().out.splitlines()
    assert all(heading in lines[2] for heading in HEADINGS)
    assert all(number in lines[3] for number in NUMBERS)
    assert plain_text(Table("t", "T", [Column("")] * 3, [("steps", "10", "given")])) == "steps  10  given"


def test_markup_and_control_characters_are_printed_literally(capsys):
    table = Table("t", "a [bold] title\x1b[2J", [Column("name")], [(Cell("[red]x[/red]\x9b31m"),)])
    text = printed(table, 80, capsys)
    assert not set(text) & {"\x1b", "\x9b"}
    assert all(part in text for part in ("a [bold] title\\x1b[2J", "[red]x[/red]", "\\x9b31m"))
    out = Console(file=io.StringIO(), width=20, force_terminal=True)
    say(out, "[bold]a[/bold], longer than the terminal λ\u202e")
    assert out.file.getvalue() == "[bold]a[/bold], longer than the terminal λ\\u202e\n"


def test_progress_shows_every_number(capsys):
    names = ("constant, seed 0", "a very long name of an arm, seed 11")
    view = View(Console(file=io.StringIO()), dict.fromkeys(names, 110_000.0), "runs")
    for name in names:
        view.update(name, 12_345, PROGRESS)
    Console(force_terminal=True, width=80, color_system=None).print(view)
    text = capsys.readouterr().out
    assert all(text.count(number) == 2 for number in PROGRESS.values())
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_file_gets_occasional_progress_and_every_outcome(monkeypatch):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", -1.0)
    out = Console(file=io.StringIO(), width=80)
    with showing(out, {"a": 10, "b": 10}) as view:
        view.update("b", 0, {"step": "", "loss": ""})
        view.update("a", 1, {"step": "1/10", "loss": "2.5"})
        view.finish("a", "validation loss 2.4000")
        view.say("a sentence")
    lines = out.file.getvalue().splitlines()
    assert lines == ["0 of 2 runs complete; a: step 1/10, loss 2.5", "a: validation loss 2.4000", "a sentence"]


def test_the_time_left_follows_from_the_pace_so_far(monkeypatch):
    monkeypatch.setattr(console.time, "monotonic", lambda: 0.0)
    view = View(Console(file=io.StringIO()), {"a": 100.0, "b": 100.0, "c": None}, "runs")
    view.update("a", 20.0)  # resumed there
    view.update("a", 30.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: 10.0)
    assert view.summary() == "0 of 3 runs complete, about 0:02:50 left"  # 170 units at a second each
    view.finish("b", "done")
    assert view.summary() == "1 of 3 runs complete, about 0:00:06 left"
