"""Where records can go: a JSON Lines file, a TensorBoard writer, a W&B or an MLflow run. Any function is a sink too.

Writers and runs are the user's own objects; nothing is imported here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from muonsw.telemetry.record import Record

# Records of a training loop go to the same places, each kind under its own name.
KINDS = ("telemetry", "train", "eval")


class JsonlSink:
    r"""Appends each record to a file, one JSON object a line, flushed at once.

    Args:
        path: the file; missing folders are made.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> with JsonlSink(path) as sink:
        ...     sink({"kind": "telemetry", "step": 1, "all": {"weight_rms": 0.5}})
        >>> path.read_text()
        '{"kind": "telemetry", "step": 1, "all": {"weight_rms": 0.5}}\n'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def __call__(self, record: Record) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TensorBoardSink:
    """Writes every value as a scalar, `telemetry/roles/hidden/weight_rms` and the like.

    Args:
        writer: anything with `add_scalar(tag, value, global_step)`, such as `torch.utils.tensorboard.SummaryWriter`.
        parameters: write the values of each parameter too.
    """

    def __init__(self, writer: Any, *, parameters: bool = False) -> None:
        self.writer, self.parameters = writer, parameters

    def __call__(self, record: Record) -> None:
        for tag, value in scalars(record, parameters=self.parameters):
            self.writer.add_scalar(tag, value, record["step"])


class WandbSink:
    """Logs every value to a W&B run, against `telemetry/step` so that it does not move the run's own step.

    Args:
        run: what `wandb.init()` returns, or anything with `log(dict)`.
        parameters: log the values of each parameter too.
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
    """Logs every value to MLflow, at the step of the record.

    Args:
        run: the module `mlflow` with a run that is active, or anything with `log_metrics(metrics, step)`.
        parameters: log the values of each parameter too.
    """

    def __init__(self, run: Any, *, parameters: bool = False) -> None:
        self.run, self.parameters = run, parameters

    def __call__(self, record: Record) -> None:
        self.run.log_metrics(dict(scalars(record, parameters=self.parameters)), step=record["step"])


def scalars(record: Record, *, parameters: bool = False) -> Iterator[tuple[str, float]]:
    """The numbers of a record under flat names that start with its kind; those that are None are left out.

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
