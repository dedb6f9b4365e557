"""Small multiples: norm and alignment of every role and of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from muonsw.lab.diagnose.drawing import DASHED, SMALL_PANEL, Arm, figure_with, line, noisy_line, save, zero_line
from muonsw.lab.diagnose.history import History
from muonsw.lab.report.theme import LIGHT
from muonsw.theory import target_norms
from muonsw.theory.sampled import window_in_steps, windowed_line

COLUMNS = 4
NORM = "weight_rms"


@dataclass(frozen=True)
class Multiples:
    """One panel for each role or layer.

    Attributes:
        name: Of the files.
        title: Of the figure.
        kind: "roles" or "layers".
        key: What is drawn; the norm is drawn with its steady state.
    """

    name: str
    title: str
    kind: str
    key: str

    def __call__(self, named: Sequence[Arm], folder: Path) -> list[Path]:
        """Draw and write; nothing where no part was recorded."""
        histories = [(arm, history) for arm in named for history in getattr(arm.diagnosis, self.kind)]
        scopes = list(dict.fromkeys(history.scope for _, history in histories))
        if not any(np.isfinite(history.column(self.key)).any() for _, history in histories):
            return []
        columns = min(COLUMNS, len(scopes))
        with figure_with(self.title, -(-len(scopes) // columns), columns, SMALL_PANEL) as (figure, panels):
            for axis, scope in zip(panels, scopes, strict=False):
                self._panel(axis, [pair for pair in histories if pair[1].scope == scope])
                axis.set_title(scope.replace(":", " "), fontsize=11)
                axis.tick_params(labelsize=9.5)
            for axis in panels[len(scopes) :]:
                axis.set_visible(False)
            handles = [Line2D([], [], color=arm.colour, label=arm.label) for arm in named]
            if self.key == NORM:
                handles.append(Line2D([], [], color=LIGHT.muted, linestyle=DASHED, label=r"steady state $r^\star$"))
            figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 4), fontsize=10.5)
            return save(figure, folder, self.name)

    def _panel(self, axis: Axes, pairs: Sequence[tuple[Arm, History]]) -> None:
        if self.key != NORM:
            for arm, history in pairs:
                noisy_line(axis, history.steps, history.column(self.key), arm.colour, arm.label)
            zero_line(axis)
            return
        for arm, history in pairs:
            line(axis, history.steps, history.column(NORM), arm.colour)
            line(axis, *smooth_target(history), arm.colour, linestyle=DASHED, linewidth=1.2)
        # A target far outside, as during warmup, must not flatten what was observed.
        highest = max((history.highest(NORM) for _, history in pairs), default=0.0)
        axis.set_ylim(0.0, 1.4 * highest if highest > 0 else 1.0)


def smooth_target(history: History) -> tuple[list[int], list[float]]:
    """Steps and smoothed steady state of a history; both empty where nothing decays."""
    norm = history.norm
    if norm is None or not float(norm.phi.max()) > 0:
        return [], []
    height, _ = windowed_line(norm.steps, target_norms(norm).log(), window_in_steps(norm.steps))
    return norm.steps.tolist(), height.exp().tolist()


MULTIPLES = (
    Multiples("roles", "Weight RMS by role", "roles", NORM),
    Multiples("roles-alignment", "Cosine of weight and update by role", "roles", "alignment_update"),
    Multiples("layers", "Weight RMS by layer", "layers", NORM),
    Multiples("layers-alignment", "Cosine of weight and update by layer", "layers", "alignment_update"),
)
