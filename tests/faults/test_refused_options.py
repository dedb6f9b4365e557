"""Options that make no sense are refused before anything is written or trained."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from muonsw.lab.arms import parse_arm
from muonsw.lab.base.errors import UsageError
from muonsw.lab.commands.plan import Plan
from muonsw.lab.model import Decoder
from muonsw.lab.plan import Setup
from muonsw.lab.train.config import OptimizerConfig
from muonsw.lab.train.groups import build_optimizer
from muonsw.lab.train.loop import train
from tests.faults.commands import refused, run_command
from tests.faults.folders import MODEL, config, documents, folders


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--preset", "demo", "--steps", "9", "--tflops", "nan"), "tflops=nan must be positive"),
        (("data", "prepare", "DIR", "--vocab", "1" * 25), "a bpe needs a --vocab above 256 (below 2**31)"),
        (("sample", "RUN", "--temperature", "nan"), "--temperature finite"),
        (("sample", "RUN", "--seed", "9" * 25), "--seed must be at least 0 and below 2**63"),
        (("train", "--data", "DATA", "--out", "DIR", "--device", "meta"), "device 'meta' cannot be used here"),
        (("train", "--data", "DATA", "--out", "DIR", "--seed", "9" * 25), "seed=9999999999999999999999999 must be"),
        (("train", "--data", "DATA", "--out", "DIR", "--steps", "9" * 25), "steps=9999999999999999999999999 must be"),
        (("train", "--data", "DATA", "--out", "DIR", "--weight-decay", "60"), "1.2 times the weight in one update"),
        (("compare", "--data", "DATA", "--out", "DIR", "--weight-decay", "60"), "1.2 times the weight in one update"),
        (("compare", "--data", "DATA", "--out", "DIR", "--weight-decay", "0", "--control"), "needs decay"),
        (("compare", "--data", "DATA", "--out", "DIR", "--arms", "scaled", "constant,adam_lr="), "setting=value pairs"),
        (("compare", "--data", "DATA", "--out", "DIR", "--arms", "scaled", "constant,adam_lr=nan"), "adam_lr=nan must"),
        (("compare", "--data", "DATA", "--out", "DIR", "--arms", "scaled", "none,ns_dtype=x"), "ns_dtype='x' must be"),
    ],
    ids=lambda value: "-".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_written(arguments, message, tmp_path):
    places = {"DIR": tmp_path / "out", "RUN": folders().whole, "DATA": folders().data}
    assert message in refused(*(places.get(argument, argument) for argument in arguments))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """What commands are given, by the word that stands for it; the working directory is an empty folder beside it."""
    given, here = tmp_path / "given", tmp_path / "here"
    given.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as if it were not installed
    (given / "text.txt").write_text("\n\n".join(documents()), encoding="utf-8")
    assert run_command("task", "new", given / "task.py").code == 0
    data, moved = folders().copy("data"), given / "moved"
    train(config(data, steps=1), moved)
    data.rename(data.with_name("gone"))
    small, heavy = config(folders().data), OptimizerConfig(weight_decay=60.0)
    settings = {
        "DECAY": replace(small, optimizer=heavy),
        "BATCH": replace(small, batch=1 << 20),
        "EVENTS": replace(small, tensorboard=True),
    }
    for name, run in settings.items():
        (given / name).write_text(json.dumps(run.as_data()), encoding="utf-8")
    names = {"TEXT": "text.txt", "TASK": "task.py", "MOVED": "moved", "FILE/below": "text.txt/below"}
    return {name: given / name for name in settings} | {word: given / name for word, name in names.items()}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --config DECAY --out run", "1.2 times the weight in one update"),
        ("train --config BATCH --out run", "fewer than one batch"),
        ("train --config EVENTS --out run", "the package tensorboard"),
        ("train --text TEXT --tensorboard --out run", "the package tensorboard"),
        ("train --text TEXT --device meta --out run", "device 'meta' cannot be used here"),
        ("train --text TEXT --out FILE/below", "cannot write to the folder"),
        ("compare --text TEXT --out FILE/below", "cannot write to the folder"),
        ("compare --task TASK --record TEXT --out runs", "text.txt holds no records of runs"),
        ("compare --task TASK --record FILE/below --out runs", "cannot write to the folder"),
        ("train --text TEXT --steps 1 --out ''", "an argument is empty after --out"),
        ("train --text TEXT --steps 1 --out=", "an argument is empty after --out"),
        ("compare --text TEXT '' --steps 1 --out runs", "an argument is empty after"),
        ("data prepare '' --source text --files TEXT", "an argument is empty"),
        ("report nowhere --out new/page.html", "nowhere"),
        ("reproduce main-table --data nowhere --out new", "nowhere holds no prepared data"),
        ("export MOVED --out new", "holds no prepared data"),
        ("data prepare new --tokenizer gpt2 --gpt2-files nowhere", "no GPT-2 vocabulary"),
        ("data prepare new --source text --files TASK --validation-fraction 0.1", "is of no known kind"),
        ("data prepare new --source fineweb --dataset FILE/below", "cannot be read"),
    ],
)
def test_bad_input_leaves_nothing_behind(command, message, inputs):
    assert message in refused(*(inputs.get(word, word) for word in shlex.split(command)))
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "adam_lr", "clip"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1", "0", "1e308"])
def test_an_arm_is_refused_at_once_or_can_be_built(name, value):
    """So that no bad option is found only after another arm has trained."""
    try:
        arm = parse_arm(f"constant,{name}={value}", OptimizerConfig())
    except UsageError:
        return
    assert build_optimizer(Decoder(MODEL), arm.optimizer).param_groups


@pytest.mark.parametrize(
    "option",
    [
        {"tokens": "1e308", "steps": None},
        {"batch_tokens": "1e308"},
        {"setup": Setup(tflops=1e-320)},
    ],
    ids=str,
)
def test_a_plan_of_any_size_is_a_plan_or_a_usage_error(option, capsys):
    try:
        assert Plan(**{"preset": "demo", "steps": 9, "json": True, **option}).run() == 0
    except UsageError as error:
        assert re.search("give a smaller one", str(error))  # noqa: PT017 (a plan is as good)
    else:
        assert json.loads(capsys.readouterr().out)
