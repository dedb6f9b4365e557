"""What is printed is what was said: no number is cut, and nothing steers the terminal."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from muonsw.lab.console import Cell, Column, Table, fitting, plain_text, print_table, say

NUMBERS = ("0.1", "5.2345 ± 0.0123", "5.1234 ± 0.0321", "0.123 ± 0.004", "-60 %", "0.0456", "12.345")
HEADINGS = ("lambda", "final loss", "best loss", "weight RMS at the end", "change since largest", "update at peak", "N")
RANKS = (1, 1, 2, 1, 1, 3, 2)


def wide_table(arm="constant"):
    columns = [Column(title, number=True, rank=rank) for title, rank in zip(HEADINGS, RANKS, strict=True)]
    return Table("arms", "Arms", ("arm", *columns), [(arm, *NUMBERS), ("scaled", *NUMBERS)], note="Means over seeds.")


def printed(table, width, capsys, **options):
    print_table(Console(force_terminal=True, width=width, color_system=None), table, **options)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("verbose", [False, True])
def test_no_number_is_cut_and_no_line_is_too_long(width, verbose, capsys):
    text = printed(wide_table("constant lambda=0.1 eta=0.02"), width, capsys, verbose=verbose)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    shown, left_out = fitting(wide_table("constant lambda=0.1 eta=0.02"), width)
    for place in shown if not verbose else range(len(NUMBERS) + 1):
        if place:
            assert len(re.findall(rf"(?<!\S){re.escape(NUMBERS[place - 1])}(?!\S)", text)) == 2
    assert ("Not shown" in text) == bool(left_out and not verbose)


def test_columns_come_by_rank_and_what_is_left_out_is_named(capsys):
    text = printed(wide_table(), 80, capsys)
    assert all(word in text for word in ("lambda", "final loss", "RMS", "change"))
    assert "Not shown at this width: update at peak, N (--verbose shows them)" in " ".join(text.split())
    assert "--verbose" not in printed(wide_table(), 80, capsys, hint="")


def test_more_room_never_shows_less():
    shown = [set(fitting(wide_table(), width)[0]) for width in range(10, 140)]
    assert all(less <= more for less, more in pairwise(shown))
    assert shown[0] == {0, 1}
    assert len(shown[-1]) == len(NUMBERS) + 1


def test_verbose_repeats_the_name_of_the_row_and_shows_notes(capsys):
    table = Table("t", "T", ("name", "verdict"), [(Cell("one", note="because"), Cell("holds", tone="holds"))])
    assert "because" not in printed(table, 80, capsys)
    assert "because" in printed(table, 80, capsys, verbose=True)
    assert printed(wide_table(), 60, capsys, verbose=True).count("scaled") > 1


def test_a_pipe_gets_every_column_as_plain_text(capsys):
    print_table(Console(force_terminal=False, width=40), wide_table())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Arms"
    assert all(heading in lines[2] for heading in HEADINGS)
    assert all(number in lines[3] for number in NUMBERS)
    assert lines[-1] == "Means over seeds."


def test_markup_in_text_is_shown_as_it_is(capsys):
    table = Table("t", "a [bold] title", ("name",), [("[red]x[/red]",)], note="[i]note[/i]")
    text = printed(table, 80, capsys)
    assert all(part in text for part in ("a [bold] title", "[red]x[/red]", "[i]note[/i]"))


def test_nothing_in_a_table_steers_the_terminal(capsys):
    table = Table("t", "\x1b[2J", ("a\x07",), [(Cell("x\x1b]0;", note="\x9b31m"),)], note="\x1bc")
    text = printed(table, 80, capsys, verbose=True)
    assert not set(text) & {"\x1b", "\x07", "\x9b"}
    assert "\\x1b[2J" in text


def test_a_table_without_headings_has_no_header():
    table = Table("t", "T", ("", "", ""), [("steps", "10", "given")])
    assert plain_text(table) == "steps  10  given"


def said(text):
    console = Console(file=io.StringIO(), width=20, force_terminal=True)
    say(console, text)
    return console.file.getvalue()


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
