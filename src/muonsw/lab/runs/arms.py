"""Which runs belong together: what their configurations differ in, and a name for each arm of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muonsw.lab.settings import flatten

if TYPE_CHECKING:
    from muonsw.lab.runs import Run

# What may differ between runs of one arm: the draw of random numbers, and how a run is carried out and kept.
WITHIN_ARM = frozenset(
    {"seed", "arm", "name", "out", "device", "threads", "compile", "keep", "checkpoint_every", "tensorboard", "wandb"}
)
SYMBOLS = {"optimizer.weight_decay": "λ", "optimizer.lr": "η", "steps": "T", "model.width": "d"}
FIRST = ("optimizer.algorithm", "optimizer.decay", "optimizer.weight_decay", "optimizer.lr")


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values are not the same everywhere, with their values; a missing key is None.

    Examples:
        >>> differences([{"seed": 0, "steps": 9}, {"seed": 1, "steps": 9}])
        {'seed': [0, 1]}
    """
    flat = [flatten(config) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    columns = {key: [config.get(key) for config in flat] for key in sorted(keys, key=_importance)}
    return {key: values for key, values in columns.items() if len({json.dumps(v, default=str) for v in values}) > 1}


def name_arms(runs: Sequence[Run]) -> list[str]:
    """A name for the arm of each run: the one in its configuration, or what sets it apart from the others.

    Runs that differ in their seed alone share a name.
    """
    distinct = {
        key: values for key, values in differences([run.config for run in runs]).items() if _varies_between_arms(key)
    }
    described = [
        _describe(run, {key: values[place] for key, values in distinct.items()}) for place, run in enumerate(runs)
    ]
    return [str(run.config.get("arm") or name) for run, name in zip(runs, described, strict=True)]


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each arm, arms and runs in the order given."""
    arms: dict[str, list[Run]] = {}
    for run, name in zip(runs, name_arms(runs), strict=True):
        arms.setdefault(name, []).append(run)
    return arms


def _varies_between_arms(key: str) -> bool:
    return key.rpartition(".")[2] not in WITHIN_ARM


def _importance(key: str) -> tuple[int, str]:
    return (FIRST.index(key) if key in FIRST else len(FIRST), key)


def _describe(run: Run, values: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != "optimizer.decay" and value is not None}
    words = [str(run.rule)] if run.rule else []
    words += [_setting(key, value) for key, value in rest.items()]
    return " ".join(words) or run.name


def _setting(key: str, value: Any) -> str:
    if key in SYMBOLS:
        return f"{SYMBOLS[key]}={_short(value)}"
    return str(value) if key == "optimizer.algorithm" else f"{key.rpartition('.')[2]}={_short(value)}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def unique_names(names: Iterable[str]) -> list[str]:
    """The same names, those that occur again with a number behind.

    Examples:
        >>> unique_names(["a", "b", "a"])
        ['a', 'b', 'a (2)']
    """
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result
