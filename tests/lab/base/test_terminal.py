"""What is printed is what was said, and cannot steer the terminal."""

import io

import pytest
from rich.console import Console

from muonsw.lab.base.terminal import harmless, say


def printed(text):
    console = Console(file=io.StringIO(), width=20, force_terminal=True)
    say(console, text)
    return console.file.getvalue()


@pytest.mark.parametrize(
    "text", ["[bold]a[/bold] :smile:", "a line much longer than the terminal is wide", "zwö\n\tλ·Ση"]
)
def test_a_sentence_is_printed_as_it_is(text):
    assert printed(text).expandtabs() == text.expandtabs() + "\n"


@pytest.mark.parametrize("code", [0x00, 0x07, 0x08, 0x0D, 0x1B, 0x7F, 0x9B, 0x9D, 0x202E, 0x2066, 0xDC80])
def test_what_would_steer_a_terminal_is_shown_by_its_code(code):
    shown = printed(f"a{chr(code)}b")
    assert chr(code) not in shown
    assert f"{code:x}b" in shown
    shown.encode()


def test_the_clipboard_cannot_be_written():
    assert "\x1b" not in harmless("\x1b]52;c;bWFsaWNl\x07")
