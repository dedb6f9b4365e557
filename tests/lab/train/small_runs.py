"""A run that takes a second: tiny tokens, a tiny model."""

import functools
import json
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from muonsw.lab.model import ModelConfig
from muonsw.lab.train.config import DataConfig, OptimizerConfig, RunConfig
from muonsw.lab.train.loop import Watch, train
from tests.lab.texts import markov_texts

MODEL = ModelConfig(width=32, layers=2, head_dim=16, experts=4, ff=64, vocab=320, sequence=32)


@functools.cache
def tokens():
    """A folder of prepared tokens, shared by all tests of a process."""
    folder = Path(tempfile.mkdtemp())
    prepare(islice(markov_texts(seed=0), 60), ByteTokenizer(), folder, validation_fraction=0.2)
    return str(folder)


def small_run(*, model=None, optimizer=None, **settings):
    defaults = {"steps": 12, "batch": 4, "eval_every": 4, "checkpoint_every": 4, "telemetry_every": 2, "threads": 1}
    return RunConfig(
        model=replace(MODEL, **(model or {})),
        data=DataConfig(tokens(), eval_windows=8),
        optimizer=OptimizerConfig(**{"ns_dtype": "float32", **(optimizer or {})}),
        **{**defaults, **settings},
    )


@functools.cache
def uninterrupted():
    """The folder of a run that was never stopped, shared by all tests of a process."""
    folder = Path(tempfile.mkdtemp())
    train(small_run(), folder)
    return folder


def losses(folder, name="metrics.jsonl"):
    """Every number of a run that must not depend on how it was interrupted."""
    records = map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())
    speed = {"tokens_per_second", "samples_per_second"}
    return [{key: value for key, value in record.items() if key not in speed} for record in records]


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def assert_same_run(one, other, step):
    assert losses(one) == losses(other)
    for name, value in weights(one, step).items():
        assert torch.equal(value, weights(other, step)[name]), name


def wait_for_records(process, folder, count):
    """Wait until a run in another process has written this many training records."""
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text(encoding="utf-8").count('"kind":"train"') < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


class StoppedError(Exception):
    pass


def stop_at(step, config, folder):
    """Train until a record of a step after `step` appears, then stop without saving."""

    def look(record):
        if record["step"] > step:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(config, folder, Watch(record=look))
