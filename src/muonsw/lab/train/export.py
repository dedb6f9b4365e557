"""A trained model on its own: as files that need nothing of the run, read back, and as text it writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from muonsw.lab.data.shards import load_tokenizer, read_record, save_record
from muonsw.lab.data.tokenizers import Tokenizer, store
from muonsw.lab.errors import UsageError
from muonsw.lab.model import Decoder, ModelConfig
from muonsw.lab.settings import as_data, from_data
from muonsw.lab.storage import placing, prepare_folder, read_object, write_json
from muonsw.lab.train import checkpoint
from muonsw.lab.train.folder import CHECKPOINTS, read_config

MODEL, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer"
FORMAT = "muonsw-decoder"


def export(run: Path, folder: Path, *, best: bool = False) -> Path:
    """Write the model of a run's newest (or best) checkpoint into a folder.

    Raises:
        UsageError: If the run has no whole checkpoint, or its data folder is gone.
    """
    config = read_config(run)
    saved = load_newest(run, best=best)
    _require_own(folder)
    prepare_folder(folder)
    with placing(folder / MODEL) as beside:
        checkpoint.write_tensors(beside, saved.tensors["model"], {"format": "pt", "maker": FORMAT})
    _copy_tokenizer(Path(config.data.path), folder / TOKENIZER)
    content = {"format": FORMAT, "step": saved.step, "model": as_data(config.model)}
    write_json(folder / CONFIG, content)
    return folder


def _require_own(folder: Path) -> None:
    """Find out whether an export may be written there: outside of it nothing is written, inside nothing foreign lost.

    Raises:
        UsageError: If the folder is a link, or holds a run, or a model that is no export.
    """
    for path in (folder, folder / TOKENIZER):
        if path.is_symlink():
            raise UsageError(f"{path} is a link: delete it, or name the folder that it leads to")
    config, model = folder / CONFIG, folder / MODEL
    if os.path.lexists(config) and read_object(config).get("format") != FORMAT:
        raise UsageError(f"{config} belongs to something else than an export: choose another folder with --out")
    if os.path.lexists(model) and not _made_here(model):
        raise UsageError(f"{model} was not written by an export: choose another folder with --out")


def _made_here(model: Path) -> bool:
    try:
        with safe_open(model, "pt") as file:
            return (file.metadata() or {}).get("maker") == FORMAT
    except (OSError, SafetensorError):
        return False


def load_newest(run: Path, *, best: bool = False) -> checkpoint.Checkpoint:
    """The newest whole checkpoint of a run, or its best.

    Raises:
        UsageError: If there is none.
    """
    checkpoints = run / CHECKPOINTS
    wanted = checkpoint.best_saved(checkpoint.newest_first(checkpoints)) if best else None
    for path in checkpoint.newest_first(checkpoints):
        if wanted in (None, checkpoint.step_of(path)):
            try:
                return checkpoint.load(path)
            except checkpoint.CheckpointError:
                continue
    raise UsageError(f"{run} has no whole checkpoint: train it first with `muonsw train --out {run}`")


def _copy_tokenizer(data: Path, folder: Path) -> None:
    """The tokenizer's own files, and a record that says which tokenizer it is; nothing about the tokens."""
    prepare_folder(folder)
    store(load_tokenizer(data), folder)
    save_record(folder, replace(read_record(data), groups=()))


def load_model(path: Path) -> tuple[Decoder, Tokenizer]:
    """The model and the tokenizer of an exported folder, or of a run.

    Raises:
        UsageError: If the folder is neither.
    """
    content = read_object(path / CONFIG)
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


@torch.no_grad()
def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Continue a prompt, until a document ends.

    Args:
        model: On any device.
        tokenizer: The one it was trained with.
        prompt: What to continue; an empty one starts a document.
        tokens: At most so many.
        temperature: 0 always takes the likeliest token.
        top_k: Draw among so many likeliest tokens; 0 among all.
        seed: Of the draws.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.end_of_document, *tokenizer.encode(prompt).tolist()]
    for _ in range(tokens):
        context = torch.tensor([ids[-model.config.sequence :]], device=device)
        logits = model.logits(context)[0, -1, : tokenizer.vocab_size].float().cpu()
        ids.append(_draw(logits, temperature, top_k, generator))
        if ids[-1] == tokenizer.end_of_document:
            return
        yield ids[-1]


def _draw(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    kept = logits.topk(min(top_k or len(logits), len(logits)))
    chosen = torch.multinomial((kept.values / temperature).softmax(0), 1, generator=generator)
    return int(kept.indices[chosen])
