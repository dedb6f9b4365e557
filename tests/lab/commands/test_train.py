"""`muonsw train`: settings from options or a file, and exit codes."""

import json

import pytest

from muonsw.lab.cli import main
from tests.lab.train.small_runs import losses, small_run, tokens


def test_a_preset_is_trained_with_the_changes_that_were_given(tmp_path, capsys):
    changes = ["--steps", "2", "--batch", "4", "--accumulation", "2", "--decay", "constant", "--seed", "3"]
    assert main(["train", "--data", tokens(), "--out", str(tmp_path), *changes]) == 0
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (config["steps"], config["batch"], config["accumulation"], config["seed"]) == (2, 4, 2, 3)
    assert config["optimizer"]["decay"] == "constant"
    assert config["model"]["width"] == 64
    assert config["model"]["vocab"] == 320  # 257 bytes, rounded up to a multiple of 64
    printed = capsys.readouterr().out
    assert "epochs of" in printed
    assert "validation loss" in printed


def test_checkpoints_come_as_often_as_asked(tmp_path):
    options = ["--steps", "4", "--batch", "1", "--checkpoint-every", "2", "--out", str(tmp_path)]
    assert main(["train", "--data", tokens(), *options]) == 0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_a_config_file_gives_the_run_that_wrote_it(tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(small_run(steps=3).as_data()), encoding="utf-8")
    assert main(["train", "--config", str(file), "--out", str(first)]) == 0
    assert main(["train", "--config", str(first / "config.json"), "--out", str(second)]) == 0
    assert losses(first) == losses(second)
    assert main(["train", "--config", "/nowhere.json"]) == 2
    assert "/nowhere.json does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--steps", "5"], ["--seed", "1"], ["--device", "cpu"], ["--weight-decay", "0.3"]])
def test_an_option_that_a_config_file_decides_is_refused(option, tmp_path, capsys):
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(small_run(steps=3).as_data()), encoding="utf-8")
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "run"), *option]) == 2
    assert f"{option[0]} does not go with --config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "w257"], "unknown preset 'w257'"),
        (["--decay", "scalled"], "optimizer.decay='scalled' must be one of"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--device", "tpu"], "device 'tpu' cannot be used here"),
    ],
)
def test_a_wrong_setting_is_named(options, message, tmp_path, capsys):
    assert main(["train", "--data", tokens(), "--out", str(tmp_path / "run"), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_diverging_run_exits_with_one(tmp_path, capsys):
    file = tmp_path / "settings.json"
    file.write_text(
        json.dumps(small_run(steps=200, diverged=0.5, optimizer={"lr": 3.0, "weight_decay": 0.0}).as_data()),
        encoding="utf-8",
    )
    assert main(["train", "--config", str(file), "--out", str(tmp_path / "run")]) == 1
    assert "lower the learning rate" in capsys.readouterr().err
