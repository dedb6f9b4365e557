"""Training studies: valid at every scale, every run once, and judges that tell a known answer from its opposite."""

import json
import math
import re
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from muonsw.lab import paper
from muonsw.lab.claims.statistics import ONE_SEED
from muonsw.lab.cli import main
from muonsw.lab.errors import UsageError
from muonsw.lab.model import count, preset
from muonsw.lab.plan import cost, run_flops
from muonsw.lab.runs import load_run
from muonsw.lab.studies.arms import Key, decay_factors
from muonsw.lab.studies.catalogue import TRAINING_STUDIES
from muonsw.lab.studies.scales import GPT2_VOCAB, SCALES, find_data
from muonsw.lab.studies.study import conduct
from muonsw.lab.studies.training import best_rules, dynamics, rows, rules, sweeps
from muonsw.lab.train.config import RunConfig
from tests.lab.norm_runs import make_run
from tests.lab.studies.small_comparisons import WILD, by_settings, tiny_scale
from tests.lab.train.small_runs import small_run, tokens

STUDIES = {study.name: study for study in TRAINING_STUDIES}
PAGE = Path(__file__).parents[3] / "docs" / "reproducing.md"
PAPER, MINI, CPU = (SCALES[name] for name in ("paper", "mini", "cpu"))


@cache
def planned(name, scale):
    return STUDIES[name].at(SCALES[scale]).planned()


@pytest.mark.parametrize("scale", ["cpu", "mini"])
def test_the_page_says_how_many_runs_every_study_has(scale):
    page = PAGE.read_text(encoding="utf-8").partition("## Training experiments")[2]
    everything = set()
    for name, study in STUDIES.items():
        *_, cells = re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.M)
        runs, cell = study.at(SCALES[scale]).runs(), cells.split("|")[1 + list(SCALES).index(scale)]
        everything |= set(runs)
        assert f"{len(runs)} runs" in cell or "same" in cell or "those of" in cell or not runs, name
    assert scale != "cpu" or f"all studies together are {len(everything)}" in " ".join(page.split())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_builds_runs_that_can_be_written_and_read_back(name, scale):
    study = STUDIES[name]
    assert set(study.notes) <= set(SCALES)
    comparisons = planned(name, scale)
    assert len({one.key for one in comparisons}) == len(comparisons)
    for one in comparisons:
        assert len({arm.name for arm in one.arms}) == len(one.arms)
        assert len(one.seeds) >= 1
        for arm in one.arms:
            config = one.config(arm, one.seeds[0])
            assert RunConfig.from_data(json.loads(json.dumps(config.as_data()))) == config
    assert bool(comparisons) == (name != "recipes")


@pytest.mark.parametrize("scale", ["cpu", "mini"])
def test_small_studies_stay_within_their_promise_and_below_the_cap_of_a_step(scale):
    chosen = SCALES[scale]
    limit = {"cpu": 0.5, "mini": 1.1}[scale]
    for study in TRAINING_STUDIES:
        assert cost(study.at(chosen).runs()).hours(chosen.tflops, chosen.workers) < limit, study.name
    cap = {"cpu": 0.02, "mini": 0.022}[scale]
    for run in chosen.rows.values():
        for arm in rows.decay_arms(run):
            assert max(decay_factors(run, arm.optimizer)) <= cap * (1 + 1e-9)


def test_paper_scale_is_the_papers_configuration():
    table = {one.key.width: one for one in planned("main-table", "paper")}
    steps = {256: 35_000, 512: 110_000, 768: 223_000, 1024: 376_000}
    peaks = {256: 1e-2, 512: 7e-3, 768: 5.6e-3, 1024: 4.8e-3}
    for width, row in paper.ROWS.items():
        one = table[width]
        arms = {arm.name: arm.optimizer for arm in one.arms}
        assert one.base.model == preset(f"w{width}")
        assert (one.base.steps, one.base.tokens_per_step, one.seeds) == (steps[width], 524_288, (0,))
        assert {(arm.lr, arm.muon_lr, arm.algorithm) for arm in arms.values()} == {(peaks[width], "adam", "muon")}
        assert arms["constant"].weight_decay == arms["scaled"].weight_decay == 0.1
        assert arms["scaled"].peak == "base"
        assert ("scaled, group peak" in arms) == (width > 256)
        assert row.scaled < row.constant
    sweep = {one.key.width: one for one in planned("width-transfer", "paper")}
    assert [arm.optimizer.lr for arm in sweep[128].arms] == list(paper.SWEEP_RATES)
    assert all(arm.optimizer.algorithm == "adamw" for one in sweep.values() for arm in one.arms)
    assert [one.base.steps for one in planned("horizon-transfer", "paper")] == [5_000, 10_000, 20_000]


