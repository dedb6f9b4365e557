"""The flat table of runs: rows hold the results, and each run appears once."""

import math

import numpy as np
import pytest

from muonsw.lab.errors import UsageError
from muonsw.lab.model import enters_norm
from muonsw.lab.runs import load_run
from muonsw.lab.studies import records
from tests.lab.studies.small_comparisons import comparison, train_in


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train_in(folder)([comparison(seeds=(0, 1), steps=12, eval_every=1, telemetry_every=1)])
    return [load_run(path) for path in sorted(folder.iterdir())]


def pooled_gradient(run):
    """The root mean square over all elements of the matrices whose output enters a normalization."""
    names = [name for name in run.scopes() if name.startswith("parameter:") and enters_norm(name[10:])]
    parts = [run.scope(name) for name in names]
    squares = sum(part["numel"] * part["gradient_rms"] ** 2 for part in parts)
    return np.sqrt(squares / sum(part["numel"] for part in parts)).tolist()


def test_a_row_holds_the_settings_and_results_of_its_run(runs, monkeypatch):
    monkeypatch.setattr(records, "SAMPLES", 10)
    for run in runs:
        row, config = records.row(run, study="x", arm=None), run.config
        assert (row["study"], row["width"], row["steps"], row["seed"]) == ("x", 16, 12, config.seed)
        assert (row["decay"], row["weight_decay"]) == (config.optimizer.decay, 1.0)
        assert row["model.layers"] == 1, "a setting that is not the default appears under its name"
        assert "arm" not in row
        assert "checkpoint_every" not in row
        assert row["final_loss"] == run.final_loss
        assert row["end_norm"] == pytest.approx(run.final_norm, rel=1e-4)
        assert row["eval.loss"] == pytest.approx(run.evals["loss"].tolist(), rel=1e-5)
        assert row["normalized.gradient_rms"] == pytest.approx(pooled_gradient(run), rel=1e-4)
        phis = run.scope("decayed")["decay"]
        assert row["total_decay"] == pytest.approx(math.fsum(phis), rel=1e-4), "every step was sampled"
        # Decayed weights whose output is not normalized are left out.
        assert row["normalized.weight_rms"][-1] != row["decayed.weight_rms"][-1]


def test_a_run_is_added_once(tmp_path, runs):
    path = tmp_path / "new" / "runs.jsonl"
    assert records.append(path, runs[:3], study="x") == 3
    assert records.append(path, runs[1:], study="y") == 1
    rows = records.read(path)
    assert [row["study"] for row in rows] == ["x", "x", "x", "y"]
    assert sorted(row["final_loss"] for row in rows) == sorted(run.final_loss for run in runs)


def test_another_file_is_refused(tmp_path, runs):
    path = tmp_path / "notes.jsonl"
    for text in ("hello\n", '{"a": 1}\n'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match="is not a table of runs"):
            records.append(path, runs)
        assert path.read_text(encoding="utf-8") == text
