"""Grids: the best of means, edges, and generic claims that tell the rules apart."""

import math
from dataclasses import replace

import pytest

from muonsw.lab import paper
from muonsw.lab.stats import ONE_SEED
from muonsw.lab.studies.catalogue import rate_drift, regret
from muonsw.lab.studies.grid import (
    at_edge,
    best_gaps,
    best_of_means,
    grid_charts,
    grid_table,
    horizon_cells,
    judge_cell,
    judge_horizons,
    judge_widths,
    sweep,
    vertex,
    width_cells,
)
from muonsw.lab.studies.scales import MINI, PAPER
from tests.lab.studies.made_runs import parabola, runs_of


def test_the_best_is_that_of_means():
    """The lowest loss of each seed would give 3.0 and 3.0; the lowest mean is at 0.2."""
    lucky = {0.1: [3.0, 3.4], 0.2: [3.3, 3.0]}
    assert best_of_means(lucky) == 0.2
    assert best_gaps(lucky, {0.1: [3.0, 3.0], 0.2: [3.1, 3.1]}) == pytest.approx([0.3, 0.0])


def test_the_vertex_ignores_what_runs_far_from_the_best_do():
    basin = {rate: [parabola(rate, 0.013)] for rate in (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)}
    for lost in (3.5, 6.0, math.inf):
        assert vertex(basin | {0.08: [lost]}) == pytest.approx(0.013)
    assert vertex({0.1: [1.0], 0.2: [2.0], 0.4: [3.0]}) == 0.1


def test_an_edge_is_marked():
    cell = regret()[0]
    runs = runs_of(cell, lambda rule, lam: parabola(lam, 0.2 if rule == "scaled" else 5.0))
    assert [at_edge(losses) for losses in cell.losses(runs).values()] == [True, False]
    constant, scaled = grid_table([cell], {cell.key: runs}).rows
    assert (constant[2], scaled[2]) == ("0.8*", "0.2")


@pytest.mark.parametrize(("better", "verdict"), [("scaled", "holds"), ("constant", "fails")])
def test_claims_tell_a_rule_that_ends_lower_from_its_opposite(better, verdict):
    """The better rule ends lower at its best and forgives a large lambda; with the rules swapped both claims fail."""
    cell = regret()[1]

    def loss(rule, lam):
        milder = rule == better
        return parabola(lam, 0.1, 0.02 if milder else 0.1) - 0.05 * milder

    claims = {claim.id: claim for claim in judge_cell(cell, runs_of(cell, loss))}
    for id in ("scaled-best", "largest"):
        assert str(claims[f"1600-steps-{id}"].verdict) == verdict
    assert len(grid_charts([cell], {cell.key: runs_of(cell, loss)})[0].curves) == 2


def test_equal_rules_are_undecided():
    cell = regret()[1]
    claims = judge_cell(cell, runs_of(cell, lambda _, lam: parabola(lam, 0.1)))
    assert {str(claim.verdict) for claim in claims} == {"undecided"}


def test_rules_over_rates_are_held_against_constant_decay():
    cell = rate_drift()[0]
    claims = judge_cell(cell, runs_of(cell, lambda rule, lr: parabola(lr, 0.02) + 0.1 * (rule == "hyperball")))
    assert {claim.id: str(claim.verdict) for claim in claims} == {
        "width-64-scaled-best": "undecided",
        "width-64-hyperball-best": "fails",
    }


def test_a_run_that_diverged_counts_as_worst():
    cell = sweep("x", regret()[0].run, (0.1, 0.2))
    runs = runs_of(cell, lambda _rule, lam: 3.0 + lam)
    name = next(iter(runs))
    runs[name] = [replace(run, result={"diverged": 7}) for run in runs[name]]
    assert cell.losses(runs)["constant"][0.1] == [math.inf, math.inf]
    assert best_of_means(cell.losses(runs)["constant"]) == 0.2


# The paper's sweeps of AdamW's learning rate.


def swept(cells, optima, seeds=2):
    """Runs of a sweep whose best rates are known, by the key of each cell."""
    return {cell.key: runs_of(cell, lambda _, lr, best=optima[cell.key]: parabola(lr, best), seeds) for cell in cells}


def test_width_transfer_is_distinguished_from_its_absence():
    first, second, _ = width_cells(MINI)
    cells = [first, second]

    def judged(last, seeds=2):
        runs = swept(cells, {first.key: 0.03, second.key: last}, seeds)
        (claim,) = judge_widths(cells, runs, replace(MINI, seeds=seeds))
        return claim

    assert judged(0.02).holds
    assert ONE_SEED in judged(0.02, seeds=1).limits
    moved = judged(0.0085)
    assert moved.measured == pytest.approx(math.log2(0.03 / 0.0085))
    assert moved.fails
    assert judged(0.5).fails, "an edge says nothing about transfer"
    assert judge_widths([first], swept([first], {first.key: 0.02}), MINI) == []


def test_the_printed_sweep_judges_itself_true():
    cells = width_cells(PAPER)
    runs = {}
    for cell in cells:
        printed = dict(zip(paper.SWEEP_RATES, paper.SWEEP[cell.run.decoder.width], strict=True))
        runs[cell.key] = runs_of(cell, lambda _, lr, printed=printed: printed[lr], seeds=1)
    claims = judge_widths(cells, runs, PAPER)
    assert all(claim.holds for claim in claims), [claim.id for claim in claims if not claim.holds]
    assert sum("lr" in claim.id for claim in claims) == 24


@pytest.mark.parametrize(("power", "holds"), [(-1 / 3, True), (0.0, False), (-1.0, False)])
def test_the_cube_root_rule_is_distinguished_from_others(power, holds):
    cells = horizon_cells(MINI)
    runs = swept(cells, {cell.key: 0.02 * (cell.run.steps / 1000) ** power for cell in cells})
    (claim,) = judge_horizons(cells, runs, MINI)
    assert claim.measured == pytest.approx(power, abs=1e-6)
    assert claim.holds is holds
    assert judge_horizons(cells[:1], runs, MINI) == []
    (at_edge,) = judge_horizons(cells, swept(cells, {cell.key: 0.5 for cell in cells}), MINI)
    assert at_edge.fails
    assert grid_table(cells, runs).rows[0][1] == "adamw"