def test_the_control_decays_as_much_in_total_as_the_scaled_arm_under_either_peak():
    for peak in ("base", "group"):
        run = MINI.rows[512]
        run = replace(run, optimizer=replace(run.optimizer, peak=peak))
        arms = {arm.name: math.fsum(decay_factors(run, arm.optimizer)) for arm in rows.decay_arms(run)}
        assert arms["constant, same total"] == pytest.approx(arms["scaled"], rel=1e-12)
        # A cosine to a tenth takes 0.73 of it; the undivided peak four times less at four times the base width.
        assert arms["scaled"] / arms["constant"] == pytest.approx(0.73 / (4 if peak == "base" else 1), rel=0.02)


def test_costs_follow_closed_forms():
    row = planned("headline", "paper")[0]
    found = cost(row.configs())
    assert (found.runs, found.tokens) == (4, 4 * 376_000 * 524_288)
    sizes = count(preset("w1024"))
    assert found.flops == pytest.approx(found.tokens * sizes.flops_per_token, rel=0.05)
    sweep = planned("width-transfer", "cpu")[1].base
    evaluated = 11 * sweep.data.eval_windows * sweep.model.sequence
    each = count(sweep.model).flops_per_token
    assert run_flops(sweep) == pytest.approx(each * (240 * 1536 + evaluated / 3))
    assert found.hours(2.0, 8) == pytest.approx(found.hours(1.0, 1) / 8)


def test_studies_and_comparisons_share_their_runs():
    table = set(STUDIES["main-table"].at(CPU).runs())
    for name in ("headline", "steady-state", "diagnostics", "widths"):
        assert set(STUDIES[name].at(CPU).runs()) <= table, name
    assert len(table) == 7 * 3
    # The width sweep at the width of the horizons is one of the horizons.
    widths, horizons = (set(STUDIES[name].at(CPU).runs()) for name in ("width-transfer", "horizon-transfer"))
    assert len(widths & horizons) == len(CPU.rates) * CPU.sweep_seeds
    assert len(set(STUDIES["dense-moe"].at(CPU).runs()) & table) == 9


def test_a_study_from_training_to_page(tmp_path):
    study = STUDIES["decay-sweep"].at(tiny_scale())
    (tmp_path / "out").mkdir()
    report = conduct(study, by_settings(tmp_path / "runs"), tmp_path / "out", images=False)
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2 * 3
    data = json.loads((tmp_path / "out" / "claims.json").read_text(encoding="utf-8"))
    assert data["claims_total"] == len(report.all_claims) == 3
    assert data["claims_failed"] == sum(claim.fails for claim in report.all_claims)
    order = ["fails", "undecided", "holds"]
    verdicts = [order.index(claim["verdict"]) for claim in data["claims"]]
    assert verdicts == sorted(verdicts)
    (sweep,) = data["comparisons"]
    assert sweep["seeds"] == [0]
    losses = {arm["name"]: arm["final"][0] for arm in sweep["arms"]}
    lowest = [min(loss for name, loss in losses.items() if name.startswith(rule)) for rule in ("scaled", "constant")]
    gap = next(claim for claim in data["claims"] if claim["id"] == "best-loss")
    assert gap["measured"] == pytest.approx(lowest[0] - lowest[1])
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Final loss by lambda" in page
    stamps = {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs}
    again = conduct(study, by_settings(tmp_path / "runs"), tmp_path / "out", images=False)
    assert {run: (run / "metrics.jsonl").stat().st_mtime_ns for run in runs} == stamps
    assert again.claims == report.claims


@pytest.mark.slow
def test_the_headline_runs_serve_three_studies_and_their_figures(tmp_path):
    scale, shop = tiny_scale(seeds=1), by_settings(tmp_path / "runs")
    for name in ("headline", "steady-state", "diagnostics"):
        (tmp_path / name).mkdir()
        report = conduct(STUDIES[name].at(scale), shop, tmp_path / name, images=False)
        claims = report.all_claims
        assert len({claim.id for claim in claims}) == len(claims)
        assert any(path.suffix == ".svg" and "figures" in path.parts for path in report.paths)
        assert all("one seed" in claim.limits for claim in claims)
        assert "One seed" in report.sentence
    assert len(list((tmp_path / "runs").iterdir())) == 3
    judged = dynamics.judge_steady_state(shop.train(rows.headline_row(scale)), scale)
    recursion = {claim.id: claim for claim in judged}["constant-recursion"]
    # Every update was sampled, so the recursion is exact up to the first update's norm and rounding.
    assert recursion.measured == pytest.approx(1.0, rel=1e-3)


