"""The figures of a diagnosis; each diagnostic figure of the paper has its counterpart here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from muonsw.lab.diagnose.diagnosis import Diagnosis
from muonsw.lab.diagnose.drawing import (
    DASHED,
    DOTTED,
    Arm,
    arms,
    figure_with,
    legend,
    line,
    noisy_line,
    save,
    zero_line,
)
from muonsw.lab.diagnose.findings import words
from muonsw.lab.diagnose.multiples import MULTIPLES
from muonsw.lab.report.theme import LIGHT

Draw = Callable[[Sequence[Arm], Path], list[Path]]


def draw_all(diagnoses: Sequence[Diagnosis], folder: Path) -> list[Path]:
    """Draw every figure for which there is something to show, as PNG and SVG."""
    named = arms(diagnoses)
    return [path for draw in FIGURES.values() for path in draw(named, folder)]


def draw_norms(named: Sequence[Arm], folder: Path) -> list[Path]:
    """Loss and weight norm over steps (the paper's first figure, and those of widths 512 and 768)."""
    with figure_with("Loss and weight norm", 1, 2) as (figure, (losses, norms)):
        evaluated = all("loss" in arm.diagnosis.run.evals for arm in named)
        for arm in named:
            run = arm.diagnosis.run
            columns = run.evals if evaluated else run.train
            if "loss" in columns:
                steps, loss = columns.known("loss")
                draw = line if evaluated else noisy_line
                draw(losses, steps, loss, arm.colour, label=arm.label)
            history = arm.diagnosis.history
            line(norms, history.steps, history.column("weight_rms"), arm.colour, label=arm.label)
        losses.set(title="Validation loss" if evaluated else "Training loss", xlabel="step")
        norms.set(title=f"Weight RMS of {_scope(named)}", xlabel="step")
        norms.set_ylim(bottom=0.0)
        _crop_start(losses)
        legend(norms if not losses.lines else losses)
        return save(figure, folder, "loss-and-norm")


def draw_alignment(named: Sequence[Arm], folder: Path) -> list[Path]:
    """Alignment, and observed norm beside the steady state and the recursion (the paper's second figure)."""
    if not _recorded(named, "alignment_update"):
        return []
    with figure_with("Alignment, and the norm it predicts", 1, 2) as (figure, (alignment, norms)):
        for arm in named:
            history, tracking = arm.diagnosis.history, arm.diagnosis.history.tracking
            noisy_line(alignment, history.steps, history.column("alignment_update"), arm.colour, arm.label)
            line(norms, history.steps, history.column("weight_rms"), arm.colour, linewidth=2.4)
            if tracking is None or history.norm is None:
                continue
            line(norms, history.norm.steps, tracking.smooth_target, arm.colour, linestyle=DASHED, linewidth=1.5)
            line(norms, history.norm.steps, tracking.predicted, LIGHT.text, linestyle=DOTTED, linewidth=1.6, zorder=4)
            if tracking.broke_at is not None:
                norms.axvline(tracking.broke_at, color=arm.colour, linewidth=1.0, alpha=0.8)
                norms.plot(
                    tracking.broke_at, 1.0, "v", color=arm.colour, transform=norms.get_xaxis_transform(), clip_on=False
                )
        zero_line(alignment)
        alignment.set(title="Cosine of weight and update", xlabel="step")
        norms.set(title=f"Weight RMS of {_scope(named)}", xlabel="step")
        _limit_to_observed(norms, named)
        legend(alignment)
        legend(norms, handles=_line_styles(any(_broke(arm) for arm in named)))
        return save(figure, folder, "alignment-and-prediction")


def draw_tracking(named: Sequence[Arm], folder: Path) -> list[Path]:
    """The adiabatic ratio and the lag: whether the norm can follow its target, and whether it does."""
    if all(arm.diagnosis.history.tracking is None for arm in named):
        return []
    with figure_with("Does the norm follow its steady state?", 1, 2) as (figure, (ratios, lags)):
        for arm in named:
            history, tracking = arm.diagnosis.history, arm.diagnosis.history.tracking
            if tracking is None or history.norm is None:
                continue
            after = history.norm.steps >= int(history.steps[history.peak_at]) if _fell(arm) else history.norm.steps >= 0
            steps = history.norm.steps[after]
            line(ratios, steps, tracking.ratio[after], arm.colour, label=arm.label)
            line(ratios, steps, tracking.ratio_fixed[after], arm.colour, linestyle=DASHED, linewidth=1.3)
            line(lags, steps, tracking.lag[after], arm.colour, label=arm.label)
        zero_line(ratios, 1.0)
        ratios.set(title=r"Adiabatic ratio $\tau\,|d\,\ln r^\star/dt|$", xlabel="step (from the peak of the LR)")
        ratios.set_yscale("log")
        # Where the target stands still the ratio is the noise of a slope around zero.
        ratios.set_ylim(1e-3, max(10.0, ratios.get_ylim()[1]))
        lags.axhspan(-0.2, 0.2, color=LIGHT.grid, alpha=0.6, zorder=0)
        zero_line(lags)
        lags.set(title=r"Lag $\ln(r/r^\star)$", xlabel="step (from the peak of the LR)")
        legend(lags)
        styles = [_style("-", r"$\tau=1/(2\varphi)$"), _style(DASHED, r"$\tau$ with the alignment frozen")]
        legend(ratios, handles=styles, loc="upper left")
        return save(figure, folder, "tracking")


def draw_defect(named: Sequence[Arm], folder: Path) -> list[Path]:
    """How far from orthogonal Muon's direction is (the paper's figure on Newton-Schulz)."""
    if not _recorded(named, "defect"):
        return []
    with figure_with("Size of Muon's direction", 1, 1, (7.0, 4.3)) as (figure, (axis,)):
        for arm in named:
            history = arm.diagnosis.history
            noisy_line(axis, history.steps, history.column("defect"), arm.colour, arm.label)
        zero_line(axis, 1.0)
        axis.annotate(
            "orthogonal", (1.0, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=LIGHT.muted
        )
        axis.set(title=r"$\|O\|_F\,/\,\sqrt{\min(m,n)}$, mean over matrices", xlabel="step")
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0.8), max(high, 1.05))
        legend(axis, loc="lower right")
        return save(figure, folder, "orthogonality")


