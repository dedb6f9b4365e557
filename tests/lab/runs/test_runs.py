"""Run folders: what was written is what is read, whole or in progress, and nothing else passes for a run."""

import json
import os

import numpy as np
import pytest

from muonsw.lab.errors import UsageError
from muonsw.lab.runs import by_arm, differences, keep_columns, load_run, load_runs, name_arms, tabulate
from muonsw.lab.runs import load as loading
from tests.lab.report.made_runs import Recipe, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first", Recipe(steps=200, extra={"note": "λ"}))


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(loading, "KEEP_FROM", 0)
    monkeypatch.setattr(loading, "SHARE_FROM", 0)


def records(folder, kind):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def same(column, values):
    np.testing.assert_array_equal(column, np.array(values, dtype=np.float64))


def check_against_text(run, folder):
    trained, seen = records(folder, "train"), records(folder, "telemetry")
    for key in ("step", "loss", "cross_entropy", "lr", "tokens"):
        same(run.train[key], [record[key] for record in trained])
    same(run.train["load_entropy.1"], [record["load_entropy"][1] for record in trained])
    same(run.evals["loss"], [record["loss"] for record in records(folder, "eval")])
    same(run.telemetry.step, [record["step"] for record in seen])
    same(run.telemetry.skipped, [record["skipped"] for record in seen])
    scopes = {"all": ("all",), "decayed": ("decayed",), "role:hidden": ("roles", "hidden"), "layer:1": ("layers", "1")}
    scopes["parameter:layers.1.experts.up"] = ("parameters", "layers.1.experts.up")
    for scope, path in scopes.items():
        for key in ("weight_rms", "alignment_update", "peak_lr"):
            expected = seen
            for part in (*path, key):
                expected = [record[part] for record in expected]
            same(run.telemetry.column(scope, key), expected)


def test_every_number_is_read_as_it_was_written(folder):
    run = load_run(folder)
    check_against_text(run, folder)
    assert run.name == "first"
    assert run.config["note"] == "λ"
    assert run.rule == "scaled"
    assert run.environment["torch"] == "2.13.0"
    assert run.complete
    assert set(run.telemetry.scopes()) == {
        "all", "decayed", "role:hidden", "role:embedding", "layer:0", "layer:1",
        "parameter:layers.0.attention.qkv", "parameter:layers.1.experts.up",
    }  # fmt: skip
    assert run.telemetry.scope("decayed").step.tolist() == run.telemetry.step.tolist()


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("processes", [1, 2])
def test_kept_columns_and_processes_change_nothing(tmp_path, processes):
    folders = [write_run(tmp_path / name, Recipe(steps=150, seed=seed)) for seed, name in enumerate(("a\tb", "c\nd"))]
    for _ in range(2):
        for run, where in zip(load_runs(folders, processes=processes), folders, strict=True):
            assert (where / "metrics.cache.npz").is_file()
            check_against_text(run, where)
    with (folders[0] / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 151, "loss": 0.125}\n')
    assert load_runs(folders, processes=processes)[0].evals["loss"][-1] == 0.125


@pytest.mark.usefixtures("everything_is_large")
def test_a_run_that_has_ended_can_keep_its_columns(tmp_path):
    where = write_run(tmp_path / "run", Recipe(steps=60))
    keep_columns(where)
    stored = (where / "metrics.cache.npz").stat().st_mtime_ns
    check_against_text(load_run(where), where)
    assert (where / "metrics.cache.npz").stat().st_mtime_ns == stored


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"\x93NUMPY\x01\x00v\x00{'descr'"])
def test_a_broken_cache_is_made_anew(tmp_path, content):
    where = write_run(tmp_path / "run", Recipe(steps=60))
    (where / "metrics.cache.npz").write_bytes(content)
    check_against_text(load_run(where), where)
    assert (where / "metrics.cache.npz").read_bytes() != content


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_that_cannot_be_written_to_is_kept_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    where = write_run(tmp_path / "run", Recipe(steps=60))
    where.chmod(0o500)
    try:
        check_against_text(load_run(where), where)
        assert len(list((tmp_path / "cache").rglob("*.npz"))) == 2
    finally:
        where.chmod(0o700)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_is_being_written_is_left_out(tmp_path, folder, cut):
    text = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:40]
    where = tmp_path / "run"
    where.mkdir()
    (where / "config.json").write_text('{"steps": 200}')
    (where / "metrics.jsonl").write_bytes(b"".join(text)[:-cut])
    run = load_run(where)
    count = 40 - (cut > 1)  # without its newline alone a line is still whole
    assert run.train.records + run.evals.records + run.telemetry.records == count
    assert not run.complete
    assert run.result is None
    assert run.environment == {}


