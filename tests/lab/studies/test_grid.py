"""Grids: the best of means, edges, and generic claims that tell the rules apart."""

import json
import math
from dataclasses import replace

import pytest

from muonsw.lab.arms import Key
from muonsw.lab.studies.catalogue import GRIDS, best_rules, over_lambda, rate_drift, regret
from muonsw.lab.studies.grid import at_edge, best_gaps, best_of_means, grid_charts, grid_table, judge_cell, vertex
from muonsw.lab.studies.scales import MINI
from tests.lab.studies.made_runs import parabola, runs_of
from tests.lab.studies.small_comparisons import by_settings, tiny_scale


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


def test_an_edge_is_marked_and_its_total_is_not_judged():
    cell = regret(MINI)[0]
    runs = runs_of(cell, lambda rule, lam: parabola(lam, 0.2 if rule == "scaled" else 5.0))
    assert [at_edge(own) for own in cell.losses(runs).values()] == [True, False]
    ids = {claim.id for claim in judge_cell(cell, runs)}
    assert ids == {"400-steps-scaled-best", "400-steps-largest", "400-steps-scaled-total"}
    constant, scaled = grid_table([cell], {cell.key: runs}).rows
    assert (constant[2], scaled[2]) == ("0.8*", "0.2")


@pytest.mark.parametrize(("better", "verdict"), [("scaled", "holds"), ("constant", "fails")])
def test_claims_tell_a_rule_that_ends_lower_from_its_opposite(better, verdict):
    """The better rule ends lower at its best and forgives a large lambda; with the rules swapped both claims fail."""
    cell = regret(MINI)[1]
    total = cell.total("constant", 0.1) / 0.1

    def loss(rule, lam):
        milder = rule == better
        return parabola(lam, 1.2 / total, 0.02 if milder else 0.1) - 0.05 * milder

    claims = {claim.id: claim for claim in judge_cell(cell, runs_of(cell, loss))}
    for id in ("scaled-best", "largest"):
        assert str(claims[f"1600-steps-{id}"].verdict) == verdict
    # A total decay of 1.2 is within a factor of two of 1.
    assert claims["1600-steps-constant-total"].measured == pytest.approx(math.log2(1.2), abs=0.01)
    assert claims["1600-steps-constant-total"].holds
    assert len(grid_charts([cell], {cell.key: runs_of(cell, loss)})[0].curves) == 2


def test_a_best_lambda_with_another_total_fails():
    cell = regret(MINI)[1]
    unit = cell.total("scaled", 0.1) / 0.1
    claims = {c.id: c for c in judge_cell(cell, runs_of(cell, lambda _, lam: parabola(lam, 5 / unit)))}
    assert claims["1600-steps-scaled-total"].fails
    same = {c.id: str(c.verdict) for c in judge_cell(cell, runs_of(cell, lambda _, lam: parabola(lam, 0.1)))}
    assert same["1600-steps-scaled-best"] == "undecided", "equal rules do not differ"


def test_rules_over_rates_are_held_against_constant_decay():
    cell = rate_drift(MINI)[0]
    claims = judge_cell(cell, runs_of(cell, lambda rule, lr: parabola(lr, 0.02) + 0.1 * (rule == "hyperball")))
    assert {claim.id: str(claim.verdict) for claim in claims} == {
        "width-64-scaled-best": "undecided",
        "width-64-hyperball-best": "fails",
    }


def test_a_rule_without_a_known_total_and_one_without_lambda_are_shown():
    (cell,) = best_rules(MINI)
    runs = runs_of(cell, lambda _, value: parabola(value or 1.0, 0.1))
    shown = {row[1]: row for row in grid_table([cell], {cell.key: runs}).rows}
    assert shown["gradient_norm"][3] is None
    assert shown["none"][3] == "0.00"
    assert shown["hyperball"][2] == "0.04*"


def test_a_grid_from_training_to_page(tmp_path):
    study = next(study for study in GRIDS if study.name == "regret").at(tiny_scale())
    (tmp_path / "out").mkdir()
    report = study.conduct(by_settings(tmp_path / "runs"), tmp_path / "out", images=False)
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 * 2 * 2
    data = json.loads((tmp_path / "out" / "claims.json").read_text(encoding="utf-8"))
    assert data["claims_total"] == len(report.claims["regret"]) == 2 * 2
    first = data["comparisons"][0]
    losses = {arm["name"]: arm["final"][0] for arm in first["arms"]}
    lowest = [min(loss for name, loss in losses.items() if name.startswith(rule)) for rule in ("scaled", "constant")]
    gap = next(claim for claim in data["claims"] if claim["id"] == "4-steps-scaled-best")
    assert gap["measured"] == pytest.approx(lowest[0] - lowest[1])
    assert "Each rule at its best" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    stamps = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs}
    again = study.conduct(by_settings(tmp_path / "runs"), tmp_path / "out", images=False)
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs} == stamps
    assert again.claims == report.claims


def test_a_run_that_diverged_counts_as_worst():
    run = regret(MINI)[0].run
    cell = over_lambda(Key("x"), run, (0.1, 0.2))
    runs = runs_of(cell, lambda _rule, lam: 3.0 + lam)
    name = next(iter(runs))
    runs[name] = [replace(one, result={"diverged": 7}) for one in runs[name]]
    assert cell.losses(runs)["constant"][0.1] == [math.inf, math.inf]
    assert best_of_means(cell.losses(runs)["constant"]) == 0.2
