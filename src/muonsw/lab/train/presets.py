"""Named runs: how each model size is trained by default."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from muonsw.lab.config import as_data, from_data
from muonsw.lab.data.documents import matching_files
from muonsw.lab.data.prepare import SMALL_SHARE, prepare_default
from muonsw.lab.data.shards import read_record
from muonsw.lab.data.tokenizer import padded_vocab
from muonsw.lab.errors import UsageError
from muonsw.lab.model import ModelConfig, preset
from muonsw.lab.paper import PAPER_BATCH_TOKENS, RECIPES
from muonsw.lab.tasks import Checked, DataConfig, TaskConfig, with_tokens
from muonsw.lab.theory.schedule import peak_lr_for_horizon
from muonsw.lab.train.config import OptimizerConfig, RunConfig, ScheduleConfig
from muonsw.registry import unknown

# The settings that most likely made the paper's numbers: see docs/reproducing.md.
PAPER_OPTIMIZER = OptimizerConfig(muon_lr="adam", peak="base", router="muon", qkv="fused")
PAPER_BATCH = 256
DEFAULT_DATA = Path("out/data")
# Characters in a token of a BPE, at most: fewer where the vocabulary is small.
LONG_TOKEN = 4


def _paper(steps: int | None, lr: float) -> dict[str, Any]:
    """One of the paper's runs; micro-batches are chosen for the memory of one large GPU."""
    return {"steps": steps, "batch": PAPER_BATCH, "accumulation": 8, "optimizer": replace(PAPER_OPTIMIZER, lr=lr)}


# Settings of a `RunConfig` by the model's preset, and what they share unless they say otherwise.
SHARED: Mapping[str, Any] = {"eval_every": 250, "checkpoint_every": 1000, "telemetry_every": 50, "eval_windows": 512}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # The paper prints no run of width 128.
    "w128": _paper(5_000, 2.0e-2),
    **{printed.preset: _paper(printed.steps, printed.peak_lr) for printed in RECIPES.values() if printed.preset},
    # lambda * lr * steps = 35, the paper's row at width 256, with the decay of a step at its cap of 0.01.
    "mini": {
        "steps": 3_500,
        "batch": 32,
        "optimizer": OptimizerConfig(weight_decay=0.5),
        "eval_every": 50,
        "eval_windows": 256,
    },
    # The decay of a step is at its cap of 0.02, which gives lambda * lr * steps = 8.4 in minutes. Float32 products, so
    # that the result does not depend on what the machine multiplies.
    "demo": {
        "steps": 420,
        "batch": 12,
        "optimizer": OptimizerConfig(weight_decay=1.0, ns_dtype="float32"),
        "eval_every": 42,
        "checkpoint_every": 42,
        "telemetry_every": 10,
        "eval_windows": 128,
    },
}


def preset_run(name: str, data: str, *, model: ModelConfig | None = None) -> RunConfig:
    """The run of a preset on prepared tokens, perhaps with another model; a dense variant is trained like its mixture.

    Examples:
        >>> preset_run("w256", "tokens").optimizer.lr, preset_run("w1024-dense", "tokens").steps
        (0.01, 376000)
    """
    model = model or preset(name)
    settings = {**SHARED, **DEFAULTS[name.removesuffix("-dense")]}
    return RunConfig(model, DataConfig(data, eval_windows=settings.pop("eval_windows")), **settings)


def changed_run(name: str, steps: int | None, optimizer: Mapping[str, Any], **changes: Any) -> RunConfig:
    """The run of a preset, without data, with changes; other steps change its peak learning rate."""
    try:
        run = replace(preset_run(name, ""), **changes)
        run = run if steps is None else with_steps(run, steps)
        return replace(run, optimizer=replace(run.optimizer, **optimizer))
    except ValueError as error:
        raise UsageError(str(error)) from error