def draw_gradient(named: Sequence[Arm], folder: Path) -> list[Path]:
    """Alignment of the weights with gradient and momentum (the paper's figure of the same)."""
    keys = {
        "alignment_gradient": "Cosine of weight and gradient",
        "alignment_momentum": "Cosine of weight and momentum",
    }
    if not _recorded(named, *keys):
        return []
    with figure_with("Gradient and momentum against the weights", 1, 2) as (figure, panels):
        for axis, (key, title) in zip(panels, keys.items(), strict=True):
            for arm in named:
                history = arm.diagnosis.history
                noisy_line(axis, history.steps, history.column(key), arm.colour, arm.label)
            zero_line(axis)
            axis.set(title=title, xlabel="step")
        low, high = (limit(axis.get_ylim()[place] for axis in panels) for place, limit in ((0, min), (1, max)))
        for axis in panels:
            axis.set_ylim(low, high)
        legend(panels[1])
        return save(figure, folder, "gradient-and-momentum")


def draw_late_alignment(named: Sequence[Arm], folder: Path) -> list[Path]:
    """Late alignment over learning rate with both fits, extended to zero (the paper's figure of the same)."""
    if not any(arm.diagnosis.fits for arm in named):
        return []
    with figure_with("Late alignment against the learning rate", 1, 1, (7.4, 4.8)) as (figure, (axis,)):
        for arm in named:
            _draw_fits(axis, arm)
        zero_line(axis)
        axis.xaxis.set_major_formatter(lambda lr, _: f"{lr:.2g}")
        axis.set_xlim(left=0.0)
        axis.set(title=f"Cosine of weight and update, {_scope(named)}", xlabel=r"learning rate $\eta$")
        legend(axis)
        return save(figure, folder, "late-alignment")