@pytest.mark.slow
def test_every_decay_rule_can_be_compared_without_decay_too(tmp_path):
    report = conduct(
        STUDIES["decay-rules"].at(tiny_scale(seeds=1)), by_settings(tmp_path / "runs"), tmp_path, images=False
    )
    table = report.tables[1]
    places = [column.title for column in table.headings()]
    none = next(row for row in table.rows if row[0] == "none")
    assert none[places.index("total decay")] == 0
    claims = {claim.id: claim for claim in report.all_claims}
    assert claims["none-norm"].measured > 0, "the norm of all weights, which is recorded without decay too"
    assert claims["squared-is-scaled"].measured == pytest.approx(0.0, abs=1e-6)


def test_rules_at_their_best_are_held_against_constant_decay_at_its_own(tmp_path, monkeypatch):
    """Of all candidates a few: what decay takes is not known beforehand of one, and nothing of the other."""
    every = best_rules.candidates
    kept = ("constant", "gradient_norm", "hyperball")
    monkeypatch.setattr(best_rules, "candidates", lambda run: {rule: every(run)[rule][:1] for rule in kept})
    scale = tiny_scale()
    report = conduct(STUDIES["best-rules"].at(scale), by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert {claim.id for claim in report.all_claims} == {f"{rule}-is-as-good" for rule in kept[1:]}
    rows = next(table for table in report.tables if table.name == "best-rules").rows
    assert [row[0] for row in rows] == list(kept)


@pytest.mark.slow
def test_an_arm_that_diverges_takes_its_claims_with_it_and_a_sweep_counts_it_as_worst(tmp_path):
    scale = tiny_scale(rates=(0.01, 0.02, 9.0), seeds=1)
    run = scale.sweep
    scale = replace(scale, sweep=replace(run, diverged=1.0))
    report = conduct(STUDIES["width-transfer"].at(scale), by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert "'lr 9' diverged at update" in report.sentence
    assert [row[-1].text for row in report.tables[0].rows][-1] == "diverged"
    wild = replace(STUDIES["headline"], comparisons=lambda scale: [with_wild(one) for one in rows.headline_row(scale)])
    scale = tiny_scale(seeds=1)
    scale = replace(scale, rows={width: replace(run, diverged=1.0) for width, run in scale.rows.items()})
    report = conduct(wild.at(scale), by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert report.all_claims == []
    assert report.sentence.startswith("No claim is made. 'scaled' diverged at update")


def with_wild(one):
    return replace(one, arms=tuple(replace(WILD, name="scaled") if arm.name == "scaled" else arm for arm in one.arms))


def written(folder, name, *, rule, seed, loss, **settings):
    """A run folder that obeys the recursion, with a known final loss."""
    make_run(folder / name, rule=rule, steps=1500, every=5, **settings)
    path = folder / name / "result.json"
    path.write_text(
        json.dumps({"steps": 1500, "final_loss": loss, "best_loss": loss, "best_step": 1500}), encoding="utf-8"
    )
    run = load_run(folder / name)
    settings = small_run(seed=seed, steps=1500).as_data()
    return replace(
        run, settings={**settings, "optimizer": {**settings["optimizer"], **run.settings["optimizer"]}}
    ).named(rule)


@cache
def pair():
    """Runs of both rules, of which scaled decay ends 0.05 lower, made once for all tests."""
    folder, losses, lam = Path(tempfile.mkdtemp()), {0: 3.0, 1: 3.01, 2: 2.99}, {"lam": 0.7, "lr": 0.02}
    return {
        rule: [
            written(folder, f"{rule}-{seed}", rule=rule, seed=seed, loss=loss - 0.05 * (rule == "scaled"), **lam)
            for seed, loss in losses.items()
        ]
        for rule in ("constant", "scaled")
    }


def verdicts(claims):
    return {claim.id: claim.holds for claim in claims}


def failures(claims):
    return {claim.id for claim in claims if claim.fails}


def test_the_main_effect_is_judged_by_its_interval():
    arms = pair()
    found = rows.judge_pair("x", "here", arms, "table", "")
    assert verdicts(found) == {"x-loss": True, "x-norm": True, "x-kept": True}
    assert found[0].measured == pytest.approx(-0.05)
    assert found[0].interval.method == "95% t, n=3"
    turned = {"constant": arms["scaled"], "scaled": arms["constant"]}
    assert failures(rows.judge_pair("x", "here", turned, "table", "")) == {"x-loss", "x-norm", "x-kept"}
    # One seed of three the other way: the mean is below zero, its interval is not.
    mixed = [*arms["scaled"][:2], replace(arms["scaled"][2], result={"final_loss": 3.03})]
    unsure = rows.judge_pair("x", "here", arms | {"scaled": mixed}, "table", "")[0]
    assert unsure.measured < 0
    assert str(unsure.verdict) == "undecided"
    # The same runs on both sides: nothing moved, so nothing holds.
    same = rows.judge_pair("x", "here", arms | {"scaled": arms["constant"]}, "table", "")
    assert {str(claim.verdict) for claim in same} == {"undecided"}


def test_scaled_decay_is_shown_beside_its_control():
    arms = pair()
    arms = {**arms, rows.CONTROL: [run.named(rows.CONTROL) for run in arms["constant"]]}
    (table,) = rows.control_tables({Key(width=64): arms}, CPU)
    assert [row[:3] for row in table.rows] == [("width 64: scaled", "constant, same total", "-0.0500")]


def test_limits_belong_to_the_scale():
    arms = {Key(width=256): pair()}
    limits = {scale.name: rows.judge_rows(arms, scale)[0].limits for scale in (CPU, PAPER)}
    assert "raised lambda" in limits["cpu"]
    assert limits["paper"] == ""


def test_printed_values_hold_where_they_are_met_and_fail_elsewhere():
    printed = paper.ROWS[1024]

    def with_losses(shift):
        return [
            [replace(run, result={"final_loss": loss + shift, "best_loss": loss + shift})]
            for run, loss in zip((runs[0] for runs in pair().values()), (printed.constant, printed.scaled), strict=True)
        ]

    met = verdicts(rows.judge_printed(1024, *with_losses(0.0)))
    assert met["w1024-gain"]
    assert met["w1024-constant-loss"]
    missed = verdicts(rows.judge_printed(1024, *with_losses(0.2)))
    assert missed["w1024-gain"]
    assert not missed["w1024-constant-loss"]
    assert not missed["w1024-scaled-loss"]


def test_steady_state_and_diagnostics_of_runs_that_obey_the_recursion(tmp_path):
    arms = pair()
    for judge in (dynamics.judge_steady_state, dynamics.judge_diagnostics):
        found = judge({Key(width=64): arms}, CPU)
        assert all(claim.holds for claim in found), [claim.id for claim in found if not claim.holds]
    # Norms that the recorded updates do not explain, and directions that are not orthogonal.
    spoilt = {
        rule: [
            written(tmp_path, f"spoilt-{rule}-{seed}", rule=rule, seed=seed, loss=3.0, lam=0.7, change=spoil)
            for seed in range(2)
        ]
        for rule in ("constant", "scaled")
    }
    assert not verdicts(dynamics.judge_steady_state({Key("x"): spoilt}, CPU))["constant-recursion"]
    bad = verdicts(dynamics.judge_diagnostics({Key("x"): spoilt}, CPU))
    assert not bad["scaled-defect-low"]
    assert not bad["scaled-gradient"]


def spoil(_role, record):
    return record | {"update_rms": 2 * record["update_rms"], "defect": 0.5, "alignment_gradient": 0.3}


def test_late_fits_are_compared_in_the_papers_terms():
    arms = pair()
    found = {claim.id: claim for claim in dynamics.judge_diagnostics({Key("x"): arms}, PAPER)}
    # a = -(memory - 1) s / (2 r): with s = 0.176 eta the slope of the scaled arm is known from its norm.
    run = arms["scaled"][0]
    norm = run.telemetry.scope("decayed")["weight_rms"][-1]
    assert found["scaled-slope"].measured == pytest.approx(38 * 0.176 / (2 * norm), rel=0.1)
    assert found["defect"].holds


def sweep_runs(folder, optimum, *, seeds=2, rates=MINI.rates, name=""):
    """Losses on a parabola over the logarithm of the rate."""
    arms = {}
    for rate in rates:
        arms[f"lr {rate:g}"] = [fake(folder / f"{name}{rate}-{seed}", rate, optimum, seed) for seed in range(seeds)]
    return arms


def fake(path, rate, optimum, seed):
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps(small_run(seed=seed, optimizer={"lr": rate}).as_data()), encoding="utf-8"
    )
    loss = 3.0 + 0.1 * seed + 0.05 * math.log(rate / optimum) ** 2
    (path / "result.json").write_text(json.dumps({"final_loss": loss}), encoding="utf-8")
    return load_run(path)


def test_width_transfer_is_reported_from_its_absence(tmp_path):
    same = {Key(width=w): sweep_runs(tmp_path, 0.02, name=f"{w}-") for w in (128, 256)}
    assert all(claim.holds for claim in sweeps.judge_widths(same, MINI))
    alone = {key: {name: runs[:1] for name, runs in arms.items()} for key, arms in same.items()}
    assert all(ONE_SEED in claim.limits for claim in sweeps.judge_widths(alone, MINI))
    moved = {**same, Key(width=256): sweep_runs(tmp_path, 0.0035, name="moved-")}
    found = verdicts(sweeps.judge_widths(moved, MINI))
    assert not found["same-rate"]
    assert not found["width-256-cost"]
    edge = {**same, Key(width=256): sweep_runs(tmp_path, 0.5, name="edge-")}
    assert not verdicts(sweeps.judge_widths(edge, MINI))["width-256-inside"]
    assert [row[0] for row in sweeps.sweep_tables(same, MINI)[0].rows] == [f"{rate:g}" for rate in MINI.rates]


def test_the_best_rate_is_at_the_bottom_of_the_basin():
    """What runs far from it do, which all but diverge on the side of large rates, says nothing about it."""
    basin = {rate: 3.0 + 0.05 * math.log(rate / 0.013) ** 2 for rate in CPU.rates}
    for lost in (3.5, 6.0, math.inf):
        assert sweeps.vertex(basin | {0.08: lost}) == pytest.approx(0.013)


def test_the_printed_sweep_judges_itself_true(tmp_path):
    rows = {}
    for width, losses in paper.SWEEP.items():
        arms = {}
        for rate, loss in zip(paper.SWEEP_RATES, losses, strict=True):
            run = fake(tmp_path / f"{width}-{rate}", rate, rate, 0)
            arms[f"lr {rate:g}"] = [replace(run, result={"final_loss": loss})]
        rows[Key(width=width)] = arms
    found = sweeps.judge_widths(rows, PAPER)
    assert all(claim.holds for claim in found), [claim.id for claim in found if not claim.holds]
    assert sum("lr" in claim.id for claim in found) == 24


@pytest.mark.parametrize(("power", "holds"), [(-1 / 3, True), (0.0, False), (-1.0, False)])
def test_the_cube_root_rule_is_reported_from_others(tmp_path, power, holds):
    results = {
        Key(steps=steps): sweep_runs(tmp_path, 0.02 * (steps / 1000) ** power, name=f"{steps}-")
        for steps in MINI.horizons
    }
    found = {claim.id: claim for claim in sweeps.judge_horizons(results, MINI)}["cube-root"]
    assert found.measured == pytest.approx(power, abs=1e-6)
    assert found.holds is holds
    (chart,) = sweeps.horizon_charts(results, MINI)
    minima = [curve.x[min(range(len(curve.y)), key=curve.y.__getitem__)] for curve in chart.curves]
    assert len(minima) == len(MINI.horizons)


def test_horizons_and_widths_are_judged_on_what_a_study_under_way_has(tmp_path):
    first, last = (Key(steps=steps) for steps in CPU.horizons[::2])
    results = {
        first: sweep_runs(tmp_path, 0.02, rates=CPU.rates, name="first-"),
        last: sweep_runs(tmp_path, 0.02 * 4 ** (-1 / 3), rates=CPU.rates, seeds=1, name="last-"),
    }
    found = {claim.id: claim for claim in sweeps.judge_horizons(results, CPU)}
    assert found["cube-root"].measured == pytest.approx(-1 / 3, abs=1e-6)
    (inside,) = sweeps.judge_horizons({first: results[first]}, CPU)
    assert inside.id == f"{first.slug}-inside"
    widths = {Key(width=width): arms for width, arms in zip((32, 64), results.values(), strict=True)}
    same = {claim.id: claim for claim in sweeps.judge_widths(widths, CPU)}["same-rate"]
    assert same.limits == f"seed by seed it is 0.67; {ONE_SEED}"


def test_rules_that_are_the_same_under_another_name_decay_alike():
    (one,) = planned("decay-rules", "mini")
    phis = {arm.name: decay_factors(one.base, arm.optimizer) for arm in one.arms}
    assert phis["squared"] == pytest.approx(phis["scaled"], rel=1e-12)
    assert phis["independent"] == pytest.approx(phis["constant"], rel=1e-12)
    assert max(phis["scaled"]) == pytest.approx(max(phis["constant"]))
    assert max(phis["none"]) == 0.0
    assert math.fsum(phis["constant, same total"]) == pytest.approx(math.fsum(phis["scaled"]))


def test_rules_are_judged_against_each_other(tmp_path):
    arms = dict(pair())
    arms |= {"squared": arms["scaled"], "independent": arms["constant"]}
    arms["none"] = [
        written(tmp_path, f"none-{seed}", rule="none", seed=seed, loss=3.1, lam=0.7, lr=0.02) for seed in range(3)
    ]
    assert all(verdicts(rules.judge_rules({rules.EVERY_RULE: arms}, CPU)).values())
    swapped = verdicts(rules.judge_rules({rules.EVERY_RULE: arms | {"squared": arms["constant"]}}, CPU))
    assert not swapped["squared-is-scaled"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["decay-sweep", "width-transfer", "recipes"])
def test_a_dry_run_prints_the_cost_and_trains_nothing(name, scale, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", scale, "--dry-run", "--tflops", "7"]) == 0
    text = capsys.readouterr().out
    assert STUDIES[name].at(SCALES[scale]).how_scaled in " ".join(text.split())
    assert "7 TFLOP/s" in text
    total = next(line for line in text.splitlines() if line.startswith("all, shared runs once"))
    assert f" {cost(STUDIES[name].at(SCALES[scale]).runs()).runs} " in total
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_theory_and_a_scale_it_does_not_have(capsys):
    assert main(["reproduce", "theory", "--scale", "mini", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "one size" in text
    assert "10 experiments" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["main-table", "--scale", "paper"], "needs --data DIR with GPT-2 tokens"),
        (["main-table", "--seeds", "0"], "--seeds must be at least 1"),
        (["main-table", "--workers", "0"], "--workers must be at least 1"),
        (["main-table", "--tflops", "0", "--dry-run"], "--tflops must be above zero"),
        (["main-tabel"], "did you mean 'main-table'"),
        (["main-table/width-256"], "has no part 'width-256'"),
    ],
)
def test_usage_errors_of_training_studies(arguments, message, tmp_path, capsys):
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "study")]) == 2
    assert message in capsys.readouterr().err


