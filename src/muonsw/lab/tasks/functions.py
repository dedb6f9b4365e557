"""The functions of a user's file or module, and the options that they take."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from muonsw.lab.base.errors import UsageError
from muonsw.lab.tasks.sources import hash_sources, module_file
from muonsw.registry import unknown

# What a task consists of, with the arguments that the engine passes; further ones are options.
CALLS = {
    "model": ("seed",),
    "batches": ("split", "seed"),
    "loss": ("model", "batch"),
    "metrics": ("model", "batch"),
    "patterns": ("model", "weight_decay"),
}
OPTIONAL = ("metrics", "patterns")
SETTINGS = "SETTINGS"


@dataclass(frozen=True)
class TaskConfig:
    """A task of the user's own."""

    path: str  # a Python file, or the dotted name of a module
    options: tuple[str, ...] = ()  # its options that differ from their defaults, as `name=value`
    # A hash of its code; None takes that of its files, and a run writes it down and insists on it.
    fingerprint: str | None = None
    # Validation batches; None takes all of a list, and the first 16 of anything without a length.
    eval_batches: int | None = None

    def __post_init__(self) -> None:
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ValueError(f"task.eval_batches={self.eval_batches} must be at least 1")

    @property
    def name(self) -> str:
        """What it is called: the file's name, or the module's."""
        return Path(self.path).name


@dataclass(frozen=True)
class Functions:
    """The functions of a task, called with its options."""

    name: str  # what errors call the file
    module: ModuleType  # what it defines
    options: tuple[str, ...] = ()  # what was given, as `name=value`
    values: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        for function in CALLS:
            self._require(function)
        object.__setattr__(self, "values", self._parsed())

    def __call__(self, function: str, *given: Any) -> Any:
        """What a function returns.

        Raises:
            UsageError: If it raises something itself, with the line.
        """
        with self.blamed(function):
            return self.bound(function)(*given)

    def bound(self, function: str) -> Callable[..., Any]:
        """A function with its options filled in; errors inside it are its own."""
        called = getattr(self.module, function)
        chosen = {name: self.values[name] for name in self._own_options(function)}
        return (lambda *given: called(*given, **chosen)) if chosen else called

    def has(self, function: str) -> bool:
        """Whether the file defines it."""
        return hasattr(self.module, function)

    @property
    def settings(self) -> dict[str, Any]:
        """What the file says of steps, rates and so on, for runs that do not say otherwise."""
        found = getattr(self.module, SETTINGS, {})
        if not isinstance(found, Mapping):
            raise UsageError(f"{self.name}: {SETTINGS} is {shown(found)}; make it a dict such as {{'lr': 0.003}}")
        return dict(found)

    @contextmanager
    def blamed(self, function: str | None = None) -> Iterator[None]:
        """Turn whatever the file's code raises into an error that names the function and the line.

        Without a function it is the one in which the error arose, and errors of other code stay what they are.
        """
        try:
            yield
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if self._has(frame)]
            if function is None and not frames:
                raise
            called = function or frames[0].name
            call = f"{called}({', '.join(CALLS.get(called, ()))})"
            line = f" (line {frames[-1].lineno})" if frames else ""
            raise UsageError(f"{self.name}: {call} raised {type(error).__name__}: {error}{line}") from error

    def _has(self, frame: traceback.FrameSummary) -> bool:
        return frame.filename == self.module.__file__

    def _require(self, function: str) -> None:
        """Make sure that a function is there and takes what it is given."""
        call = f"{function}({', '.join(CALLS[function])})"
        if not self.has(function):
            if function in OPTIONAL:
                return
            raise UsageError(f"{self.name} has no {call}; `muonsw task new FILE` writes a file that has everything")
        called = getattr(self.module, function)
        if not callable(called):
            raise UsageError(f"{self.name}: {function} is {shown(called)}; expected a function {call}")
        try:
            inspect.signature(called).bind(*CALLS[function], **dict.fromkeys(self._own_options(function)))
        except TypeError as error:
            taken = f"{function}{inspect.signature(called)}"
            raise UsageError(f"{self.name}: {taken} cannot be called as {call}: {error}") from error

    def _own_options(self, function: str) -> list[str]:
        """The options that a function takes: its arguments after those of the engine."""
        arguments = list(inspect.signature(getattr(self.module, function)).parameters.values())
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        extra = [one for one in arguments[len(CALLS[function]) :] if one.kind not in kinds]
        return [one.name for one in extra if one.default is not one.empty]

    def _parsed(self) -> dict[str, Any]:
        """Every option by name: as it was given, or its default."""
        known = self._defaults()
        values = dict(known)
        for text in self.options:
            name, equals, value = text.partition("=")
            if name not in known or not equals:
                given = "an option is an argument with a default: def model(seed, depth=6) takes --task.depth 8"
                raise UsageError(f"{self.name}: {unknown('option', name, list(known))}; {given}")
            values[name] = convert(value, self._hint(name), f"--task.{name}")
        return values

    def _defaults(self) -> dict[str, Any]:
        """Options with their defaults: keyword arguments of functions."""
        found: dict[str, Any] = {}
        for function in filter(self.has, CALLS):
            arguments = inspect.signature(getattr(self.module, function)).parameters
            for name in self._own_options(function):
                default = arguments[name].default
                if name in found and found[name] != default:
                    both = f"{shown(found[name])} and {shown(default)}"
                    raise UsageError(f"{self.name}: option {name} has two defaults, {both}: give it one")
                found[name] = default
        return found

    def _hint(self, name: str) -> Any:
        """The type of an option: what it is annotated with, or that of its default."""
        for function in filter(self.has, CALLS):
            with suppress(NameError, TypeError):  # an annotation may name what only a type checker imports
                if name in (hints := get_type_hints(getattr(self.module, function))):
                    return hints[name]
        return type(self._defaults()[name])


