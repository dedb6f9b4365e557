"""Named runs: how each model size is trained unless told otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from muonsw.lab.data.prepare import prepare_default
from muonsw.lab.data.shards import read_record
from muonsw.lab.data.tokenizers import padded_vocab
from muonsw.lab.errors import UsageError
from muonsw.lab.model import ModelConfig, preset
from muonsw.lab.paper import PAPER_BATCH_TOKENS, RECIPES
from muonsw.lab.train.config import DataConfig, OptimizerConfig, RunConfig
from muonsw.schedule import peak_lr_for_horizon

# The settings that most likely made the paper's numbers: see docs/reproducing.md.
PAPER_OPTIMIZER = OptimizerConfig(muon_lr="adam", peak="base", router="muon", qkv="fused")
PAPER_BATCH = 256
DEFAULT_DATA = Path("out/data")


@dataclass(frozen=True)
class Defaults:
    """How a preset is trained.

    Attributes:
        steps: Updates.
        batch: Sequences in an update.
        optimizer: How weights move.
        accumulation: Micro-batches, chosen for the memory of one large GPU, or of a laptop.
        eval_every: Updates between evaluations.
        checkpoint_every: Updates between checkpoints.
        telemetry_every: Updates between telemetry samples.
        eval_windows: Validation windows.
    """

    steps: int
    batch: int
    optimizer: OptimizerConfig
    accumulation: int = 1
    eval_every: int = 250
    checkpoint_every: int = 1000
    telemetry_every: int = 50
    eval_windows: int = 512


def _paper(steps: int | None, lr: float) -> Defaults:
    assert steps is not None, "the paper prints the steps of its own runs"
    return Defaults(steps, PAPER_BATCH, replace(PAPER_OPTIMIZER, lr=lr), accumulation=8)


DEFAULTS: Mapping[str, Defaults] = MappingProxyType(
    {
        # The paper has no row for width 128.
        "w128": _paper(5_000, 2.0e-2),
        **{printed.preset: _paper(printed.steps, printed.peak_lr) for printed in RECIPES.values() if printed.preset},
        # lambda * lr * steps = 35, the paper's row at width 256, with the decay of a step at its cap of 0.01.
        "mini": Defaults(3_500, 32, OptimizerConfig(weight_decay=0.5), eval_every=50, eval_windows=256),
        # The decay of a step is at its cap of 0.02, which gives lambda * lr * steps = 8.4 in minutes. Float32
        # products, so that the result does not depend on what the machine multiplies.
        "demo": Defaults(
            420,
            12,
            OptimizerConfig(weight_decay=1.0, ns_dtype="float32"),
            eval_every=42,
            checkpoint_every=420,
            telemetry_every=10,
            eval_windows=128,
        ),
    }
)


def defaults(name: str) -> Defaults:
    """How a preset is trained; a dense variant like its mixture.

    Examples:
        >>> defaults("w1024-dense").steps
        376000
    """
    preset(name)
    return DEFAULTS[name.removesuffix("-dense")]


def preset_run(name: str, data: str, *, model: ModelConfig | None = None, seed: int = 0) -> RunConfig:
    """The run of a preset on prepared tokens.

    Args:
        name: A model preset, perhaps with `-dense`.
        data: A folder that `muonsw data prepare` filled.
        model: The model instead of the preset's.
        seed: Of weights and data order.

    Examples:
        >>> preset_run("w256", "tokens").optimizer.lr
        0.01
    """
    chosen = defaults(name)
    return RunConfig(
        model=model or preset(name),
        data=DataConfig(data, eval_windows=chosen.eval_windows),
        optimizer=chosen.optimizer,
        steps=chosen.steps,
        batch=chosen.batch,
        accumulation=chosen.accumulation,
        seed=seed,
        eval_every=chosen.eval_every,
        checkpoint_every=chosen.checkpoint_every,
        telemetry_every=chosen.telemetry_every,
    )


def run_on(name: str, data: Path | None, *, seed: int = 0) -> RunConfig:
    """The run of a preset on a folder of tokens, with the vocabulary that those have.

    Args:
        name: A model preset, perhaps with `-dense`.
        data: Prepared tokens; None prepares the Python standard library with a BPE of the preset's size.
        seed: Of weights and data order.

    Raises:
        UsageError: If there is no such preset, or no such data.
    """
    try:
        model = preset(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    folder = default_data(model.vocab) if data is None else data
    fitting = replace(model, vocab=padded_vocab(read_record(folder).vocab_size))
    return preset_run(name, str(folder), model=fitting, seed=seed)


def with_steps(run: RunConfig, steps: int) -> RunConfig:
    """A run of another length, its peak learning rate by the horizon rule.

    The rule counts updates of 524,288 tokens, whatever the run's own are, and gives 0.02 below 5,000 of them.

    Examples:
        >>> with_steps(preset_run("w256", "tokens"), 5_000).optimizer.lr
        0.02
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
