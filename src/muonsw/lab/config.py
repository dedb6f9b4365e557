"""Settings as frozen dataclasses: strict conversion to and from JSON, and differences between two."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from muonsw.lab.files import plain
from muonsw.registry import unknown

T = TypeVar("T")
# A commit with all settings that classes list in `RETIRED`.
LAST_WITH_RETIRED = "15506f24"
_hints = cache(get_type_hints)  # parsing annotations takes longer than everything else


def as_data(settings: Any) -> dict[str, Any]:
    """JSON data of settings, with those in the `RETIRED` of their class, so that runs keep their identity."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    data = {name: as_data(value) if is_dataclass(value) else plain(value) for name, value in values.items()}
    return {**data, **getattr(settings, "RETIRED", {})}


def from_data(kind: type[T], data: Any, where: str = "") -> T:
    """The dataclass that JSON data describes; missing settings take their default.

    A wrong key or type raises a `ValueError` that names the setting, with the prefix `where`. A class may list former
    settings in `RETIRED`, with the only value at which they are accepted.

    Examples:
        >>> from muonsw.lab.model import MuP
        >>> from_data(MuP, {"base_widht": 128})
        Traceback (most recent call last):
        ...
        ValueError: unknown setting 'base_widht' (did you mean 'base_width'?); known: enabled, base_width, ...
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{where or 'the settings'}: expected an object with settings, not {data!r}")
    hints, known = _hints(kind), {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    retired = getattr(kind, "RETIRED", {})
    for key, value in data.items():
        if key in retired and value != retired[key]:
            raise ValueError(f"{_dotted(where, key)}={value!r} needs an older muonsw: commit {LAST_WITH_RETIRED}")
        if key not in known and key not in retired:
            raise ValueError(f"{where and f'{where}: '}{unknown('setting', key, list(known))}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"setting {_dotted(where, name)} is missing")
    typed = {key: _typed(hints[key], value, _dotted(where, key)) for key, value in data.items() if key in known}
    return kind(**typed)


def require(holds: bool, name: str, value: Any, what: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value} must be {what}")


def require_choices(settings: Any, choices: Mapping[str, Sequence[str]], prefix: str = "") -> None:
    for name, known in choices.items():
        if (value := getattr(settings, name)) not in known:
            raise ValueError(f"{prefix}{name}={value!r} must be one of {', '.join(known)}")


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By dotted name, the values that differ between two nested mappings, or "missing"."""
    old, new = flatten(first), flatten(second)
    pairs = {name: (old.get(name, "missing"), new.get(name, "missing")) for name in (*old, *new)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def changed(command: Any) -> list[str]:
    """List the command-line options that differ from their defaults, including those of option groups."""
    names = []
    for option in fields(command):
        value = getattr(command, option.name)
        if is_dataclass(value):
            names += changed(value)
        elif value != option.default:
            names.append(f"--{option.name.replace('_', '-')}")
    return names


def flatten(data: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = _dotted(where, key)
        flat |= flatten(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Convert a value to the type of its field: JSON has no tuples, and writes whole floats as integers."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        return _typed(next(choice for choice in choices if choice is not type(None)), value, name)
    if is_dataclass(hint):
        return from_data(hint, value, name)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name}={value!r} must be a list")
        return tuple(_typed(choices[0], item, f"{name}[{place}]") for place, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {_typed(choices[0], key, name): _typed(choices[1], item, f"{name}.{key}") for key, item in value.items()}
    if origin is Literal and value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, choices))}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = origin if origin is dict else hint
    checkable = kind is not Any and isinstance(kind, type)  # since Python 3.11 Any is a class without instances
    if checkable and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ValueError(f"{name}={value!r} must be of type {kind.__name__}")
    return value
