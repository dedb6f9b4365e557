"""The paper's main table and its diagnostics: configuration, controls, and judges that tell the rules apart."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from muonsw.lab import paper
from muonsw.lab.compare import decay_factors
from muonsw.lab.model import preset
from muonsw.lab.runs import Run, tabulate
from muonsw.lab.studies import main_table
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.scales import SCALES
from tests.lab.made_runs import make_history
from tests.lab.studies.made_runs import pair, verdicts, written
from tests.lab.studies.small_comparisons import QUIET, tiny_scale, train_in

PAPER, MINI, CPU = (SCALES[name] for name in ("paper", "mini", "cpu"))


def planned(name, scale):
    return STUDIES[name].comparisons(SCALES[scale])


def test_paper_scale_is_the_papers_configuration():
    table = {comparison.base.decoder.width: comparison for comparison in planned("main-table", "paper")}
    steps = {256: 35_000, 512: 110_000, 768: 223_000, 1024: 376_000}
    peaks = {256: 1e-2, 512: 7e-3, 768: 5.6e-3, 1024: 4.8e-3}
    for width, row in paper.ROWS.items():
        run, arms = table[width].base, {arm.name: arm.optimizer for arm in table[width].arms}
        assert run.model == preset(f"w{width}")
        assert (run.steps, run.tokens_per_step, table[width].seeds) == (steps[width], 524_288, (0,))
        assert {(arm.lr, arm.muon_lr, arm.algorithm) for arm in arms.values()} == {(peaks[width], "adam", "muon")}
        assert arms["constant"].weight_decay == arms["scaled"].weight_decay == 0.1
        assert arms["scaled"].peak == "base"
        assert ("scaled, group peak" in arms) == (width > 256)
        assert row.scaled < row.constant
    for comparison in planned("width-transfer", "paper"):
        assert [arm.optimizer.lr for arm in comparison.arms] == list(paper.SWEEP_RATES)
        assert {arm.optimizer.algorithm for arm in comparison.arms} == {"adamw"}
    horizons = [comparison.base.steps for comparison in planned("horizon-transfer", "paper")]
    assert horizons == [5_000, 10_000, 20_000]


def test_the_control_decays_as_much_in_total_as_the_scaled_arm_under_either_peak():
    for peak in ("base", "group"):
        run = MINI.rows[512]
        run = replace(run, optimizer=replace(run.optimizer, peak=peak))
        arms = {arm.name: math.fsum(decay_factors(run, arm.optimizer)) for arm in main_table.decay_arms(run)}
        assert arms["constant, same total"] == pytest.approx(arms["scaled"], rel=1e-12)
        # Under a cosine to a tenth, scaled decay has 0.73 of constant decay's total; the undivided peak divides that by
        # four at four times the base width.
        assert arms["scaled"] / arms["constant"] == pytest.approx(0.73 / (4 if peak == "base" else 1), rel=0.02)
        assert arms["constant, group peak's total"] == pytest.approx(arms["scaled, group peak"], rel=1e-12)
    for scale, cap in ((CPU, 0.02), (MINI, 0.022)):
        for run in scale.rows.values():
            assert all(max(decay_factors(run, arm.optimizer)) <= cap * (1 + 1e-9) for arm in main_table.decay_arms(run))


def test_the_main_effect_is_judged_by_its_interval():
    arms = pair()

    def judged(**changed):
        return main_table.judge_rows({"width 32": arms | changed}, CPU)

    claims = judged()
    assert verdicts(claims) == {"w32-loss": True, "w32-norm": True, "w32-kept": True}
    assert claims[0].measured == pytest.approx(-0.05)
    assert claims[0].interval.method == "95% t, n=3"
    assert all(claim.fails for claim in judged(constant=arms["scaled"], scaled=arms["constant"]))
    # One seed of three the other way: the mean is below zero, its interval is not.
    mixed = [*arms["scaled"][:2], replace(arms["scaled"][2], result={"final_loss": 3.03})]
    unsure = judged(scaled=mixed)[0]
    assert unsure.measured < 0
    assert str(unsure.verdict) == "undecided"
    # The same runs on both sides: nothing moved, so nothing holds.
    assert {str(claim.verdict) for claim in judged(scaled=arms["constant"])} == {"undecided"}


@pytest.mark.parametrize(("better", "verdict"), [("scaled", "holds"), ("constant", "fails")])
def test_each_form_of_scaled_decay_is_judged_next_to_its_control(better, verdict):
    arms = pair() if better == "scaled" else {"constant": pair()["scaled"], "scaled": pair()["constant"]}
    arms = {
        "constant": arms["constant"],
        "scaled": arms["scaled"],
        "scaled, group peak": arms["scaled"],
        "constant, same total": arms["constant"],
        "constant, group peak's total": arms["constant"],
    }
    arms = {name: [run.named(name) for run in runs] for name, runs in arms.items()}
    judged = main_table.judge_rows({"width 32": arms}, CPU)
    assert main_table.SMALLER in judged[0].limits
    claims = {claim.id: str(claim.verdict) for claim in judged}
    assert (claims["w32-control"], claims["w32-group-control"]) == (verdict, verdict)
    assert (claims["w32-group-loss"], claims["w32-group-norm"]) == (verdict, verdict)


def test_printed_values_hold_where_they_are_met_and_fail_elsewhere():
    printed = paper.ROWS[1024]

    def with_losses(shift):
        return [
            [replace(run, result={"final_loss": loss + shift, "best_loss": loss + shift})]
            for run, loss in zip((runs[0] for runs in pair().values()), (printed.constant, printed.scaled), strict=True)
        ]

    ids = ("w1024-gain", "w1024-constant-loss", "w1024-scaled-loss")
    for shift, expected in ((0.0, [True, True, True]), (0.2, [True, False, False])):
        held = verdicts(main_table.judge_printed(1024, *with_losses(shift)))
        assert [held[id] for id in ids] == expected


# Steady state and diagnostics.


def test_claims_hold_for_runs_that_obey_the_recursion_and_fail_for_others(tmp_path):
    for judge in (main_table.judge_steady_state, main_table.judge_diagnostics):
        claims = judge({"width 32": pair()}, CPU)
        assert all(claim.holds for claim in claims), [claim.id for claim in claims if not claim.holds]

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
    assert not verdicts(main_table.judge_steady_state({"x": spoilt}, CPU))["constant-recursion"]
    bad = verdicts(main_table.judge_diagnostics({"x": spoilt}, CPU))
    assert not bad["scaled-defect-low"]
    assert not bad["scaled-gradient"]
    swapped = {"constant": pair()["scaled"], "scaled": pair()["constant"]}
    assert not verdicts(main_table.judge_steady_state({"x": swapped}, CPU))["separation"]


def test_late_fits_are_compared_in_the_papers_terms():
    arms = pair()
    claims = {claim.id: claim for claim in main_table.judge_diagnostics({"x": arms}, PAPER)}
    # a = -(memory - 1) s / (2 r): with s = 0.176 eta the slope of the scaled arm is known from its norm.
    norm = arms["scaled"][0].scope("decayed")["weight_rms"][-1]
    assert claims["scaled-slope"].measured == pytest.approx(38 * 0.176 / (2 * norm), rel=0.1)
    assert claims["defect"].holds


def test_the_papers_late_fits_are_recovered(tmp_path):
    def fits(name, offset, slope, **settings):
        change = lambda _role, record: record | {"alignment_update": -offset - slope * record["lr"]}  # noqa: E731
        return main_table.late_fits(make_history(tmp_path / name, lr=4.8e-3, change=change, **settings))

    line = fits("line", 7.4e-3, 40.5, steps=1000, every=5)
    assert (line.offset, line.slope) == pytest.approx((7.4e-3, 40.5), rel=1e-9)
    history = make_history(tmp_path / "late", steps=1000, every=5)
    assert history.steps[main_table.late(history)][0] == pytest.approx(1000 * (1 - 50 / 376), abs=5)
    assert fits("origin", 0.0, 20.8, steps=1000, every=5).k == pytest.approx(20.8, rel=1e-9)
    assert math.isnan(fits("flat", 0.0, 20.8, final=1.0, steps=500, every=5).k)
    assert math.isnan(fits("few", 0.0, 20.8, steps=200, every=50).k)


@pytest.mark.slow
def test_the_same_runs_serve_both_studies_and_their_figures(tmp_path):
    scale, train = tiny_scale(seeds=1), train_in(tmp_path / "runs")
    for name in ("steady-state", "diagnostics"):
        (tmp_path / name).mkdir()
        report = STUDIES[name].conduct(tmp_path / name, scale, console=QUIET, train=train)
        (claims,) = report.claims.values()
        assert len({claim.id for claim in claims}) == len(claims)
        assert any(path.suffix == ".svg" and "figures" in path.parts for path in report.paths)
        assert all("one seed" in claim.limits for claim in claims)
        assert "One seed" in report.sentence
    assert len(list((tmp_path / "runs").iterdir())) == 2
    judged = main_table.judge_steady_state(train(main_table.headline_row(scale)), scale)
    recursion = {claim.id: claim for claim in judged}["constant-recursion"]
    # Every step was sampled, so the recursion is exact up to the first step's norm and rounding.
    assert recursion.measured == pytest.approx(1.0, rel=1e-3)


def test_steps_to_match_interpolates_between_evaluations():
    def run(*evals):
        return Run(
            "", Path(), {}, {}, None, tabulate({"kind": "eval", "step": step, "loss": loss} for step, loss in evals)
        )

    baseline = run((0, 5.0), (50, 3.0), (100, 3.2))
    assert main_table.steps_to_match(baseline, run((0, 5.0), (20, 4.0), (40, 2.0))) == pytest.approx(30 / 50)
    assert main_table.steps_to_match(baseline, run((0, 5.0), (100, 3.1))) is None
    assert main_table.steps_to_match(baseline, run((10, 2.0), (20, 1.0))) == 10 / 50
    assert main_table.steps_to_match(run(), baseline) is None