def with_data(run: RunConfig, data: Path | None, text: Sequence[str] = ()) -> RunConfig:
    """A run on a folder of tokens, with their vocabulary and fingerprint.

    Without a folder, text files or else the Python standard library are prepared, with a BPE of the model's size.
    """
    if data is not None and text:
        raise UsageError(f"give --text or --data, not both: {data} holds tokens that were prepared before")
    vocab, folder = run.decoder.vocab, data
    if text:
        # One folder for each content of the files.
        paths, digest = matching_files(text), hashlib.blake2b(digest_size=4)
        for path in paths:
            digest.update(f"{path.resolve()} {path.stat().st_size} ".encode("utf-8", "surrogateescape"))
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "blake2b").digest())
        letters = "".join(letter if letter.isalnum() else "-" for letter in paths[0].name.partition(".")[0])
        folder = DEFAULT_DATA / f"{letters}-bpe{vocab}-{digest.hexdigest()}"
        prepare_default(folder, vocab=vocab, source="text", files=tuple(map(str, paths)))
    folder = folder or default_data(vocab)
    fitting = replace(run.decoder, vocab=padded_vocab(read_record(folder).vocab_size))
    return replace(run, model=fitting, data=with_tokens(replace(run.tokens, path=str(folder)), fitting))


def require_enough_text(run: RunConfig) -> None:
    """Raise a `UsageError` unless prepared text has a batch to train on and a window to validate on."""
    record, sequence = read_record(Path(run.tokens.path)), run.decoder.sequence
    train, validation = run.batch * sequence + 1, sequence + 1
    if record.tokens("train") >= train and record.tokens("validation") >= validation:
        return
    kilobytes = math.ceil(LONG_TOKEN * max(train, validation / SMALL_SHARE) / 900)
    has = f"{record.tokens('train'):,} tokens to train on and {record.tokens('validation'):,} to validate on"
    needs = f"{train:,} ({run.batch} sequences of {sequence}) and {validation:,}"
    fix = f"give {kilobytes:,} kB of text, and a hundred times as much for a result that means something"
    raise UsageError(f"the text is too small: it has {has}, and this run needs {needs}; {fix}")


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """A run of another length, its peak learning rate by the horizon rule.

    The rule counts steps of 524,288 tokens, whatever the run's own are, and gives 0.02 below 5,000 of them.

    Examples:
        >>> round(with_steps(preset_run("w256", "tokens"), 40_000).optimizer.lr, 6)
        0.01
    """
    horizon = max(1, round(steps * run.tokens_per_step / PAPER_BATCH_TOKENS))
    return replace(run, steps=steps, optimizer=replace(run.optimizer, lr=peak_lr_for_horizon(horizon)))


def default_data(vocab: int) -> Path:
    """The Python standard library as tokens of a BPE of this size, prepared once."""
    folder = DEFAULT_DATA / f"python-bpe{vocab}"
    prepare_default(folder, vocab=vocab)
    return folder


# How a user's task is trained unless its file or the command line says otherwise. Losses of any size are taken for
# losses: only one that is not finite has diverged.
TASK_DEFAULTS: Mapping[str, Any] = {"steps": 1000, "lr": 0.003, "weight_decay": 0.1, "diverged": 1e6}
NOT_OF_A_TASK = ("model", "data", "task", "optimizer", "schedule", "parallel", "batch", "seed", "arm")


def task_run(task: TaskConfig, checked: Checked, *, seed: int = 0, **given: Any) -> RunConfig:
    """The run of a user's task: settings that are given, those of its file, or else defaults."""
    chosen = {**TASK_DEFAULTS, **checked.settings, **given}
    parts: dict[type, dict[str, Any]] = {OptimizerConfig: {}, ScheduleConfig: {}, RunConfig: {}}
    names = {one.name: kind for kind in parts for one in fields(kind) if one.name not in NOT_OF_A_TASK}
    for name, value in chosen.items():
        if name not in names:
            raise UsageError(f"{task.name}: {unknown('setting in SETTINGS', name, list(names))}")
        parts[names[name]][name] = value
    try:
        steps = chosen["steps"] if isinstance(chosen["steps"], int) else 0  # from_data refuses anything else
        often = {"eval_every": steps // 20, "checkpoint_every": steps // 10, "telemetry_every": steps // 100}
        settings = {name: max(1, every) for name, every in often.items()} | parts[RunConfig]
        run = from_data(RunConfig, {**settings, "batch": checked.rows, "seed": seed, "task": as_data(task)})
        optimizer = from_data(OptimizerConfig, parts[OptimizerConfig])
        return replace(run, optimizer=optimizer, schedule=from_data(ScheduleConfig, parts[ScheduleConfig]))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{task.name}: {error}") from error
