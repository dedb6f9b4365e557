"""The figures of docs/evidence.md, drawn with matplotlib."""

from __future__ import annotations

import math

import numpy as np
import tables
from matplotlib.figure import Figure

from muonsw.lab.studies.grid import means

COLOURS = {"constant": "#0072B2", "scaled": "#D55E00", "piecewise": "#009E73", "hyperball": "#009E73"}
LABELS = {"piecewise": "falling, then rising"}


def panels(count, columns, size=(3.4, 2.9)):
    """A figure with `count` panels, row by row."""
    lines = math.ceil(count / columns)
    figure = Figure((size[0] * columns, size[1] * lines), layout="constrained", dpi=110)
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for ax in axes:
        ax.grid(color="#E3E6EA"), ax.set_axisbelow(True), ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def basin(ax, losses, rule, lowest=None):
    """Plot mean loss over lambda or rate, relative to the lowest."""
    mean = means(losses)
    lowest = min(mean.values()) if lowest is None else lowest
    above, label = [loss - lowest for loss in mean.values()], LABELS.get(rule, rule)
    ax.plot(list(mean), above, "o-", color=COLOURS[rule], label=label, ms=4)
    ax.set_xscale("log"), ax.minorticks_off()
    values = sorted({value for line in ax.lines for value in line.get_xdata()})  # rules differ in the values tried
    ax.set_xticks(values, [f"{value:g}" for value in values], fontsize=8, rotation=45)


def forest(name, lines, label):
    """Plot gaps with their intervals, one line each."""
    figure, (ax,) = panels(1, 1, (7.2, 0.6 + 0.27 * len(lines)))
    for place, (_, values) in enumerate(reversed(lines)):
        ax.errorbar(np.mean(values), place, xerr=tables.half(values), fmt="o", ms=4, color=COLOURS["scaled"], capsize=2)
    ax.set_yticks(range(len(lines)), [words for words, _ in reversed(lines)], fontsize=8)
    ax.axvline(0, color="black", lw=0.8), ax.set_xlabel(label)
    return {name: figure}


def tuned_figure():
    cells = [*tables.every_setting(), *tables.settings("adamw-lambda", steps=6400).values()]
    lines = [(tables.describe(rows[0]), tables.gap(rows)) for rows in cells]
    return forest("tuned", lines, "scaled minus constant decay, each at its best lambda (nats)")


def family_figure():
    lines = [(name, tables.at_best(entry["scaled"]) - tables.at_best(entry["constant"]))
             for name, entry in tables.members().items()]  # fmt: skip
    return forest("family", lines, "scaled minus constant decay, each at its best rate and lambda (nats)")


def lambda_figures():
    cells = tables.lengths()
    figure, axes = panels(len(cells), 2)
    for ax, rows in zip(axes, cells, strict=True):
        row = rows[0]
        for rule in tables.RULES:
            basin(ax, tables.by(rows, rule=rule), rule)
        ax.set_title(f"{row['steps']:,} steps, width {row['width']}, {row['epochs']:.1f} epochs", fontsize=9)
        ax.set_xlabel("lambda"), ax.set_ylabel("above its best (nats)")
        ax.axhline(tables.GOOD, color="grey", lw=0.8, ls="--")
    axes[0].legend()
    repeated, (ax,) = panels(1, 1, (5, 3.2))
    lowest = min(
        min(means(tables.by(tables.of("repeated-text"), rule=rule)).values()) for rule in (*tables.RULES, "piecewise")
    )
    for rule in (*tables.RULES, "piecewise"):
        basin(ax, tables.by(tables.of("repeated-text"), rule=rule), rule, lowest)
    ax.set_xlabel("lambda"), ax.set_ylabel("above the lowest (nats)"), ax.legend()
    return {"regret-map": figure, "repeated-text": repeated}


def dynamics_figures():
    figure, (left, right) = panels(2, 2, (4.2, 3.2))
    for rule in tables.RULES:
        row = tables.of("steady-state", decay=rule)[0]
        step, seen, predicted = tables.recursion(row)
        left.plot(step, seen, color=COLOURS[rule], label=rule), left.plot(step, predicted, "k--", lw=0.8)
        right.plot(row["decayed.step"], row["decayed.alignment_update"], color=COLOURS[rule])
    left.set_title("weight RMS; dashed: by the recursion", fontsize=9), left.legend()
    right.set_title("cos(weights, update)", fontsize=9), left.set_xlabel("step"), right.set_xlabel("step")
    grown, axes = panels(len(tables.gradient_runs()), 2)
    for ax, (name, arms) in zip(axes, tables.gradient_runs().items(), strict=True):
        for rule, rows in arms.items():
            ax.plot(rows[0]["normalized.step"], rows[0]["normalized.gradient_rms"], color=COLOURS[rule], label=rule)
        ax.set_title(name, fontsize=9), ax.set_yscale("log"), ax.set_xlabel("step"), ax.set_ylabel("gradient RMS")
    axes[0].legend()
    return {"dynamics": figure, "gradient-growth": grown}


def rate_figure():
    figure, axes = panels(4, 2)
    for ax, width in zip(axes, (64, 128, 256, 512), strict=True):
        for name, by_width in tables.rates().items():
            basin(ax, by_width[width], name)
        ax.set_title(f"width {width}", fontsize=9)
        ax.set_xlabel("learning rate"), ax.set_ylabel("above its best (nats)")
    axes[0].legend()
    return {"rate-drift": figure}


def draw(folder):
    for make in (tuned_figure, family_figure, lambda_figures, dynamics_figures, rate_figure):
        for name, figure in make().items():
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