def test_what_has_not_been_written_yet_is_empty(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for text in (None, "", '{"kind"'):
        if text is not None:
            (tmp_path / "metrics.jsonl").write_text(text)
        run = load_run(tmp_path)
        assert run.train.records == run.evals.records == run.telemetry.records == 0
        assert run.telemetry.scopes() == []
        assert run.telemetry.scope("all").known("weight_rms")[0].size == 0
        with pytest.raises(KeyError, match="weight_rms"):
            run.telemetry.column("all", "weight_rms")


ODD = [
    {"kind": "train", "step": 1, "loss": 1.5, "z2": 0.5},
    {"kind": "train", "step": 2, "loss": None, "z2": 1e-7},
    {"kind": "train", "step": 3, "loss": 2.5e22, "z": -1},
    {"step": 4, "kind": "train", "loss": True, "word": "12", "list": [1, [2, None]]},
    {"kind": "train", "step": 5, "loss2": 7.0, "z": -1},
    {"kind": "note", "step": 9, "text": "train", "deep": {"a": {"b": 4}}},
    {"kind": "telemetry", "step": 5, "skipped": 3, "all": {"x": 1.0, "y": None}, "roles": {"decayed": {"x": 7.0}}},
    {"kind": "telemetry", "step": 6, "roles": {"all": {"x": 8.0}}, "all": {"x": 2.0}, "skipped": 4},
    {"kind": "telemetry", "step": 7, "all": {"x": 3.0}, "skipped": 5},
]


@pytest.mark.parametrize("block", [1, 50, 1000, 4096])
def test_where_blocks_are_cut_does_not_matter(folder, monkeypatch, block):
    monkeypatch.setattr(tabulate, "BLOCK", block)
    check_against_text(load_run(folder), folder)


def test_records_that_are_not_alike_keep_their_places(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("\n\n".join(json.dumps(record) for record in ODD) + "\n")
    run, nan = load_run(tmp_path), float("nan")
    same(run.train["loss"], [1.5, nan, 2.5e22, 1.0, nan])
    same(run.train["z2"], [0.5, 1e-7, nan, nan, nan])
    same(run.train["loss2"], [nan, nan, nan, nan, 7.0])
    same(run.train["z"], [nan, nan, -1, nan, -1])
    same(run.train["list.1.0"], [nan, nan, nan, 2, nan])
    assert "word" not in run.train
    same(run.columns("note")["deep.a.b"], [4])
    same(run.telemetry.column("all", "x"), [1.0, 2.0, 3.0])
    same(run.telemetry.column("role:decayed", "x"), [7.0, nan, nan])
    same(run.telemetry.column("role:all", "x"), [nan, 8.0, nan])
    same(run.telemetry.skipped, [3, 4, 5])
    assert "decayed" not in run.telemetry.scopes()


def test_the_last_record_of_a_step_counts(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    lines = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0), (2, 3.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_run(tmp_path)
    assert run.train.step.tolist() == [1, 2, 3]
    same(run.train["loss"], [5.0, 3.0, 9.0])


def test_what_is_not_a_run_is_named(tmp_path, folder):
    with pytest.raises(UsageError, match="nowhere is not a run: it does not exist"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is a file"):
        load_run(folder / "config.json")
    with pytest.raises(UsageError, match=r"no config\.json; it holds runs: first"):
        load_run(folder.parent)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"cannot read .*config\.json"):
        load_run(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="should hold a JSON object"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"), [("{broken", "line 2 is not JSON"), ("[1]", "line 2 is not a JSON object")]
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path, line, message):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(f'{{"kind": "train", "step": 1}}\n{line}\n{{"kind": "train", "step": 2}}\n')
    with pytest.raises(UsageError, match=message):
        load_run(tmp_path)


def test_arms_are_what_sets_runs_apart(tmp_path):
    recipes = {
        "a": Recipe("constant", 0, 40), "b": Recipe("constant", 1, 40), "c": Recipe("scaled", 0, 40),
        "d": Recipe("scaled", 0, 40, weight_decay=0.4), "e": Recipe("scaled", 3, 40, arm="mine"),
    }  # fmt: skip
    runs = load_runs(write_run(tmp_path / name, recipe) for name, recipe in recipes.items())
    assert name_arms(runs[:3]) == ["constant", "constant", "scaled"]
    assert name_arms(runs) == ["constant λ=0.1", "constant λ=0.1", "scaled λ=0.1", "scaled λ=0.4", "mine"]
    assert {name: [run.name for run in arm] for name, arm in by_arm(runs[:3]).items()} == {
        "constant": ["a", "b"],
        "scaled": ["c"],
    }
    found = differences([run.config for run in runs])
    assert list(found)[:2] == ["optimizer.decay", "optimizer.weight_decay"]
    assert found["seed"] == [0, 1, 0, 0, 3]
    assert "steps" not in found
