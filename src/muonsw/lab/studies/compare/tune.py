"""The best lambda of each decay rule, found on a seed that the comparison itself does not use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muonsw.lab.report.sections import Cell, Column, Table
from muonsw.lab.runs import Run
from muonsw.lab.studies.compare.arms import Arm
from muonsw.lab.studies.compare.conduct import Bench
from muonsw.lab.train.config import RunConfig

FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)
MOST_EXTENSIONS = 3


@dataclass(frozen=True)
class Tuned:
    """What a search over lambda found for one arm.

    Attributes:
        arm: The arm at its best lambda.
        losses: Final loss by lambda.
        at_edge: Whether the best is the smallest or the largest that was tried, so that a better one may lie beyond.
    """

    arm: Arm
    losses: Mapping[float, float]
    at_edge: bool


def tune(
    bench: Bench, base: RunConfig, arms: Sequence[Arm], *, seed: int, factors: Sequence[float] = FACTORS
) -> list[Tuned]:
    """Try multiples of each arm's lambda on one seed and keep the best of each arm.

    Where the best is the smallest or the largest that was tried, the search goes on beyond it, a few times.

    Args:
        bench: Where the runs are made.
        base: The run that is varied.
        arms: What is tuned, each for itself.
        seed: For the search alone: a comparison on the same seed would be biased to whoever was luckier.
        factors: Multiples of the arm's lambda.
    """
    grids = {arm.name: sorted(factors) for arm in arms}
    for extensions in range(MOST_EXTENSIONS + 1):
        candidates = {arm.name: [_at(arm, factor) for factor in grids[arm.name]] for arm in arms}
        runs = bench.run(base, [candidate for those in candidates.values() for candidate in those], [seed])
        found = [_best(arm, candidates[arm.name], runs) for arm in arms]
        at_edge = [arm for arm, tuned in zip(arms, found, strict=True) if tuned.at_edge]
        if not at_edge or extensions == MOST_EXTENSIONS:
            break
        for arm, tuned in zip(arms, found, strict=True):
            grids[arm.name] = _extended(grids[arm.name], tuned)
    return found


def _extended(grid: list[float], tuned: Tuned) -> list[float]:
    """The grid with one more point beyond the edge that was best, as far from it as its neighbour."""
    if not tuned.at_edge or len(grid) < 2:
        return grid
    if tuned.arm.optimizer.weight_decay == min(tuned.losses):
        return [grid[0] * grid[0] / grid[1], *grid]
    return [*grid, grid[-1] * grid[-1] / grid[-2]]


def _at(arm: Arm, factor: float) -> Arm:
    weight_decay = float(f"{arm.optimizer.weight_decay * factor:.4g}")
    return Arm(f"{arm.name}, lambda={weight_decay:g}", replace(arm.optimizer, weight_decay=weight_decay))


def _best(arm: Arm, candidates: Sequence[Arm], runs: Mapping[str, Sequence[Run]]) -> Tuned:
    losses = {}
    for candidate in candidates:
        loss = runs[candidate.name][0].final_loss
        losses[candidate.optimizer.weight_decay] = loss if math.isfinite(loss) else math.inf
    best = min(losses, key=losses.__getitem__)
    chosen = Arm(f"{arm.name}, best lambda={best:g}", replace(arm.optimizer, weight_decay=best))
    return Tuned(chosen, losses, at_edge=best in (min(losses), max(losses)))


def sweep_table(found: Sequence[Tuned]) -> Table:
    """Final loss by lambda and arm."""
    lambdas = sorted({lam for tuned in found for lam in tuned.losses})
    headings = [tuned.arm.name.partition(", best lambda")[0] for tuned in found]
    columns = [Column("lambda"), *(Column(heading, number=True) for heading in headings)]
    rows = [(f"{lam:g}", *(_cell(tuned, lam) for tuned in found)) for lam in lambdas]
    edges = [tuned.arm.name for tuned in found if tuned.at_edge]
    note = "Final validation loss on one seed that is used for nothing else; the best of each column stands out."
    if edges:
        note += (
            f" The best lambda of {' and '.join(edges)} is at the edge of what was tried; a better one may lie beyond."
        )
    return Table("sweep", "Search over lambda", columns, rows, note)


def _cell(tuned: Tuned, lam: float) -> Cell | None:
    loss = tuned.losses.get(lam)
    if loss is None:
        return None
    return Cell(f"{loss:.4f}", tone="holds" if lam == tuned.arm.optimizer.weight_decay else "")
