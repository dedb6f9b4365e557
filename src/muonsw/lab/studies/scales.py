"""The sizes at which training studies run: the paper's own, minutes on one GPU, and a laptop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muonsw.lab import paper
from muonsw.lab.data.loader import read_record
from muonsw.lab.data.prepare import prepare_default
from muonsw.lab.errors import UsageError
from muonsw.lab.model import ModelConfig, MuP, preset
from muonsw.lab.theory.schedule import peak_lr_for_horizon
from muonsw.lab.train.config import DEFAULT_DATA, RunConfig, default_data, preset_run

# Filled in once the tokens are known.
NO_DATA = ""
GPT2_VOCAB = 50_257
# A sweep of the learning rate goes where training is unstable: only a loss that is not finite ends its runs.
NEVER = 1e9
LAMBDAS = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)


@dataclass(frozen=True)
class Scale:
    """Everything that a study leaves open."""

    name: str  # what `--scale` is given
    title: str  # what it is, for lists and reports
    rows: Mapping[int, RunConfig]  # the runs of the main table by width, with the scaled rule and the undivided peak
    headline: int  # the width of the figures
    sweep: RunConfig  # the AdamW run whose learning rate is swept, at the width of the horizons
    sweep_widths: tuple[int, ...]  # widths of that sweep
    widths: tuple[int, ...]  # over which grids follow the best learning rate and the best lambda of Muon
    drift_steps: int  # steps of these runs
    rates: tuple[float, ...]  # learning rates, ascending
    horizons: tuple[int, ...]  # steps, ascending
    map_run: RunConfig  # the run of the regret map, at the smallest width that trains stably
    maps: Mapping[int, tuple[float, ...]]  # by its lengths, a factor of four apart, its lambdas, a factor of two apart
    seeds: int  # for each arm of the paper's table
    sweep_seeds: int  # for each point of a grid or sweep
    tflops: float  # FLOPs that one run sustains in a second, in units of 1e12; a guess for planning
    workers: int  # runs at a time that the times are given for
    tokens: Callable[[], Path]  # makes or finds the tokens where no folder is given
    vocab: int | None = None  # the vocabulary that a given folder must have; None takes any
    near_best: tuple[float, ...] = ()  # further lambdas of the main table, as multiples of its own
    # Steps between samples where telemetry is what is studied; None is as in all other runs.
    sampled_every: int | None = None

    @property
    def printed(self) -> bool:
        """Whether the paper's numbers are those of this size."""
        return self.name == "paper"

    def with_seeds(self, seeds: int | None) -> Scale:
        """The same with so many seeds everywhere; None leaves its own."""
        return self if seeds is None else replace(self, seeds=seeds, sweep_seeds=seeds)


def relaxed(name: str, model: ModelConfig, *, phi_peak: float) -> RunConfig:
    """A short run relaxation-matched to the paper: lambda so large that a step at the peak decays by `phi_peak`.

    Lambda times the group's learning rate times the steps, which fixes how far the norm relaxes, then is `phi_peak`
    times the steps: 35 for the paper's width 256, and for 3,500 steps at 0.01.
    """
    run = preset_run(name, NO_DATA, model=model)
    # The paper's choices where it matters which peak decay divides by; the rest is the preset's.
    optimizer = replace(run.optimizer, muon_lr="adam", peak="base")
    weight_decay = phi_peak * model.relative_width / optimizer.lr
    return replace(run, optimizer=replace(optimizer, weight_decay=weight_decay))


