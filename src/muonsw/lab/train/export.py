"""A trained model as files that need nothing of the run: safetensors, a config, and its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from muonsw.lab.data.shards import load_tokenizer, read_record
from muonsw.lab.data.tokenizers import Tokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.model import Decoder, ModelConfig
from muonsw.lab.settings import as_data, from_data
from muonsw.lab.storage import prepare_folder, write_atomically
from muonsw.lab.train import checkpoint
from muonsw.lab.train.folder import CHECKPOINTS, read_config, read_json
from muonsw.lab.train.loop import best_saved

MODEL, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer"
FORMAT = "muonsw-decoder"


def export(run: Path, folder: Path, *, best: bool = False) -> Path:
    """Write the model of a run's newest (or best) checkpoint into a folder.

    Raises:
        UsageError: If the run has no whole checkpoint, or its data folder is gone.
    """
    config = read_config(run)
    saved = load_newest(run, best=best)
    prepare_folder(folder)
    save_file(dict(saved.tensors["model"]), folder / MODEL, metadata={"format": "pt"})
    _copy_tokenizer(Path(config.data.path), folder / TOKENIZER)
    content = {"format": FORMAT, "step": saved.step, "model": as_data(config.model)}
    write_atomically(folder / CONFIG, json.dumps(content, indent=1))
    return folder


def load_newest(run: Path, *, best: bool = False) -> checkpoint.Checkpoint:
    """The newest whole checkpoint of a run, or its best.

    Raises:
        UsageError: If there is none.
    """
    checkpoints = run / CHECKPOINTS
    wanted = best_saved(checkpoints) if best else None
    for path in checkpoint.newest_first(checkpoints):
        if wanted in (None, checkpoint.step_of(path)):
            try:
                return checkpoint.load(path)
            except checkpoint.CheckpointError:
                continue
    raise UsageError(f"{run} has no whole checkpoint: train it first with `muonsw train --out {run}`")


def _copy_tokenizer(data: Path, folder: Path) -> None:
    """The record of the data, which identifies the tokenizer, and the tokenizer's own files."""
    description = read_record(data).tokenizer_description or {}
    folder.mkdir(exist_ok=True)
    for name in ("data.json", *(description.get("files") or ())):
        shutil.copyfile(data / name, folder / name)


def load_model(path: Path) -> tuple[Decoder, Tokenizer]:
    """The model and the tokenizer of an exported folder, or of a run.

    Raises:
        UsageError: If the folder is neither.
    """
    content = read_json(path / CONFIG)
    if content.get("format") == FORMAT:
        config, tensors = from_data(ModelConfig, content["model"], "model"), load_file(path / MODEL)
        tokenizer = load_tokenizer(path / TOKENIZER)
    else:
        run = read_config(path)
        config, tensors = run.model, dict(load_newest(path).tensors["model"])
        tokenizer = load_tokenizer(Path(run.data.path))
    model = Decoder(config, seed=None)
    model.load_state_dict(tensors)
    return model, tokenizer
