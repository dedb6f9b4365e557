"""The sizes at which the paper's studies train: the paper's own, minutes on one GPU, and a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muonsw.lab import paper
from muonsw.lab.data.loader import read_record
from muonsw.lab.errors import UsageError
from muonsw.lab.model import MuP, preset
from muonsw.lab.train.config import RunConfig, default_data, preset_run

# Filled in once the tokens are known.
NO_DATA = ""
GPT2_VOCAB = 50_257
# A sweep includes rates at which training is unstable: only a non-finite loss ends its runs.
NEVER = 1e9


@dataclass(frozen=True)
class Scale:
    """The settings of the paper's studies at one size."""

    name: str  # as in `--scale`
    title: str  # for lists and reports
    rows: Mapping[int, RunConfig]  # runs of the main table by width, with scaled decay and the undivided peak
    headline: int  # width of the figures
    sweep: RunConfig  # the AdamW run whose learning rate is swept; its width is that of the horizon sweep
    widths: tuple[int, ...]  # of the sweep
    rates: tuple[float, ...]  # of the sweep, ascending
    horizons: tuple[int, ...]  # of the sweep, in steps, ascending
    seeds: int  # of every arm
    tflops: float  # 1e12 FLOPs per second sustained by one run; a guess for `--dry-run`
    near_best: tuple[float, ...] = ()  # further lambdas of the main table, as multiples of its own

    @property
    def printed(self) -> bool:
        """Whether the paper prints numbers for this size."""
        return self.name == "paper"


def with_optimizer(run: RunConfig, **changes: Any) -> RunConfig:
    """The run with other settings of its optimizer."""
    return replace(run, optimizer=replace(run.optimizer, **changes))


def relaxed(name: str, width: int, *, base_width: int, phi_peak: float) -> RunConfig:
    """A short run, relaxation-matched to the paper: lambda is such that a step at the peak decays by `phi_peak`.

    How far the norm relaxes follows from lambda * lr * steps, which is `phi_peak * steps`: 35 for the paper's width
    256, and for 3,500 steps with `phi_peak` 0.01.
    """
    run = preset_run(name, NO_DATA)
    run = at_width(replace(run, model=replace(run.decoder, mup=MuP(base_width=base_width))), width)
    weight_decay = phi_peak * run.decoder.relative_width / run.optimizer.lr
    # The paper's choice of the peak that decay divides by; the rest is the preset's.
    return with_optimizer(run, muon_lr="adam", peak="base", weight_decay=weight_decay)


def adamw_sweep(run: RunConfig, steps: int) -> RunConfig:
    """The run with AdamW for all parameters and constant decay, with which the paper tuned the learning rate."""
    run = with_optimizer(run, algorithm="adamw", decay="constant", weight_decay=0.1, peak="group")
    every = max(1, steps // 10)
    return replace(run, steps=steps, diverged=NEVER, eval_every=every, checkpoint_every=steps, telemetry_every=every)


def lean(run: RunConfig) -> RunConfig:
    """Evaluate and sample telemetry ten times; save only at the end."""
    tenth = max(1, run.steps // 10)
    return replace(run, eval_every=tenth, checkpoint_every=run.steps, telemetry_every=tenth, log_every=tenth, keep=1)


def at_width(run: RunConfig, width: int) -> RunConfig:
    """The same run at another width; an explicit expert width grows with it."""
    model = run.decoder
    ff = None if model.ff is None else model.ff * width // model.width
    return replace(run, model=replace(model, width=width, ff=ff))


PAPER = Scale(
    name="paper",
    title="the paper's own configuration, for a cluster",
    rows={width: preset_run(f"w{width}", NO_DATA) for width in paper.ROWS},
    headline=1024,
    sweep=adamw_sweep(preset_run("w256", NO_DATA), 5_000),
    widths=tuple(paper.SWEEP),
    rates=paper.SWEEP_RATES,
    horizons=(5_000, 10_000, 20_000),
    seeds=1,
    tflops=400.0,
)


def _mini_row(width: int) -> RunConfig:
    """The preset's run in 1,600 steps of 16 sequences at the same total decay, with telemetry of its dynamics."""
    run = relaxed("mini", width, base_width=128, phi_peak=0.01)
    lam = float(f"{run.optimizer.weight_decay * run.steps / 1_600:.3g}")
    run = lean(with_optimizer(replace(run, steps=1_600, batch=16), weight_decay=lam))
    return replace(run, telemetry_every=10)


MINI = Scale(
    name="mini",
    title="6 layers, minutes to an hour on one GPU; on the text of docs/evidence.md it repeats that page's runs",
    rows={width: _mini_row(width) for width in (128, 256, 512)},
    headline=256,
    sweep=replace(lean(adamw_sweep(relaxed("mini", 128, base_width=128, phi_peak=0.01), 400)), batch=16),
    widths=(128, 256, 512),
    rates=(5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    horizons=(400, 1_600),
    seeds=3,
    tflops=100.0,
    near_best=(0.1, 0.2),
)

_CPU_ROWS = {width: relaxed("demo", width, base_width=64, phi_peak=0.02) for width in (64, 96)}
CPU = Scale(
    name="cpu",
    title="4 layers, Python source, under half an hour on two cores",
    rows=_CPU_ROWS,
    headline=64,
    sweep=adamw_sweep(_CPU_ROWS[64], 240),
    widths=(32, 64, 128),
    rates=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    horizons=(120, 240, 480),
    seeds=3,
    tflops=0.05,
)

SCALES: Mapping[str, Scale] = {scale.name: scale for scale in (CPU, MINI, PAPER)}


def find_data(scale: Scale, folder: Path | None) -> Path:
    """The tokens of a scale; only scale cpu prepares its own."""
    if folder is not None:
        size = read_record(folder).vocab_size
        if scale.printed and size != GPT2_VOCAB:
            needs = f"--scale {scale.name} needs GPT-2 tokens, a vocabulary of {GPT2_VOCAB:,}"
            raise UsageError(f"{needs}; {folder} has {size:,}: prepare it with --tokenizer gpt2")
        return folder
    if scale.name == "cpu":
        return default_data(preset("demo").vocab)
    small = f"--vocab {preset('mini').vocab} --limit-characters 500000000"
    make = f"muonsw data prepare DIR --source fineweb {'--tokenizer gpt2' if scale.printed else small}"
    tokens = "GPT-2 tokens" if scale.printed else "prepared tokens"
    raise UsageError(f"--scale {scale.name} needs --data DIR with {tokens}: make them with `{make}`")