def adamw_sweep(run: RunConfig, steps: int) -> RunConfig:
    """The run with AdamW for all parameters and constant decay, as the paper tuned its learning rate."""
    optimizer = replace(run.optimizer, algorithm="adamw", decay="constant", weight_decay=0.1, peak="group")
    every = max(1, steps // 10)
    return replace(
        run, optimizer=optimizer, steps=steps, diverged=NEVER, eval_every=every, checkpoint_every=steps,
        telemetry_every=every,
    )  # fmt: skip


def shortened(run: RunConfig, steps: int, batch: int) -> RunConfig:
    """The run in fewer steps at the same total decay."""
    lam = float(f"{run.optimizer.weight_decay * run.steps / steps:.3g}")
    return lean(replace(run, steps=steps, batch=batch, optimizer=replace(run.optimizer, weight_decay=lam)))


def lean(run: RunConfig) -> RunConfig:
    """Evaluated and sampled by telemetry ten times, saved at the end alone."""
    tenth = max(1, run.steps // 10)
    return replace(run, eval_every=tenth, checkpoint_every=run.steps, telemetry_every=tenth, log_every=tenth, keep=1)


def at_horizon(run: RunConfig, steps: int) -> RunConfig:
    """The run at another length, its peak by the horizon rule; evaluated four times, saved at the end alone."""
    optimizer = replace(run.optimizer, lr=min(run.optimizer.lr, peak_lr_for_horizon(steps)))
    every = max(1, steps // 4)
    return replace(
        run, optimizer=optimizer, steps=steps, eval_every=every, checkpoint_every=steps, telemetry_every=every, keep=1
    )


def of_same_total(run: RunConfig, steps: int) -> RunConfig:
    """The run at another length with a lambda of the same total decay; evaluated at the end alone."""
    optimizer = replace(run.optimizer, weight_decay=run.optimizer.weight_decay * run.steps / steps)
    return replace(at_horizon(replace(run, optimizer=optimizer), steps), eval_every=steps, log_every=20)


def at_width(run: RunConfig, width: int) -> RunConfig:
    """The same run of a wider or narrower model."""
    return replace(run, model=widened(run.decoder, width))


def widened(model: ModelConfig, width: int) -> ModelConfig:
    """The same model at another width; an expert width that was given grows with it."""
    ff = None if model.ff is None else model.ff * width // model.width
    return replace(model, width=width, ff=ff)


def _paper_tokens() -> Path:
    raise UsageError(
        "--scale paper needs --data DIR with GPT-2 tokens of FineWeb: make them with "
        "muonsw data prepare --source fineweb --tokenizer gpt2"
    )


def _mini_tokens() -> Path:
    vocab = preset("mini").vocab
    folder = DEFAULT_DATA / f"python-packages-bpe{vocab}"
    prepare_default(folder, vocab=vocab, packages=True)
    return folder


PAPER = Scale(
    name="paper",
    title="the paper's own configuration, for a cluster",
    rows={width: preset_run(f"w{width}", NO_DATA) for width in paper.ROWS},
    headline=1024,
    sweep=adamw_sweep(preset_run("w256", NO_DATA), 5_000),
    sweep_widths=tuple(paper.SWEEP),
    widths=tuple(paper.SWEEP),
    drift_steps=10_000,
    rates=paper.SWEEP_RATES,
    horizons=(5_000, 10_000, 20_000),
    map_run=preset_run("w256", NO_DATA),
    maps=dict.fromkeys((2_500, 10_000, 40_000), LAMBDAS),
    seeds=1,
    sweep_seeds=1,
    tflops=400.0,
    workers=1,
    tokens=_paper_tokens,
    vocab=GPT2_VOCAB,
)

_MINI = relaxed("mini", replace(preset("mini"), width=128, mup=MuP(base_width=128)), phi_peak=0.01)
MINI = Scale(
    name="mini",
    title="6 layers, minutes to an hour on one GPU; with the text of docs/evidence.md its runs are those of that page",
    rows={
        width: shortened(relaxed("mini", widened(_MINI.decoder, width), phi_peak=0.01), 1_600, 16)
        for width in (128, 256, 512)
    },
    headline=256,
    sweep=replace(lean(adamw_sweep(_MINI, 400)), batch=16),
    sweep_widths=(128, 256, 512),
    widths=(64, 128, 256, 512),
    drift_steps=1_600,  # at half of it, while loss falls steeply, seeds differ by more than lambdas do
    rates=(5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    horizons=(400, 1_600),
    map_run=replace(preset_run("mini", NO_DATA, model=replace(preset("mini"), width=128)), batch=16),
    # Long runs want less decay: one lambda more, so that the best one of a rule has neighbours on both sides.
    maps={400: LAMBDAS, 1_600: LAMBDAS, 6_400: (0.00625, *LAMBDAS)},
    seeds=3,
    sweep_seeds=3,
    tflops=100.0,
    workers=1,
    tokens=_mini_tokens,
    near_best=(0.1, 0.2),
    sampled_every=10,
)

_CPU = relaxed("demo", replace(preset("demo"), mup=MuP(base_width=64)), phi_peak=0.02)
CPU = Scale(
    name="cpu",
    title="4 layers, Python source, under half an hour on two cores",
    rows={width: relaxed("demo", widened(_CPU.decoder, width), phi_peak=0.02) for width in (64, 96)},
    headline=64,
    sweep=adamw_sweep(_CPU, 240),
    sweep_widths=(32, 64, 128),
    widths=(32, 64, 96),
    drift_steps=120,
    rates=(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
    horizons=(120, 240, 480),
    map_run=preset_run("demo", NO_DATA),
    maps=dict.fromkeys((105, 420), (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0)),
    seeds=3,
    sweep_seeds=2,
    tflops=0.05,
    workers=2,
    tokens=lambda: default_data(preset("demo").vocab),
)

SCALES: Mapping[str, Scale] = {scale.name: scale for scale in (CPU, MINI, PAPER)}


def find_data(scale: Scale, given: Path | None) -> Path:
    """The tokens of a scale, prepared if need be.

    Raises:
        UsageError: If the scale needs a folder and none is given, or it has another vocabulary.
    """
    if given is None:
        return scale.tokens()
    size = read_record(given).vocab_size
    if scale.vocab is not None and size != scale.vocab:
        wanted = f"--scale {scale.name} needs GPT-2 tokens, a vocabulary of {scale.vocab:,}"
        raise UsageError(f"{wanted}; {given} has {size:,}: prepare it with --tokenizer gpt2")
    return given