def convert(text: str, hint: Any, name: str) -> Any:
    """A value from the text of a command line.

    Examples:
        >>> convert("6", int, "--task.depth"), convert("no", bool, "--task.flip"), convert("1e-3", float | None, "x")
        (6, False, 0.001)
    """
    union = get_origin(hint) in (Union, UnionType)
    kind = next((one for one in (get_args(hint) if union else (hint,)) if one is not type(None)), str)
    if kind not in (bool, int, float, str):
        raise UsageError(f"{name} has the default or annotation {kind}; options are bool, int, float or str")
    words: dict[str, Any] = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    try:
        return words[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        raise UsageError(f"{name} must be of type {kind.__name__}, not {text!r}") from error


def load_functions(config: TaskConfig) -> Functions:
    """The functions of a task's file or module, which is run once in a process.

    Raises:
        UsageError: If there is no such file, or it cannot be imported, or it lacks a function.
    """
    return Functions(config.name, _module(config.path), config.options)


def fingerprint(path: str) -> str:
    """Hash a task's file and the local modules that it imports, without executing any of them."""
    source = _file(path) or module_file(path) or Path(_module(path).__file__ or "")
    try:
        return hash_sources(source) if source.is_file() else ""
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _file(path: str) -> Path | None:
    """The file that a path names; None if it is the name of a module."""
    file = Path(path)
    if file.suffix != ".py" and (file.is_file() or len(file.parts) > 1):
        raise UsageError(f"{path} is no task: give a Python file, which ends in .py, or a dotted module")
    if file.suffix != ".py":
        return None
    if not file.is_file():
        raise UsageError(
            f"there is no task file {path}: check the path, or write one with `muonsw task new {shlex.quote(path)}`"
        )
    return file.resolve()


def _module(path: str) -> ModuleType:
    file = _file(path)
    try:
        return importlib.import_module(path) if file is None else _imported(file)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # the last of a script that runs when it is imported
        frames = [one.lineno for one in traceback.extract_tb(error.__traceback__) if one.filename == str(file)]
        line = f", line {frames[-1]}" if frames else ""
        raise UsageError(f"{path} cannot be imported{line}: {type(error).__name__}: {error}") from error


def _imported(file: Path) -> ModuleType:
    """A file as a module, under a name that nothing else has; modules beside it can be imported, as from a script."""
    name = f"muonsw_task_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}_{file.stat().st_mtime_ns}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def shown(value: Any) -> str:
    """A value in an error: its type, and what it is if that is short."""
    text = repr(value)
    kind = type(value).__name__
    return f"{kind} {text}" if len(text) <= 40 and "\n" not in text else f"a {kind}"


def listed(options: Sequence[str]) -> str:
    """Options as a command line has them."""
    return " ".join(f"--task.{one.replace('=', ' ', 1)}" for one in options)
