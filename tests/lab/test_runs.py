"""Run folders: complete and unfinished runs read back as written, and nothing else passes for a run."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from muonsw import MuonSW
from muonsw.lab.errors import UsageError
from muonsw.lab.runs import load_run
from muonsw.telemetry import JsonlSink
from tests.lab.made_runs import make_run, watch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first", steps=200)


def records(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["kind"] == kind]


def write_lines(folder, lines, end="\n"):
    (folder / "config.json").write_text("{}", encoding="utf-8")
    text = end.join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder


def same(column, values):
    np.testing.assert_array_equal(column, np.array(values, dtype=np.float64))


def test_everything_written_is_read_back(folder):
    run = load_run(folder)
    trained, seen = records(folder, "train"), records(folder, "telemetry")
    for key in ("step", "loss", "cross_entropy", "lr", "tokens"):
        same(run.train[key], [record[key] for record in trained])
    same(run.evals["loss"], [record["loss"] for record in records(folder, "eval")])
    same(run.telemetry.step, [record["step"] for record in seen])
    scopes = {"all": ("all",), "decayed": ("decayed",), "role:hidden": ("roles", "hidden"), "layer:1": ("layers", "1")}
    scopes["parameter:layers.1.experts.up"] = ("parameters", "layers.1.experts.up")
    for scope, path in scopes.items():
        for key in ("weight_rms", "alignment_update", "decay"):
            values = [record[path[0]] if len(path) == 1 else record[path[0]][path[1]] for record in seen]
            same(run.scope(scope)[key], [value[key] for value in values])
        assert run.scope(scope).step.tolist() == run.telemetry.step.tolist()
    assert set(scopes) <= set(run.scopes())


def test_a_run_in_progress_is_read_without_the_line_that_is_being_written(tmp_path):
    losses = [3.0 + abs(step - 50) / 100 for step in range(200)]
    folder = make_run(tmp_path / "half", steps=200, until=91, losses=losses)
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes() + b'{"kind": "train", "st')
    run = load_run(folder)
    assert run.in_progress
    assert run.result is None
    assert (run.steps, run.planned_steps) == (91, 200)
    assert run.final_loss == run.losses[1][-1] > run.best_loss == min(run.losses[1])
    assert np.isnan(run.seconds)


def test_a_run_without_records_has_empty_columns(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    run = load_run(tmp_path)
    assert run.train.records == run.evals.records == run.telemetry.records == 0
    assert run.scopes() == []
    assert np.isnan([run.final_loss, run.best_loss, run.final_norm, run.norm_change]).all()
    assert run.rule == ""
    assert not run.in_progress
    assert all(len(part) == 0 for part in run.norms)


ODD = [
    {"kind": "train", "step": 1, "loss": 1.5, "z2": 0.5},
    {"kind": "train", "step": 2, "loss": 7.0, "z2": 0.1},
    {"kind": "train", "step": 3, "loss": 9.0, "z2": 0.2},
    {"kind": "train", "step": 2, "loss": None, "z2": 1e-7},
    {"step": 4, "kind": "train", "loss": True, "word": "12", "list": [1, [2, None]]},
    {"kind": "note", "step": 9, "text": "train", "deep": {"a": {"b": 4}}},
    {"kind": "telemetry", "step": 5, "skipped": 3, "all": {"x": 1.0, "y": None}, "roles": {"decayed": {"x": 7.0}}},
    {"kind": "telemetry", "step": 6, "roles": {"all": {"x": 8.0}}, "all": {"x": 2.0}, "skipped": 4},
    {"kind": "telemetry", "step": 7, "all": {"x": 3.0}, "skipped": 5},
]


def test_records_with_different_keys_keep_their_places_and_the_last_record_of_a_step_counts(tmp_path):
    run, nan = load_run(write_lines(tmp_path, ODD, end="\n\n")), float("nan")
    assert run.train.step.tolist() == [1, 2, 3, 4]
    same(run.train["loss"], [1.5, nan, 9.0, 1.0])
    same(run.train["z2"], [0.5, 1e-7, 0.2, nan])
    same(run.train["list.1.0"], [nan, nan, nan, 2])
    assert "word" not in run.train
    same(run.tables["note"][""]["deep.a.b"], [4])
    same(run.scope("all")["x"], [1.0, 2.0, 3.0])
    same(run.scope("role:decayed")["x"], [7.0, nan, nan])
    same(run.scope("role:all")["x"], [nan, 8.0, nan])
    same(run.telemetry["skipped"], [3, 4, 5])
    assert "decayed" not in run.scopes()


def test_a_path_that_is_not_a_run_is_refused_with_the_reason(tmp_path, folder):
    with pytest.raises(UsageError, match="nowhere is not a run: it does not exist"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"config\.json: line 1: it has no step"):
        load_run(folder / "config.json")
    with pytest.raises(UsageError, match=r"no config\.json; it holds runs: first"):
        load_run(folder.parent)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"config\.json cannot be read"):
        load_run(tmp_path)


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    first, last = ({"kind": "train", "step": step} for step in (1, 2))
    for line, message in {
        "{broken": "line 2: not JSON",
        "[1]": "line 2: not a JSON object",
        '{"kind": "train", "loss": 1}': "line 2: it has no step",
        '{"kind": "telemetry", "step": 1, "all": 3}': "line 2: 'all' is not a JSON object",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_run(write_lines(tmp_path, [first, line, last]))


def test_a_run_knows_its_losses_and_its_norm(folder):
    run = load_run(folder)
    losses = [record["loss"] for record in records(folder, "eval")]
    norms = [record["decayed"]["weight_rms"] for record in records(folder, "telemetry")]
    assert run.losses[1].tolist() == losses
    assert (run.final_loss, run.best_loss) == (losses[-1], min(losses))
    assert run.training_losses[1].tolist() == [record["cross_entropy"] for record in records(folder, "train")]
    assert run.norms[1].tolist() == norms
    assert run.final_norm == norms[-1]
    assert run.norm_change == norms[-1] / max(norms) - 1.0
    assert (run.steps, run.seconds) == (200, 8.0)
    assert math.isnan(replace(run, result={**run.result, "final_loss": None}).final_loss), "no earlier loss instead"


def test_a_telemetry_file_is_a_run(tmp_path):
    """The decay rule is inferred from the recorded decay; at one learning rate it is unknown."""
    for rule, end in (("scaled", 0.1), ("constant", 0.1), ("scaled", 1.0)):
        model = torch.nn.Linear(8, 8, bias=False)
        optimizer = MuonSW(model.named_parameters(), lr=0.02, weight_decay=0.1, decay=rule)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end, total_iters=9)
        path = tmp_path / f"{rule}{end}.jsonl"
        loss = partial(torch.nn.functional.mse_loss, model.weight, torch.zeros(8, 8))
        watch(optimizer, loss, JsonlSink(path), steps=9, schedule=schedule)
        run = load_run(path)
        assert (run.name, run.rule) == (f"{rule}{end}", rule if end < 1 else "")
        assert (run.steps, run.telemetry.records) == (9, 9)
        assert "parameter:weight" in run.scopes()
        assert len(run.norms[0]) == 9
        assert not run.in_progress
