"""Which runs belong together: what their configurations differ in, and a name for each arm of a comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from muonsw.lab.config import flatten

if TYPE_CHECKING:
    from muonsw.lab.runs import Run

# What may differ between runs of one arm: the draw of random numbers, and how a run is carried out and kept.
WITHIN_ARM = (
    *("seed", "arm", "device", "threads", "compile", "keep", "tensorboard", "wandb"),
    *("checkpoint_every", "checkpoint_seconds"),
)
SYMBOLS = {"optimizer.weight_decay": "λ", "optimizer.lr": "η", "steps": "T", "model.width": "d"}
FIRST = ("optimizer.algorithm", "optimizer.preset", "optimizer.decay", "optimizer.weight_decay", "optimizer.lr")


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The keys whose values are not the same everywhere, with their values; a missing key is None.

    Examples:
        >>> differences([{"seed": 0, "steps": 9}, {"seed": 1, "steps": 9}])
        {'seed': [0, 1]}
    """
    flat = [flatten(config) for config in configs]
    keys = {key for config in flat for key in config}
    ordered = sorted(keys, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key))
    columns = {key: [config.get(key) for config in flat] for key in ordered}
    return {key: values for key, values in columns.items() if len({json.dumps(v, default=str) for v in values}) > 1}


def name_arms(runs: Sequence[Run]) -> list[str]:
    """A name for the arm of each run: the one in its configuration, or what sets it apart from the others.

    Runs that differ in their seed alone share a name.
    """
    found = differences([run.settings for run in runs])
    between = {key: values for key, values in found.items() if key.rpartition(".")[2] not in WITHIN_ARM}
    return [
        str(run.arm or _describe(run, {key: values[place] for key, values in between.items()}))
        for place, run in enumerate(runs)
    ]


def _describe(run: Run, values: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in values.items() if key != "optimizer.decay" and value is not None}
    words = [str(run.rule)] if run.rule else []
    words += [_setting(key, value) for key, value in rest.items()]
    return " ".join(words) or run.name


def _setting(key: str, value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if key in FIRST[:2] else f"{SYMBOLS.get(key, key.rpartition('.')[2])}={text}"


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
