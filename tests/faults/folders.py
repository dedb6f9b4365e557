"""The smallest things that can be broken: tokens, a run that stopped after four of six steps, an export."""

import functools
import hashlib
import json
import os
import shutil
import tempfile
from itertools import islice
from pathlib import Path

from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import BPETokenizer
from muonsw.lab.model import ModelConfig
from muonsw.lab.train.config import DataConfig, OptimizerConfig, RunConfig
from muonsw.lab.train.export import export
from muonsw.lab.train.loop import train
from tests.lab.texts import markov_texts
from tests.lab.train.small_runs import losses

# Set by `make test-faults`, to try every place and every byte count instead of a few of each.
LONG = os.environ.get("MUONSW_FAULTS") == "long"
MODEL = ModelConfig(width=16, layers=1, head_dim=8, experts=2, ff=16, vocab=320, sequence=16)
NEWER, LAST = (f"checkpoints/step-{step:08d}" for step in (4, 6))


def documents():
    return list(islice(markov_texts(seed=0), 40))


@functools.cache
def tokenizer() -> BPETokenizer:
    return BPETokenizer.train(documents(), 300)


def fill_data(folder: Path) -> Path:
    """Tokens of a BPE, so that every kind of file is there, in several shards."""
    prepare(documents(), tokenizer(), folder, validation_fraction=0.3, group_characters=4000)
    return folder


def config(data: Path, **settings) -> RunConfig:
    chosen = {"steps": 6, "batch": 2, "eval_every": 2, "checkpoint_every": 2, "keep": 3, "telemetry_every": 1}
    chosen["optimizer"] = OptimizerConfig(ns_dtype="float32")  # bits are compared with those of other processes
    return RunConfig(MODEL, DataConfig(str(data), eval_windows=2), threads=1, **{**chosen, **settings})


class Folders:
    """What the tests copy and break; made once for each process.

    Attributes:
        data: Prepared tokens.
        whole: A run that was never disturbed.
        stopped: The same, as it was after four of its six steps.
        other: A run with another learning rate and seed, on other tokens.
        export: The model of the whole run.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = fill_data(root / "data")
        self.whole, self.stopped, self.other = (root / name for name in ("whole", "stopped", "other"))
        train(config(self.data), self.whole)
        shutil.copytree(self.whole, self.stopped)
        shutil.rmtree(self.stopped / LAST)
        (self.stopped / "result.json").unlink()
        self.other_data = root / "other-data"
        prepare(islice(markov_texts(seed=5), 40), BPETokenizer.train(documents()[:9], 310), self.other_data,
                validation_fraction=0.3, group_characters=4000)  # fmt: skip
        train(config(self.other_data, seed=7), self.other)
        self.export = export(self.whole, root / "export")
        self.other_export = export(self.other, root / "other-export")

    def copy(self, name: str) -> Path:
        """A fresh copy of one of the folders above, to be broken."""
        target = Path(tempfile.mkdtemp(dir=self.root)) / name
        shutil.copytree(getattr(self, name), target)
        return target


@functools.cache
def folders() -> Folders:
    return Folders(Path(tempfile.mkdtemp(prefix="faults-")))


def ending(folder: Path):
    """Everything about a run that interruptions must not change: weights, state, records, result."""
    tensors = {name: (folder / LAST / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer", "random")}
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result.pop("seconds")
    return tensors, losses(folder), result


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path) -> None:
    """Flip the highest bit of a byte in the middle: invalid as text, another sign in a number."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
