"""The best lambda of an arm, found on a seed that the comparison itself does not use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muonsw.lab.console import Column, Table
from muonsw.lab.files import plain
from muonsw.lab.studies.arms import Arm, Comparison, Key, Results, Runs, decay_factors, multiples, with_lambda
from muonsw.lab.studies.outcome import loss_cell, swept_loss
from muonsw.lab.train.config import RunConfig

SEARCH = Key("search")
FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0)
MOST_EXTENSIONS = 3


@dataclass(frozen=True)
class TuningResult:
    """What a search over lambda found for one arm."""

    name: str  # the arm as it was given
    arm: Arm  # the arm at its best lambda
    losses: Mapping[float, float]  # final loss by lambda; infinite where a run diverged

    @property
    def best(self) -> float:
        """The lambda with the lowest loss."""
        return self.arm.optimizer.weight_decay

    @property
    def at_edge(self) -> bool:
        """Whether the best is the smallest or the largest that was tried, so that a better one may lie beyond.

        Where every lambda diverged there is none, and no reason to look for it beyond.
        """
        return self.found and self.best in (min(self.losses), max(self.losses))

    @property
    def found(self) -> bool:
        """Whether a run with any of the lambdas did not diverge."""
        return math.isfinite(self.losses[self.best])

    def as_data(self) -> dict[str, Any]:
        """Everything as JSON data; a run that diverged has no loss."""
        losses = [{"weight_decay": lam, "final": loss} for lam, loss in sorted(self.losses.items())]
        data: dict[str, Any] = plain({"arm": self.name, "best": self.best, "at_edge": self.at_edge, "losses": losses})
        return data


def grid(arm: Arm, factors: Sequence[float]) -> list[Arm]:
    """The arm at multiples of its lambda."""
    lambdas = multiples(arm.optimizer.weight_decay, factors, digits=4)
    return [with_lambda(arm, f"{arm.name}, lambda={lam:g}", lam) for lam in lambdas]


def best_of(arm: Arm, candidates: Sequence[Arm], runs: Runs) -> TuningResult:
    """The candidate with the lowest final loss, under a name that says so."""
    losses = {one.optimizer.weight_decay: swept_loss(runs[one.name][0]) for one in candidates}
    best = min(losses, key=losses.__getitem__)
    return TuningResult(arm.name, with_lambda(arm, f"{arm.name}, best lambda={best:g}", best), losses)


def tune(
    train: Callable[[Sequence[Comparison]], Results],
    base: RunConfig,
    arms: Sequence[Arm],
    *,
    seed: int,
    factors: Sequence[float] = FACTORS,
) -> list[TuningResult]:
    """Try multiples of each arm's lambda on one seed and keep the best of each arm.

    Where the best is the smallest or the largest that was tried, the search goes on beyond it, a few times. A lambda
    with which an update would take more than the weight is not tried. The seed is for the search alone: a comparison on
    the same one would favour the arm that was luckier.
    """
    grids = {arm.name: sorted(factors) for arm in arms}
    for extensions in range(MOST_EXTENSIONS + 1):
        candidates = {}
        for arm in arms:
            # An update that would take more than the whole weight is refused; the smallest lambda is tried in any case.
            smallest, *larger = grid(arm, grids[arm.name])
            possible = [one for one in larger if not max(decay_factors(base, one.optimizer)) > 1.0]
            candidates[arm.name] = [smallest, *possible]
        everyone = tuple(candidate for those in candidates.values() for candidate in those)
        runs = train([Comparison(SEARCH, base, everyone, (seed,), paired=False)])[SEARCH]
        found = [best_of(arm, candidates[arm.name], runs) for arm in arms]
        if extensions == MOST_EXTENSIONS or not any(tuned.at_edge for tuned in found):
            break
        grids = {tuned.name: _extended(grids[tuned.name], tuned) for tuned in found}
    return found


def _extended(factors: list[float], tuned: TuningResult) -> list[float]:
    """The grid with one more point beyond the edge that was best, as far from it as its neighbour."""
    if not tuned.at_edge:
        return factors
    if tuned.best == min(tuned.losses):
        return [factors[0] * factors[0] / factors[1], *factors]
    return [*factors, factors[-1] * factors[-1] / factors[-2]]


def sweep_table(found: Sequence[TuningResult]) -> Table:
    """Final loss by lambda and arm."""
    lambdas = sorted({lam for tuned in found for lam in tuned.losses})
    columns = [Column("lambda"), *(Column(tuned.name, number=True) for tuned in found)]
    rows = [(f"{lam:g}", *(loss_cell(tuned.losses, lam) for tuned in found)) for lam in lambdas]
    note = "Final validation loss on one seed that is used for nothing else; the best of each column stands out."
    return Table("sweep", "Search over lambda", columns, rows, " ".join(filter(None, (note, edge_note(found)))))


def edge_note(found: Sequence[TuningResult]) -> str:
    """A sentence about searches that found no lambda, and about those that ended at an edge; empty where none did."""
    lost = [tuned.name for tuned in found if not tuned.found]
    edges = [tuned.arm.name for tuned in found if tuned.at_edge]
    notes = []
    if lost:
        notes.append(f"Every lambda that was tried for {' and '.join(lost)} diverged: lower the learning rate.")
    if edges:
        tried = f"The best lambda of {' and '.join(edges)} is at the edge of what was tried"
        notes.append(f"{tried}; a better one may lie beyond.")
    return " ".join(notes)
