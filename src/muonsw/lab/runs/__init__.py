r"""Reading runs back: configuration, environment, result, and every recorded number as a column.

A folder that is still being written loads as far as it has got. A file of the JSON lines that `muonsw.Telemetry` writes
in a user's own loop is a run without a configuration.

Examples:
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "first"
    >>> folder.mkdir()
    >>> _ = (folder / "config.json").write_text('{"steps": 2, "optimizer": {"decay": "scaled"}}')
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n{"kind": "tr')
    >>> run = load_run(folder)
    >>> run.name, run.rule, run.train["loss"].tolist(), run.final_loss, run.complete
    ('first', 'scaled', [2.5], nan, False)
"""

from muonsw.lab.runs.arms import differences, name_arms, unique_names
from muonsw.lab.runs.metrics import Columns
from muonsw.lab.runs.run import Points, Run, Scopes, last, load_run, load_runs, norm_history

__all__ = ["Columns", "Points", "Run", "Scopes", "differences"]
__all__ += ["last", "load_run", "load_runs", "name_arms", "norm_history", "unique_names"]