def test_paper_scale_refuses_other_tokens():
    assert PAPER.vocab == GPT2_VOCAB
    with pytest.raises(UsageError, match="needs GPT-2 tokens"):
        find_data(PAPER, Path(tokens()))
    assert find_data(CPU, Path(tokens())) == Path(tokens())


def test_the_command_runs_a_tiny_study_and_its_exit_code_tells_a_failed_claim(tmp_path, monkeypatch, capsys):
    # A grid of one rate has its best at an edge: that claim cannot hold.
    monkeypatch.setattr("muonsw.lab.commands.reproduce.SCALES", {"cpu": tiny_scale(rates=(0.01,))})
    arguments = ["--out", str(tmp_path / "h"), "--workers", "1", "--device", "cpu", "--data", tokens()]
    assert main(["reproduce", "horizon-transfer", *arguments]) == 1
    data = json.loads((tmp_path / "h" / "claims.json").read_text(encoding="utf-8"))
    assert data["claims_failed"] >= 2
    assert data["claims"][0]["verdict"] == "fails"
    assert len(list((tmp_path / "runs-cpu").iterdir())) == 2
    printed_text = capsys.readouterr().out
    assert "Final loss by learning rate" in printed_text
    assert "claims FAILED" in printed_text
    assert f"wrote claims.json, report.html and 18 figures to {tmp_path / 'h'}; runs are in" in printed_text


def test_recipes_need_no_data_at_any_scale(tmp_path, capsys):
    assert main(["reproduce", "recipes", "--scale", "paper", "--out", str(tmp_path / "r")]) == 0
    assert "All 14 claims hold" in capsys.readouterr().out
    assert not (tmp_path / "runs-paper").exists()
