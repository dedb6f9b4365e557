"""What is printed is what was said: no number is cut, and nothing steers the terminal."""

import io
import re

import pytest
from rich.console import Console

from muonsw.lab import console
from muonsw.lab.console import Cell, Column, Table, View, plain_text, print_table, say, showing, side_by_side

NUMBERS = ("0.1", "5.2345 ± 0.0123", "5.1234 ± 0.0321", "0.123 ± 0.004", "-60 %", "0.0456", "12.345")
HEADINGS = ("lambda", "final loss", "best loss", "weight RMS at the end", "change since largest", "update at peak", "N")
PROGRESS = {"step": "12,345/110,000", "loss": "5.2345", "validation": "5.3456", "weight RMS": "0.1234"}


def wide_table(arm="constant"):
    columns = [Column(title, number=True) for title in HEADINGS]
    return Table("arms", "Arms", ("arm", *columns), [(arm, *NUMBERS), ("scaled", *NUMBERS)], note="Means over seeds.")


def printed(table, width, capsys, **options):
    print_table(Console(force_terminal=True, width=width, color_system=None), table, **options)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_number_is_shown_and_no_line_is_too_long(width, capsys):
    table = wide_table("constant lambda=0.1 eta=0.02")
    text = printed(table, width, capsys)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for number in NUMBERS:
        assert len(re.findall(rf"(?<!\S){re.escape(number)}(?!\S)", text)) == 2
    rows = side_by_side(table, width)
    assert all(places[0] == 0 for places in rows), "each row of columns begins with the name"
    assert [place for places in rows for place in places[1:]] == [1, 2, 3, 4, 5, 6, 7]
    assert text.count("scaled") == len(rows)
    assert (len(rows) == 1) == (width == 200)


def test_verbose_shows_notes(capsys):
    table = Table("t", "T", ("name", "verdict"), [(Cell("one", note="because"), Cell("holds", tone="holds"))])
    assert "because" not in printed(table, 80, capsys)
    assert "because" in printed(table, 80, capsys, verbose=True)


def test_a_pipe_gets_every_column_as_plain_text(capsys):
    print_table(Console(force_terminal=False, width=40), wide_table())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Arms"
    assert all(heading in lines[2] for heading in HEADINGS)
    assert all(number in lines[3] for number in NUMBERS)
    assert lines[-1] == "Means over seeds."
    assert plain_text(Table("t", "T", ("", "", ""), [("steps", "10", "given")])) == "steps  10  given"


def test_markup_is_shown_as_it_is_and_nothing_in_a_table_steers_the_terminal(capsys):
    table = Table("t", "a [bold] title", ("name",), [("[red]x[/red]",)], note="[i]note[/i]")
    text = printed(table, 80, capsys)
    assert all(part in text for part in ("a [bold] title", "[red]x[/red]", "[i]note[/i]"))
    table = Table("t", "\x1b[2J", ("a\x07",), [(Cell("x\x1b]0;", note="\x9b31m"),)], note="\x1bc")
    text = printed(table, 80, capsys, verbose=True)
    assert not set(text) & {"\x1b", "\x07", "\x9b"}
    assert "\\x1b[2J" in text


def said(text):
    out = Console(file=io.StringIO(), width=20, force_terminal=True)
    say(out, text)
    return out.file.getvalue()


@pytest.mark.parametrize(
    "text", ["[bold]a[/bold] :smile:", "a line much longer than the terminal is wide", "zwö\n\tλ·Ση"]
)
def test_a_sentence_is_printed_as_it_is(text):
    assert said(text).expandtabs() == text.expandtabs() + "\n"


@pytest.mark.parametrize("code", [0x00, 0x07, 0x08, 0x0D, 0x1B, 0x7F, 0x9B, 0x9D, 0x202E, 0x2066, 0xDC80])
def test_what_would_steer_a_terminal_is_shown_by_its_code(code):
    shown = said(f"a{chr(code)}b")
    assert chr(code) not in shown
    assert f"{code:x}b" in shown
    shown.encode()


def view_of(*names):
    view = View(Console(file=io.StringIO()), dict.fromkeys(names, 110_000.0), "runs")
    for name in names:
        view.update(name, 12_345, PROGRESS)
    return view


def drawn(view, width=80):
    out = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    out.print(view)
    return out.file.getvalue()


@pytest.mark.parametrize("names", [("training",), ("constant, seed 0", "a very long name of an arm, seed 11")])
def test_progress_cuts_no_number_and_no_name_steers_the_terminal(names):
    text = drawn(view_of(*names))
    for number in PROGRESS.values():
        assert text.count(number) == len(names)
    assert all(len(line) <= 80 for line in text.splitlines())
    text = drawn(view_of("a\x1b]52;c;aGk=\x07"), 200)
    assert "a\\x1b]52;c;aGk=\\x07" in text
    assert "\x1b]" not in text


def test_a_file_gets_a_line_now_and_then_and_one_for_each_end(monkeypatch):
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", -1.0)
    out = Console(file=io.StringIO(), width=80)
    with showing(out, {"a": 10, "b": 10}) as view:
        view.update("b", 0, {"step": "", "loss": ""})
        view.update("a", 1, {"step": "1/10", "loss": "2.5"})
        view.finish("a", "validation loss 2.4000")
        view.say("a sentence")
    lines = out.file.getvalue().splitlines()
    assert lines == ["0 of 2 runs complete; a: step 1/10, loss 2.5", "a: validation loss 2.4000", "a sentence"]


def test_the_time_left_follows_from_the_pace_since_the_beginning(monkeypatch):
    monkeypatch.setattr(console.time, "monotonic", lambda: 0.0)
    view = View(Console(file=io.StringIO()), {"a": 100.0, "b": 100.0, "c": None}, "runs")
    view.update("a", 20.0)  # resumed there
    view.update("a", 30.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: 10.0)
    assert view.summary() == "0 of 3 runs complete, about 2:50 left"  # 170 units at a second each
    view.finish("b", "done")
    assert view.summary() == "1 of 3 runs complete, about 0:06 left"
