"""Export a trained model, load it, and sample text from it."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save

from muonsw.lab.config import as_data, from_data
from muonsw.lab.data.loader import load_tokenizer, read_record, save_record
from muonsw.lab.data.tokenizer import Tokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.files import locked, read_object, write_atomically, write_json
from muonsw.lab.model import Decoder, ModelConfig
from muonsw.lab.train import checkpoint
from muonsw.lab.train.checkpoint import CHECKPOINTS, read_config_file, refuse_changes
from muonsw.lab.train.config import RunConfig

MODEL, CONFIG, TOKENIZER = "model.safetensors", "config.json", "tokenizer"
FORMAT = "muonsw-decoder"
AGAIN = "export the run again"
Note = Callable[[str], None]  # shows a message, such as a damaged checkpoint that is skipped


def export(run: Path, folder: Path, *, note: Note = lambda _text: None) -> Path:
    """Write the model and tokenizer of a run's newest checkpoint into a folder."""
    config = _decoder_config(run)
    saved = load_newest(run, config, note)
    data = Path(config.tokens.path)
    tokenizer, record = load_tokenizer(data), read_record(data)
    elsewhere = "choose another folder with --out"
    is_export = (folder / CONFIG).exists() and read_object(folder / CONFIG, remedy=elsewhere).get("format") == FORMAT
    if not is_export and any((folder / name).exists() for name in (CONFIG, MODEL)):
        raise UsageError(f"{folder} holds files that are not an export: {elsewhere}")
    busy = f"another process is exporting to {folder}: wait for it, or {elsewhere}"
    with locked(folder, busy), locked(folder / TOKENIZER, busy):
        tokenizer.save(folder / TOKENIZER)
        save_record(folder / TOKENIZER, replace(record, groups=()))  # describes the tokenizer, lists no tokens
        weights = save(dict(saved.tensors["model"]), {"format": "pt"})
        checksum = hashlib.sha256(weights).hexdigest()
        # Written first: it marks the folder as an export. If the model is not written, its checksum does not match.
        content = {"format": FORMAT, "step": saved.step, "model": as_data(config.model), "sha256": checksum}
        write_json(folder / CONFIG, content)
        write_atomically(folder / MODEL, weights)
    return folder


def _decoder_config(run: Path) -> RunConfig:
    config = read_config_file(run / CONFIG)
    if config.task is not None:
        where = f"{run / CHECKPOINTS}/step-*/model.safetensors"
        raise UsageError(f"{run} trained {config.task.name}: load its weights from {where} yourself")
    return config


def load_newest(run: Path, config: RunConfig, note: Note) -> checkpoint.Checkpoint:
    """Load the newest intact checkpoint of a run; a `UsageError` if there is none."""
    for path in checkpoint.newest_first(run / CHECKPOINTS):
        try:
            saved = checkpoint.load(path)
            refuse_changes(path, saved.state["config"], config)
            return saved
        except checkpoint.CheckpointError as error:
            note(f"skipping a damaged checkpoint: {error}")
    command = f"muonsw train --out {shlex.quote(str(run))}"
    raise UsageError(f"{run} has no intact checkpoint: train it first with `{command}`")


def load_model(path: Path, *, note: Note = lambda _text: None) -> tuple[Decoder, Tokenizer]:
    """Load the model and the tokenizer from an export or a run; a `UsageError` if a file is missing or damaged."""
    content = read_object(path / CONFIG, remedy=AGAIN)
    if content.get("format") == FORMAT:
        try:
            config = from_data(ModelConfig, content.get("model"), "model")
            if checkpoint.sha256(path / MODEL) != content.get("sha256"):
                raise ValueError(f"it does not match its checksum in {CONFIG}")
            tensors = checkpoint.read_tensors(path / MODEL)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path / MODEL} cannot be read: {error}; {AGAIN}") from error
        tokenizer = load_tokenizer(path / TOKENIZER)
    else:
        run = _decoder_config(path)
        config, tensors = run.decoder, load_newest(path, run, note).tensors["model"]
        tokenizer = load_tokenizer(Path(run.tokens.path))
    if tokenizer.vocab_size > config.vocab:
        raise UsageError(f"the tokenizer of {path} has more tokens than its model: {AGAIN}")
    model = Decoder(config, seed=None)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UsageError(f"the weights do not fit the model in {path / CONFIG}: {AGAIN}") from error
    return model, tokenizer


@torch.no_grad()
def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Continue a prompt by up to `tokens` tokens, or until the document ends.

    Each token is drawn from the `top_k` likeliest (0: from all); at temperature 0 the likeliest is taken.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    # A command line may hold bytes that are not UTF-8.
    ids = [tokenizer.end_of_document, *tokenizer.encode(prompt.encode(errors="replace").decode()).tolist()]
    for _ in range(tokens):
        context = torch.tensor([ids[-model.config.sequence :]], device=device)
        logits = model.logits(context)[0, -1, : tokenizer.vocab_size].float().cpu()
        likeliest = logits.topk(min(top_k or len(logits), len(logits)) if temperature else 1)
        # Subtract the largest first: divided by a tiny temperature, it would overflow.
        weights = ((likeliest.values - likeliest.values[0]).double() / (temperature or 1.0)).softmax(0)
        ids.append(int(likeliest.indices[torch.multinomial(weights, 1, generator=generator)]))
        if ids[-1] == tokenizer.end_of_document:
            return
        yield ids[-1]
