r"""Reading run folders: configuration, environment, result, and every recorded number as a column.

A folder that is still being written loads as far as it has got. Columns of large runs are kept in
`metrics.cache.npz` beside `metrics.jsonl`, or in the user's cache folder where the run cannot be written to, and are
made anew once the metrics have changed; the file may be deleted at any time.

Examples:
    >>> import json, pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "first"
    >>> folder.mkdir()
    >>> _ = (folder / "config.json").write_text('{"steps": 2, "optimizer": {"decay": "scaled"}}')
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n{"kind": "tr')
    >>> run = load_run(folder)
    >>> run.name, run.rule, run.train["loss"].tolist(), run.evals.step.tolist(), run.complete
    ('first', 'scaled', [2.5], [], False)
"""

from muonsw.lab.runs.arms import by_arm, differences, name_arms, unique_names
from muonsw.lab.runs.load import keep_columns, load_run, load_runs
from muonsw.lab.runs.run import Columns, Run, Telemetry

__all__ = [
    "Columns",
    "Run",
    "Telemetry",
    "by_arm",
    "differences",
    "keep_columns",
    "load_run",
    "load_runs",
    "name_arms",
    "unique_names",
]
