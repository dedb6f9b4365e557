"""The page of evidence says what the records say."""

import json
import math
import runpy
from pathlib import Path

import pytest

from muonsw.lab.studies.training.regret import carried_regret, judge_losses, octaves_within, regrets

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_records_give():
    script = runpy.run_path(str(ROOT / "bench" / "evidence.py"))
    records = [json.loads(line) for line in script["RECORDS"].read_text().splitlines()]
    assert script["page"](records, script["complete"](records)) == script["PAGE"].read_text()


def parabola(best, curvature, floor=2.0):
    """A basin over the logarithm of lambda, on a grid of factors of two."""
    grid = [0.0125 * 2**power for power in range(7)]
    return {lam: floor + curvature * math.log2(lam / best) ** 2 for lam in grid}


def test_a_wider_basin_has_more_octaves():
    narrow, wide = parabola(0.1, 0.01), parabola(0.1, 0.0025)
    assert octaves_within(narrow) == pytest.approx(2.0)
    assert octaves_within(wide) == pytest.approx(4.0)
    assert regrets(wide)[0.1] == 0.0
    assert carried_regret(parabola(0.4, 0.01), parabola(0.1, 0.01)) == pytest.approx(0.04)


def test_claims_tell_a_rule_that_forgives_from_one_that_does_not():
    """Constant decay's best lambda falls with the horizon and its basin is narrow; scaled decay's does neither."""
    losses = {
        "constant": [[parabola(0.4, 0.01)] * 2, [parabola(0.1, 0.01)] * 2],
        "scaled": [[parabola(0.1, 0.002)] * 2, [parabola(0.1, 0.002, floor=1.99)] * 2],
    }
    claims = {claim.id: claim for claim in judge_losses(losses, ["400 updates", "1600 updates"])}
    assert all(claim.holds for claim in claims.values())
    swapped = {"constant": losses["scaled"], "scaled": losses["constant"]}
    assert not any(claim.holds for claim in judge_losses(swapped, ["400 updates", "1600 updates"]))
