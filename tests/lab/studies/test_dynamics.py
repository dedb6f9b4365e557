"""Steady state and diagnostics: claims hold for runs that obey the recursion, and fail for runs that do not."""

import pytest

from muonsw.lab.arms import Key
from muonsw.lab.studies import dynamics
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.main_table import sampled_row
from muonsw.lab.studies.scales import SCALES
from tests.lab.studies.made_runs import pair, written
from tests.lab.studies.small_comparisons import by_settings, tiny_scale

PAPER, CPU = SCALES["paper"], SCALES["cpu"]


def verdicts(claims):
    return {claim.id: claim.holds for claim in claims}


def test_claims_hold_for_runs_that_obey_the_recursion_and_fail_for_others(tmp_path):
    for judge in (dynamics.judge_steady_state, dynamics.judge_diagnostics):
        found = judge({Key(width=64): pair()}, CPU)
        assert all(claim.holds for claim in found), [claim.id for claim in found if not claim.holds]

    def spoil(_role, record):
        """Norms that the recorded updates do not explain, and directions that are not orthogonal."""
        return record | {"update_rms": 2 * record["update_rms"], "defect": 0.5, "alignment_gradient": 0.3}

    spoilt = {
        rule: [
            written(tmp_path, f"{rule}-{seed}", rule=rule, seed=seed, loss=3.0, lam=0.7, change=spoil)
            for seed in range(2)
        ]
        for rule in ("constant", "scaled")
    }
    assert not verdicts(dynamics.judge_steady_state({Key("x"): spoilt}, CPU))["constant-recursion"]
    bad = verdicts(dynamics.judge_diagnostics({Key("x"): spoilt}, CPU))
    assert not bad["scaled-defect-low"]
    assert not bad["scaled-gradient"]
    swapped = {"constant": pair()["scaled"], "scaled": pair()["constant"]}
    assert not verdicts(dynamics.judge_steady_state({Key("x"): swapped}, CPU))["separation"]


def test_late_fits_are_compared_in_the_papers_terms():
    arms = pair()
    found = {claim.id: claim for claim in dynamics.judge_diagnostics({Key("x"): arms}, PAPER)}
    # a = -(memory - 1) s / (2 r): with s = 0.176 eta the slope of the scaled arm is known from its norm.
    norm = arms["scaled"][0].telemetry.scope("decayed")["weight_rms"][-1]
    assert found["scaled-slope"].measured == pytest.approx(38 * 0.176 / (2 * norm), rel=0.1)
    assert found["defect"].holds


@pytest.mark.slow
def test_the_same_runs_serve_both_studies_and_their_figures(tmp_path):
    scale, shop = tiny_scale(seeds=1), by_settings(tmp_path / "runs")
    for name in ("steady-state", "diagnostics"):
        (tmp_path / name).mkdir()
        report = STUDIES[name].at(scale).conduct(shop, tmp_path / name, images=False)
        (claims,) = report.claims.values()
        assert len({claim.id for claim in claims}) == len(claims)
        assert any(path.suffix == ".svg" and "figures" in path.parts for path in report.paths)
        assert all("one seed" in claim.limits for claim in claims)
        assert "One seed" in report.sentence
    assert len(list((tmp_path / "runs").iterdir())) == 2
    judged = dynamics.judge_steady_state(shop.train(sampled_row(scale)), scale)
    recursion = {claim.id: claim for claim in judged}["constant-recursion"]
    # Every step was sampled, so the recursion is exact up to the first step's norm and rounding.
    assert recursion.measured == pytest.approx(1.0, rel=1e-3)
