"""Run folders in odd states: each once was a traceback or a silence."""

import json
import os
import shutil
from pathlib import Path

import pytest

from muonsw.lab.base.errors import UsageError
from muonsw.lab.runs import load_run
from muonsw.lab.train import checkpoint
from muonsw.lab.train.loop import Watch, train
from tests.faults.commands import refused, run_command
from tests.faults.folders import LAST, config, ending, folders
from tests.faults.test_damage import NEWER, OLDER


@pytest.mark.parametrize("content", ["[1]", "[" * 10_000, '{"a":' * 10_000, "9" * 400, '{"step": NaN}', ""], ids=len)
def test_a_state_that_is_no_state_is_put_aside_and_named(content):
    run = folders().copy("stopped")
    (run / NEWER / "state.json").write_text(content, encoding="utf-8")
    said = run_command("train", "--config", run / "config.json", "--out", run)
    assert said.code == 0
    assert f"damaged checkpoint left out: {run / NEWER / 'state.json'}" in said.text
    assert ending(run) == ending(folders().whole)


def test_a_link_to_a_checkpoint_is_used_and_only_the_link_is_deleted():
    run = folders().copy("stopped")
    elsewhere = run.parent / "elsewhere"
    (run / OLDER).rename(elsewhere)
    (run / OLDER).symlink_to(elsewhere)
    shutil.rmtree(run / NEWER)
    notes = []
    settings = config(folders().data, keep=1)
    train(settings, run, Watch(note=notes.append))
    assert f"going on after update 2, from {run / OLDER}" in notes
    assert not (run / OLDER).exists()
    assert checkpoint.load(elsewhere.rename(elsewhere.with_name("step-00000002"))).step == 2


@pytest.mark.parametrize("command", ["export", "sample"])
def test_an_older_checkpoint_is_not_taken_without_a_word(command):
    run = folders().copy("whole")
    (run / LAST / "model.safetensors").write_bytes(b"")
    said = run_command(command, run)
    assert said.code == 0
    assert f"damaged checkpoint left out, an older one is taken if there is one: {run / LAST}" in said.text


def test_a_run_whose_name_is_not_utf8_is_trained_shown_and_exported():
    run = folders().copy("stopped")
    named = run.with_name(os.fsdecode(b"run-\xff\xfe"))
    run.rename(named)
    assert "going on after update 4" in run_command("train", "--config", named / "config.json", "--out", named).text
    assert ending(named) == ending(folders().whole)
    assert run_command("export", named).code == 0
    assert run_command("sample", named / "export", "--tokens", "2", "--prompt", os.fsdecode(b"\xff")).code == 0
    page = named.parent / "page.html"
    assert run_command("report", named, "-o", page, "--no-images").code == 0
    assert "run-\\udcff\\udcfe" in page.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize(
    ("key", "value", "predicted"),
    [
        ("alignment_update", 3.0, False),
        ("alignment_update", 1.0000001, True),  # a cosine in float32
        ("update_rms", 1e300, False),
    ],
)
def test_what_no_training_can_have_measured_is_shown_without_a_prediction(key, value, predicted):
    run = folders().copy("whole")
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8").replace(f'"{key}":', f'"{key}":{value},"other":')
    path.write_text(text, encoding="utf-8")
    assert (len(load_run(run).predicted_norms[0]) > 1) == predicted
    assert run_command("report", run, "-o", run / "page.html", "--no-images").code == 0
    assert run_command("diagnose", run).code == 0


def test_changed_settings_do_not_resume_though_the_config_is_gone():
    run = folders().copy("stopped")
    (run / "config.json").unlink()
    changed = run.parent / "changed.json"
    text = (folders().whole / "config.json").read_text(encoding="utf-8")
    changed.write_text(text.replace('"lr": 0.02', '"lr": 0.03'), encoding="utf-8")
    assert "optimizer.lr: 0.02 there, 0.03 now" in refused("train", "--config", changed, "--out", run)
    assert not (run / "config.json").exists()
    assert run_command("train", "--config", folders().whole / "config.json", "--out", run).code == 0
    assert ending(run) == ending(folders().whole)


def test_tokens_may_move_but_not_change():
    run, data = folders().copy("stopped"), folders().copy("data")
    train(config(data), run)
    assert ending(run) == ending(folders().whole)
    with pytest.raises(UsageError, match=r"data\.fingerprint: '.*' there, '.*' now"):
        train(config(folders().other_data), run)


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_lock_that_is_none_is_named(kind):
    run = folders().copy("stopped")
    (run / ".lock").unlink(missing_ok=True)
    (run / ".lock").mkdir() if kind == "folder" else (run / ".lock").symlink_to(run / "config.json")
    said = refused("train", "--config", run / "config.json", "--out", run)
    assert f"{run / '.lock'} is not a lock of ours: delete it" in said


def test_a_result_without_numbers_is_refused_by_name():
    run = folders().copy("whole")
    for content in ('{"final_loss": NaN}', '{"final_loss": 1e999}', '{"final_loss": ' + "9" * 400 + "}"):
        (run / "result.json").write_text(content, encoding="utf-8")
        with pytest.raises(UsageError, match=r"result\.json cannot be read: .*; delete it, and the command"):
            load_run(run)
    (run / "result.json").write_text(
        json.dumps({"steps": 1e300, "final_loss": -1e308, "best_step": 1e300}), encoding="utf-8"
    )
    assert run_command("report", run, "-o", Path(run) / "page.html", "--no-images").code == 0
