"""From the words of a command line to a command, and the help that describes its options."""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import Field, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Protocol, Union, cast, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import arg

from muonsw.lab.base.errors import UsageError

TASK_PREFIX = "--task."


class Command(Protocol):
    """What `muonsw` can run."""

    def run(self) -> int:
        """Do it and return the exit code."""
        ...


def parse(name: str, kind: type[Command], options: Sequence[str]) -> Command:
    """The command with these options; a usage error exits with 2, `--help` with 0."""
    _tidy(kind)
    words, shown = _gathered(options), io.StringIO()
    _refuse_empty(words, kind)
    if not {"-h", "--help"} & set(words):
        return tyro.cli(kind, prog=f"muonsw {name}", args=words)
    try:
        with redirect_stdout(shown):
            return tyro.cli(kind, prog=f"muonsw {name}", args=words)
    finally:
        print("\n".join(map(_wrapped, shown.getvalue().splitlines())))


def _gathered(words: Sequence[str]) -> list[str]:
    """The words with `--task.depth 6 --task.flip` as one option `--task-options depth=6 flip=true`.

    Examples:
        >>> _gathered(["--task", "vit.py", "--task.depth", "6", "--steps", "9"])
        ['--task', 'vit.py', '--steps', '9', '--task-options', 'depth=6']
    """
    rest, found, waiting = [], [], list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith(TASK_PREFIX):
            rest.append(word)
            continue
        name, equals, value = word.removeprefix(TASK_PREFIX).partition("=")
        if not equals:
            value = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        found.append(f"{name.replace('-', '_')}={value}")
    return [*rest, "--task-options", *found] if found else rest


def _refuse_empty(words: Sequence[str], kind: type) -> None:
    """Refuse what a shell makes of a variable without a value: as a path it would be the current folder."""
    for before, word in itertools.pairwise(["", *words]):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals and not value and option not in _empty_unless_given(kind):
            raise UsageError(f"an argument is empty{option and f' after {option}'}: give a value, or leave it out")


def _empty_unless_given(kind: type) -> set[str]:
    """The options of a command whose default is an empty text, those of its groups of options included."""
    found = {f"--{one.name.replace('_', '-')}" for one in fields(kind) if one.default == ""}
    inner = (part for hint in get_type_hints(kind, include_extras=True).values() for part in _parts(hint))
    return found.union(*(_empty_unless_given(one) for one in inner if isinstance(one, type) and is_dataclass(one)))


def changed(command: Any) -> list[str]:
    """The options of a command that differ from their defaults, those of its groups of options included.

    Examples:
        >>> from muonsw.lab.commands.train import Changes, Train
        >>> changed(Train(seed=3, optimizer=Changes(weight_decay=0.1)))
        ['--seed', '--weight-decay']
    """
    found = []
    for one in fields(command):
        value = getattr(command, one.name)
        if is_dataclass(value):
            found += changed(value)
        elif value != one.default:
            found.append(f"--{one.name.replace('_', '-')}")
    return found


def given(command: Any, *names: str) -> dict[str, Any]:
    """Options of a command by their names, without those that were left out.

    Examples:
        >>> from muonsw.lab.commands.train import Train
        >>> given(Train(steps=5), "steps", "batch")
        {'steps': 5}
    """
    return {name: value for name in names if (value := getattr(command, name)) is not None}


def require_at_least_one(command: Any, *names: str) -> None:
    """Refuse options that count something and are below 1."""
    for name, value in given(command, *names).items():
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def width() -> int:
    """Columns of prose: those of the terminal, and 80 at most."""
    return min(80, shutil.get_terminal_size().columns)


def _wrapped(line: str) -> str:
    """A line of help; tyro wraps the options, which are indented, and leaves each paragraph above them on one line."""
    return line.rstrip() if line.startswith(" ") else textwrap.fill(line, width())


def _tidy(kind: type) -> None:
    """Let help and errors name the type of an option that may be left out, and no default where there is none to name.

    tyro would print `{None}|FLOAT` and `(default: None)`, and break lines where the docstring does. Fields keep their
    plain annotations and docstrings in the source; here each gets what tyro is to print.
    """
    hints, documented = get_type_hints(kind, include_extras=True), _docstrings(kind)
    for one in fields(kind):
        for inner in _parts(hints[one.name]):
            if isinstance(inner, type) and is_dataclass(inner):
                _tidy(inner)
        shown: dict[str, Any] = _shown(hints[one.name], one)
        if one.name in documented:
            shown["help"] = documented[one.name]
        kind.__annotations__[one.name] = Annotated[hints[one.name], arg(**shown)]


def _docstrings(kind: type) -> dict[str, str]:
    """The strings below the fields of a class, each on one line."""
    definition = cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0])
    found = {}
    for field, below in itertools.pairwise(definition.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """A type and all that it is made of, the metadata of annotations included."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _shown(hint: Any, one: Field[Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if one.default in (None, "", ()) or one.default is False:
        shown["help_behavior_hint"] = ""
    unions = [get_args(part) for part in _parts(hint) if get_origin(part) in (Union, UnionType)]
    if one.default is None and unions:
        shown["constructor"] = unions[0][0]  # the type without None, which is no word to type
    return shown
