"""Training studies as data: which runs they compare, what they claim about them, and how they were scaled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muonsw.lab.claims.claim import Claim
from muonsw.lab.report.sections import Chart, Table
from muonsw.lab.runs import Run
from muonsw.lab.studies.compare.arms import Arm
from muonsw.lab.studies.training.scales import Scale
from muonsw.lab.train.config import RunConfig

# By comparison, by arm: one run for each seed.
Results = Mapping[str, Mapping[str, Sequence[Run]]]


@dataclass(frozen=True)
class Comparison:
    """Arms that share everything but their optimizer, seed by seed.

    Attributes:
        name: How it is called within its study.
        base: What the arms share; its data path is filled in when it is run.
        arms: The first is the baseline of every pair.
        seeds: Of initial weights and data order, the same for every arm.
        paired: Whether arms are held against the first one; a sweep has no baseline.
    """

    name: str
    base: RunConfig
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    paired: bool = True

    def config(self, arm: Arm, seed: int) -> RunConfig:
        """One run."""
        return replace(self.base, optimizer=arm.optimizer, seed=seed)

    def configs(self) -> list[tuple[Arm, int, RunConfig]]:
        """Every run, seed by seed, so that a pair is complete as early as possible."""
        return [(arm, seed, self.config(arm, seed)) for seed in self.seeds for arm in self.arms]


def no_follow_up(_results: Results, _scale: Scale) -> Sequence[Comparison]:
    """Nothing depends on what was found first."""
    return ()


def no_tables(_results: Results, _scale: Scale) -> Sequence[Table]:
    """No table beside those that every comparison has."""
    return ()


def no_charts(_results: Results, _scale: Scale) -> Sequence[Chart]:
    """No figure beside those that every report has."""
    return ()


def no_drawing(_results: Results, _folder: Path) -> list[Path]:
    """No figure in a file of its own."""
    return []


@dataclass(frozen=True)
class TrainingStudy:
    """One table or figure of the paper, or a question next to it, answered by training.

    Attributes:
        name: What `muonsw reproduce` is given.
        title: One line for lists.
        reference: Where the paper has it.
        scaled: By scale, how it was scaled, in words; the scales it can be run at.
        comparisons: The runs, given a scale.
        judge: The claims that they allow.
        follow_up: Runs that depend on what the first ones found; given no results, stand-ins that cost the same.
        tables: Tables of its own.
        charts: Figures of its own, for the page.
        draw: Figures of its own, as files in a folder.
    """

    name: str
    title: str
    reference: str
    scaled: Mapping[str, str]
    comparisons: Callable[[Scale], Sequence[Comparison]]
    judge: Callable[[Results, Scale], Sequence[Claim]]
    follow_up: Callable[[Results, Scale], Sequence[Comparison]] = no_follow_up
    tables: Callable[[Results, Scale], Sequence[Table]] = no_tables
    charts: Callable[[Results, Scale], Sequence[Chart]] = no_charts
    draw: Callable[[Results, Path], list[Path]] = no_drawing

    def planned(self, scale: Scale) -> list[Comparison]:
        """All comparisons, those that wait for results with stand-ins."""
        return [*self.comparisons(scale), *self.follow_up({}, scale)]

    def runs(self, scale: Scale) -> list[RunConfig]:
        """Every run, those that comparisons share once."""
        return list(dict.fromkeys(config for one in self.planned(scale) for _, _, config in one.configs()))