def _draw_fits(axis: Axes, arm: Arm) -> None:
    history, fits = arm.diagnosis.history, arm.diagnosis.fits
    if fits is None:
        return
    where = (history.steps >= fits.first_step) & np.isfinite(history.column("alignment_update"))
    lr, observed = history.column("lr")[where], history.column("alignment_update")[where]
    axis.plot(lr, observed, "o", color=arm.colour, alpha=min(0.6, 30 / len(lr) + 0.1), markersize=4, markeredgewidth=0)
    axis.plot([], [], "o", color=arm.colour, label=arm.label)
    reach = np.linspace(0.0, float(lr.max()), 50)
    if fits.origin:
        axis.plot(reach, fits.origin.at(reach), color=arm.colour, linestyle=DASHED, linewidth=1.5,
                  label=rf"$-{fits.origin.k:.3g}\,\eta$")  # fmt: skip
    if fits.offset:
        axis.plot(reach, fits.offset.at(reach), color=arm.colour, linestyle=DOTTED, linewidth=1.8,
                  label=rf"${-fits.offset.a0:+.2g}{-fits.offset.k:+.3g}\,\eta$")  # fmt: skip


def _recorded(named: Sequence[Arm], *keys: str) -> bool:
    return any(np.isfinite(arm.diagnosis.history.column(key)).any() for arm in named for key in keys)


def _crop_start(axis: Axes) -> None:
    """Show where the curves end up: the fall from the initial loss may leave the panel at the top."""
    values = [np.asarray(drawn.get_ydata(), dtype=np.float64) for drawn in axis.lines]
    values = [value for value in values if len(value) > 10]
    if not values:
        return
    low = min(float(value.min()) for value in values)
    high = max(float(np.quantile(value, 0.8)) for value in values)
    if high > low:
        axis.set_ylim(low - 0.08 * (high - low), high + 0.15 * (high - low))


def _limit_to_observed(axis: Axes, named: Sequence[Arm]) -> None:
    """A target far outside, as during warmup, must not flatten what was observed."""
    highest = max((arm.diagnosis.history.highest("weight_rms") for arm in named), default=1.0)
    if np.isfinite(highest) and highest > 0:
        axis.set_ylim(0.0, 1.45 * highest)


def _line_styles(broke: bool) -> list[Line2D]:
    styles = [
        _style("-", "observed"),
        _style(DASHED, r"steady state $r^\star$"),
        Line2D([], [], color=LIGHT.text, linestyle=DOTTED, linewidth=1.6, label="recursion from the first sample"),
    ]
    mark = Line2D([], [], color=LIGHT.muted, marker="v", linestyle="-", linewidth=1.0, label="tracking ends")
    return [*styles, mark] if broke else styles


def _style(linestyle: object, label: str) -> Line2D:
    return Line2D([], [], color=LIGHT.muted, linestyle=linestyle, label=label)  # type: ignore[arg-type]


def _broke(arm: Arm) -> bool:
    return arm.diagnosis.history.tracking is not None and arm.diagnosis.history.tracking.broke_at is not None


def _fell(arm: Arm) -> bool:
    history = arm.diagnosis.history
    return history.peak_at < len(history.steps) - 3


def _scope(named: Sequence[Arm]) -> str:
    return words(named[0].diagnosis.history.scope)


FIGURES: Mapping[str, Draw] = {
    "loss-and-norm": draw_norms,
    "alignment-and-prediction": draw_alignment,
    "tracking": draw_tracking,
    "orthogonality": draw_defect,
    "gradient-and-momentum": draw_gradient,
    "late-alignment": draw_late_alignment,
    **{multiples.name: multiples for multiples in MULTIPLES},
}
