"""Sinks for records: a JSON Lines file, a TensorBoard writer, a W&B run, MLflow. Any function is a sink too.

The user passes the writer or run, so this file imports none of these packages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# Kinds of records, each logged under its own prefix.
KINDS = ("telemetry", "train", "eval")


class JsonlSink:
    r"""Appends each record to a file as one line of JSON; a value that is not finite becomes null.

    Args:
        path: the file; missing folders are created.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> JsonlSink(path)({"kind": "telemetry", "step": 1, "all": {"weight_rms": 0.5}})
        >>> path.read_text()
        '{"kind": "telemetry", "step": 1, "all": {"weight_rms": 0.5}}\n'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()  # fail now and not after the first steps

    def __call__(self, record: Record) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = json.dumps(finite, allow_nan=False) + "\n"
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


class TensorBoardSink:
    """Writes every value as a scalar such as `telemetry/roles/hidden/weight_rms`.

    Args:
        writer: anything with `add_scalar(tag, value, global_step)`, such as `torch.utils.tensorboard.SummaryWriter`.
        parameters: also write the values of each parameter.
    """

    def __init__(self, writer: Any, *, parameters: bool = False) -> None:
        self.writer, self.parameters = writer, parameters

    def __call__(self, record: Record) -> None:
        for tag, value in scalars(record, parameters=self.parameters):
            self.writer.add_scalar(tag, value, record["step"])


class WandbSink:
    """Logs every value to a W&B run, against `telemetry/step`, which leaves the run's own step alone.

    Args:
        run: the result of `wandb.init()`, or anything with `log(dict)`.
        parameters: also log the values of each parameter.
    """

    def __init__(self, run: Any, *, parameters: bool = False) -> None:
        self.run, self.parameters = run, parameters
        if hasattr(run, "define_metric"):
            for kind in KINDS:
                run.define_metric(f"{kind}/step")
                run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")

    def __call__(self, record: Record) -> None:
        step = {f"{record.get('kind', KINDS[0])}/step": record["step"]}
        self.run.log({**step, **dict(scalars(record, parameters=self.parameters))})


class MlflowSink:
    """Logs every value to MLflow, at the record's step.

    Args:
        run: the module `mlflow` with an active run, or anything with `log_metrics(metrics, step)`.
        parameters: also log the values of each parameter.
    """

    def __init__(self, run: Any, *, parameters: bool = False) -> None:
        self.run, self.parameters = run, parameters

    def __call__(self, record: Record) -> None:
        self.run.log_metrics(dict(scalars(record, parameters=self.parameters)), step=record["step"])


def scalars(record: Record, *, parameters: bool = False) -> Iterator[tuple[str, float]]:
    """The numbers of a record under flat names that start with its kind, without None values.

    Examples:
        >>> roles = {"hidden": {"decay": None, "lr": 0.1}}
        >>> list(scalars({"step": 1, "all": {"weight_rms": 0.5}, "roles": roles, "skipped": 0}))
        [('telemetry/all/weight_rms', 0.5), ('telemetry/roles/hidden/lr', 0.1), ('telemetry/skipped', 0)]
    """
    left_out = {"kind", "step", "groups"} | (set() if parameters else {"parameters"})
    numbers = {key: value for key, value in record.items() if key not in left_out}
    yield from _leaves(record.get("kind", KINDS[0]), numbers)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{name}/{key}", item)
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _leaves(f"{name}/{place}", item)
    elif isinstance(value, int | float):
        yield name, value
