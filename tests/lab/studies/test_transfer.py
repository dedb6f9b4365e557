"""Transfer of the learning rate: judges that tell a rate that stays from one that moves, and the paper's own table."""

import pytest

from muonsw.lab import paper
from muonsw.lab.arms import Key
from muonsw.lab.stats import ONE_SEED
from muonsw.lab.studies.scales import SCALES
from muonsw.lab.studies.transfer import excess_chart, judge_horizons, judge_widths, sweep_table
from tests.lab.studies.made_runs import parabola

PAPER, MINI = SCALES["paper"], SCALES["mini"]


def sweep(optimum, seeds=2):
    return {rate: [parabola(rate, optimum) + 0.1 * seed for seed in range(seeds)] for rate in MINI.rates}


def verdicts(claims):
    return {claim.id: claim.holds for claim in claims}


def test_width_transfer_is_told_from_its_absence():
    same = {Key(width=width): sweep(0.02) for width in (128, 256)}
    assert all(claim.holds for claim in judge_widths(same, MINI))
    alone = judge_widths({key: {rate: own[:1] for rate, own in one.items()} for key, one in same.items()}, MINI)
    assert all(ONE_SEED in claim.limits for claim in alone)
    moved = verdicts(judge_widths({**same, Key(width=256): sweep(0.0035)}, MINI))
    assert not moved["same-rate"]
    assert not moved["width-256-cost"]
    assert not verdicts(judge_widths({**same, Key(width=256): sweep(0.5)}, MINI))["width-256-inside"]
    assert [row[0] for row in sweep_table(same).rows] == [f"{rate:g}" for rate in MINI.rates]
    assert verdicts(judge_widths({Key(width=128): sweep(0.02)}, MINI)) == {"width-128-inside": True}


def test_the_printed_sweep_judges_itself_true():
    sweeps = {
        Key(width=width): {rate: [loss] for rate, loss in zip(paper.SWEEP_RATES, losses, strict=True)}
        for width, losses in paper.SWEEP.items()
    }
    found = judge_widths(sweeps, PAPER)
    assert all(claim.holds for claim in found), [claim.id for claim in found if not claim.holds]
    assert sum("lr" in claim.id for claim in found) == 24


@pytest.mark.parametrize(("power", "holds"), [(-1 / 3, True), (0.0, False), (-1.0, False)])
def test_the_cube_root_rule_is_told_from_others(power, holds):
    sweeps = {Key(steps=steps): sweep(0.02 * (steps / 1000) ** power) for steps in MINI.horizons}
    found = {claim.id: claim for claim in judge_horizons(sweeps, MINI)}["cube-root"]
    assert found.measured == pytest.approx(power, abs=1e-6)
    assert found.holds is holds
    assert len(excess_chart(sweeps, MINI.horizons[0]).curves) == len(MINI.horizons)
    first = dict(list(sweeps.items())[:1])
    assert [claim.id for claim in judge_horizons(first, MINI)] == [f"{MINI.horizons[0]}-steps-inside"]
