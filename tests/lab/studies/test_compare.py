"""Comparisons: paired by seed, no bolder than their numbers, and clear about arms that diverged."""

import html
import json
import math
import shutil
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest
import torch

from muonsw.decay import DECAY_RULES
from muonsw.lab.advise import more_decay
from muonsw.lab.claims.claim import Interval
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.cli import main
from muonsw.lab.data.documents import MarkovSource
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.recipes import IDLE
from muonsw.lab.runs import load_run
from muonsw.lab.studies.arms import CONTROL, Arm, decay_factors, parse_arm, same_total
from muonsw.lab.studies.compare import CompareStudy, advise_arm, effects, verdict
from muonsw.lab.studies.outcome import (
    ArmOutcome,
    Outcome,
    PairOutcome,
    arms_table,
    compare,
    first_crossing,
    pairs_table,
    steps_to_match,
)
from muonsw.lab.studies.study import conduct
from muonsw.lab.studies.tuning import FACTORS, SEARCH, sweep_table, tune
from muonsw.lab.train.config import OptimizerConfig, ScheduleConfig
from muonsw.lab.train.presets import with_data
from muonsw.presets import PRESETS
from tests.lab.studies.small_comparisons import ARMS, KEY, WILD, by_arm, comparison, tiny_run
from tests.lab.train.small_runs import small_run, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def runs(folder):
    """Two arms with three seeds."""
    return by_arm(folder / "runs").train([comparison()])[KEY]


@pytest.fixture(scope="module")
def study():
    return CompareStudy(tiny_run(), ARMS, 3, "a title", claims=True)


def test_arms_share_weights_and_batches_and_differ_in_decay_alone(runs):
    for constant, scaled in zip(runs["constant"], runs["scaled"], strict=True):
        # the rules are the same at the peak, and the first update of a warmup decays by next to nothing
        assert constant.evals["loss"][0] == scaled.evals["loss"][0]
        assert constant.train["cross_entropy"][0] == scaled.train["cross_entropy"][0]
        assert constant.train["loss"][-1] != scaled.train["loss"][-1]
    for one, other in pairwise(runs["constant"]):
        assert one.evals["loss"][0] != other.evals["loss"][0]


def test_a_comparison_is_paired_by_seed(runs):
    outcome = compare(runs)
    (pair,) = outcome.pairs
    finals = {name: [run.result["final_loss"] for run in those] for name, those in runs.items()}
    by_hand = [b - a for a, b in zip(finals["constant"], finals["scaled"], strict=True)]
    assert pair.differences == pytest.approx(by_hand, abs=1e-15)
    assert pair.mean == pytest.approx(sum(by_hand) / 3, abs=1e-15)
    assert pair.interval == t_interval(torch.tensor(by_hand, dtype=torch.float64))


@pytest.mark.usefixtures("runs")
def test_a_finished_comparison_is_written_and_not_run_again(folder, study):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    report = conduct(study, by_arm(folder / "runs"), folder, images=False)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before
    data = json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    assert data["verdict"] == report.sentence
    assert [claim["id"] for claim in data["claims"]] == ["loss", "norm"] == [claim.id for claim in claims_of(report)]
    assert report.paths == [folder / "outcome.json", folder / "report.html"]
    assert "scaled" in (folder / "report.html").read_text(encoding="utf-8")


def claims_of(report):
    return report.claims["comparison"]


def test_numbers_that_cannot_be_written_are_named_before_anything_is_trained(study, tmp_path):
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(UsageError, match=r"outcome\.json is a folder"):
        conduct(study, by_arm(tmp_path / "runs"), tmp_path, images=False)
    assert not (tmp_path / "runs").exists()


def test_the_numbers_of_a_tuned_comparison_outlast_one_that_is_not_tuned(study, tmp_path):
    plain = replace(study, base=tiny_run(steps=2), seeds=1)
    conduct(replace(plain, tune_lambda=True), by_arm(tmp_path / "runs"), tmp_path, images=False)
    tuned = (tmp_path / "outcome.json").read_bytes()
    for _ in range(2):
        conduct(plain, by_arm(tmp_path / "runs"), tmp_path, images=False)
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("outcome*")}
    assert kept.keys() == {"outcome.json", "outcome.json.1"}, "the same comparison again replaces its own numbers"
    assert kept["outcome.json.1"] == tuned != kept["outcome.json"]


def test_text_that_is_replaced_while_arms_are_trained_is_noticed(tmp_path):
    data = shutil.copytree(tokens(), tmp_path / "data")
    base = with_data(tiny_run(steps=2), data)
    by_arm(tmp_path / "runs").train([replace(comparison(ARMS[:1]), base=base, seeds=(0,))])
    shutil.rmtree(data)
    prepare(islice(MarkovSource(seed=1), 60), ByteTokenizer(), data, validation_fraction=0.2)
    with pytest.raises(UsageError, match="holds other tokens"):
        by_arm(tmp_path / "runs").train([replace(comparison(ARMS[1:]), base=base, seeds=(0,))])


@pytest.mark.usefixtures("runs")
def test_a_finished_run_with_other_settings_is_not_taken_for_this_one(folder):
    other = [ARMS[0], Arm("scaled", replace(ARMS[1].optimizer, weight_decay=0.5))]
    with pytest.raises(UsageError, match=r"or delete it:\n  optimizer\.weight_decay: 1\.0 there, 0\.5 now"):
        by_arm(folder / "runs").train([comparison(other)])


def test_an_arm_that_diverged_is_in_the_verdict_the_table_and_the_page(tmp_path):
    study = CompareStudy(tiny_run(steps=20, diverged=1.0), (*ARMS, WILD), 2, "a title", claims=True)
    report = conduct(study, by_arm(tmp_path / "runs"), tmp_path, images=False)
    data = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))
    steps = data["arms"][2]["diverged"]
    assert set(steps) == {"0", "1"}
    where = f"'wild' diverged at update {steps['0']} (seed 0) and {steps['1']} (seed 1)"
    assert report.sentence.startswith(f"{where}: it cannot be trained with these settings")
    assert "'wild' and 'constant' cannot be compared" in report.sentence
    assert "'scaled' and 'constant'" in report.sentence
    assert report.tables[0].rows[2][4].text == "diverged"
    assert where in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [claim.id for claim in claims_of(report)] == ["loss", "norm"]
    assert data["pairs"][1]["mean"] is None


def test_total_decay_of_the_control_is_that_of_the_scaled_arm():
    config = small_run(steps=2000)
    control = same_total(config, ARMS[1])
    scaled, constant = (math.fsum(decay_factors(config, arm)) for arm in (ARMS[1].optimizer, control.optimizer))
    assert constant == pytest.approx(scaled, rel=1e-12)
    flat = replace(config, schedule=ScheduleConfig(warmup_steps=0))
    # half a cosine from 1 to 0.1 has mean 0.55 and mean square 0.55^2 + 0.45^2/2
    assert same_total(flat, ARMS[1]).optimizer.weight_decay == pytest.approx((0.55**2 + 0.45**2 / 2) / 0.55, rel=2e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scalled", r"unknown decay rule or preset 'scalled' \(did you mean 'scaled'\?\); known: .*normuon"),
        ("normoun", r"did you mean 'normuon'"),
        ("", "unknown decay rule or preset ''"),
        ("soap/costant", r"unknown decay rule 'costant' \(did you mean 'constant'\?\)"),
        ("saop/constant", r"unknown preset 'saop' \(did you mean 'soap'\?\)"),
        ("/constant,preset=soap", "setting=value"),
        ("soap,momentum=0.9", "optimizer.preset='soap' has its own momentum: leave optimizer.momentum=0.9 out"),
        ("scaled,weight_decay", "setting=value"),
        ("scaled,weight=1", "settings algorithm, lr"),
        ("scaled,lr=fast", "lr must be a number"),
        ("scaled,algorithm=adam", "must be one of muon, adamw"),
    ],
)
def test_a_wrong_arm_is_explained(text, message):
    with pytest.raises(UsageError, match=message):
        parse_arm(text, OptimizerConfig())


def test_an_arm_of_a_preset_has_one_name_and_one_config():
    base = OptimizerConfig(lr=0.01)
    arms = [parse_arm(text, base) for text in ("normuon", "normuon/scaled", "soap/constant, lr=0.1")]
    assert arms[0] == arms[1] == Arm("normuon/scaled", replace(base, preset="normuon"))
    assert arms[2] == Arm("soap/constant, lr=0.1", replace(base, preset="soap", decay="constant", lr=0.1))
    assert not set(PRESETS) & set(DECAY_RULES)


def test_a_preset_keeps_its_name_from_the_command_to_the_page(tmp_path):
    base = tiny_run(steps=4, optimizer={"ns_dtype": "float32"})
    arms = tuple(parse_arm(text, base.optimizer) for text in ("constant", "normuon", "lion/constant,lr=0.001"))
    report = conduct(CompareStudy(base, arms, 1, "members"), by_arm(tmp_path / "runs"), tmp_path, images=False)
    names = ["constant", "normuon/scaled", "lion/constant, lr=0.001"]
    assert [row[0] for row in report.tables[0].rows] == names
    assert [run["name"] for run in json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))["arms"]] == names
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"normuon-scaled-seed0", "constant-seed0"}
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert all(name in page for name in names)


def test_steps_to_match_interpolates_between_evaluations(tmp_path):
    def run(name, evaluations):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}", encoding="utf-8")
        records = [{"kind": "eval", "step": step, "loss": loss} for step, loss in evaluations]
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
        return load_run(folder)

    baseline = run("baseline", [(0, 5.0), (50, 3.0), (100, 3.2)])
    assert steps_to_match(baseline, run("faster", [(0, 5.0), (20, 4.0), (40, 2.0)])) == pytest.approx(30 / 50)
    assert steps_to_match(baseline, run("never", [(0, 5.0), (100, 3.1)])) is None
    assert first_crossing([0, 10], [2.0, 1.0], 2.5) == 0.0


def test_a_search_goes_no_further_than_an_update_can_take():
    """Every larger lambda is better here, until one would take more than the weight."""

    def train(comparisons):
        losses = {arm.name: -arm.optimizer.weight_decay for arm in comparisons[0].arms}
        return {SEARCH: {name: [SimpleNamespace(result={}, final_loss=loss)] for name, loss in losses.items()}}

    base, optimizer = tiny_run(steps=4), replace(ARMS[1].optimizer, weight_decay=1.0)
    strong = replace(optimizer, weight_decay=0.4 / max(decay_factors(base, optimizer)))
    (found,) = tune(train, base, [Arm("strong", strong)], seed=7)
    assert 0.5 < max(decay_factors(base, found.arm.optimizer)) <= 1.0


def test_lambda_is_tuned_on_a_seed_of_its_own_and_beyond_the_edge_of_the_grid(tmp_path):
    found = tune(by_arm(tmp_path / "runs").train, tiny_run(steps=4), ARMS[1:], seed=7, factors=(0.5, 1.0, 2.0))
    for tuned in found:
        tried = sorted(tuned.losses)
        assert {0.5, 1.0, 2.0} <= set(tried)
        assert all(larger == pytest.approx(2 * smaller) for smaller, larger in pairwise(tried))
        best = tuned.arm.optimizer.weight_decay
        assert tuned.losses[best] == min(tuned.losses.values())
        assert tuned.at_edge == (best in (tried[0], tried[-1]))
        written = tuned.as_data()
        assert {one["weight_decay"]: one["final"] for one in written["losses"]} == tuned.losses
        assert (written["best"], written["arm"]) == (best, tuned.name)
        assert len(tried) == 6 or not tuned.at_edge, "the search stops at an edge only after three extensions"
    assert all(path.name.endswith("seed7") for path in (tmp_path / "runs").iterdir())
    table = sweep_table(found)
    marked = [cell.text for row in table.rows for cell in row[1:] if cell is not None and cell.tone]
    assert sorted(marked) == sorted(f"{min(tuned.losses.values()):.4f}" for tuned in found)
    assert ("edge" in table.note) == any(tuned.at_edge for tuned in found)


def test_where_every_lambda_diverges_none_is_called_best_and_no_more_are_tried():
    def train(comparisons):
        assert len(comparisons[0].arms) == len(ARMS[1:]) * len(FACTORS)
        lost = SimpleNamespace(result={"diverged": 3}, final_loss=math.nan)
        return {SEARCH: {arm.name: [lost] for arm in comparisons[0].arms}}

    found = tune(train, tiny_run(steps=4), ARMS[1:], seed=7)
    assert not any(tuned.at_edge for tuned in found)
    table = sweep_table(found)
    cells = [cell for row in table.rows for cell in row[1:] if cell is not None]
    assert {(cell.text, cell.tone) for cell in cells} == {("diverged", "")}
    assert "edge" not in table.note
    assert "diverged: lower the learning rate" in table.note


def test_what_has_no_loss_or_a_huge_one_is_shown_in_a_few_letters():
    lost = pairs_table([pair((math.nan,) * 3, match=(None,) * 3)])
    assert not any("nan" in cell.text for row in lost.cells() for cell in row)
    huge = pairs_table([pair((1e30, 2e30, 3e30))])
    assert max(len(cell.text) for row in huge.cells() for cell in row) < 40


@pytest.mark.slow
def test_the_search_over_lambda_is_in_the_numbers_of_a_comparison(tmp_path):
    wild = Arm("wild", OptimizerConfig(lr=50.0, decay="constant", weight_decay=0.001))
    study = CompareStudy(tiny_run(steps=12, diverged=1.0), (ARMS[1], wild), 1, "a title", tune_lambda=True)
    conduct(study, by_arm(tmp_path / "runs"), tmp_path, images=False)
    scaled, lost = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))["search"]
    assert scaled["arm"] == "scaled"
    best = min(scaled["losses"], key=lambda tried: tried["final"])
    assert scaled["best"] == best["weight_decay"]
    for tried in scaled["losses"]:
        (run,) = (tmp_path / "runs").glob(f"*scaled*lambda={tried['weight_decay']:g}-seed1")
        assert json.loads((run / "result.json").read_text(encoding="utf-8"))["final_loss"] == tried["final"]
    assert {tried["final"] for tried in lost["losses"]} == {None}, "runs that diverged have no loss"


def arm(name, rule, **values):
    numbers = {
        "seeds": (0, 1, 2),
        "final": (3.0,) * 3,
        "best": (3.0,) * 3,
        "norm": (0.1,) * 3,
        "norm_change": (-0.5,) * 3,
    }
    rest = {
        "total_decay": 5.0,
        "diverged": {},
    }
    return ArmOutcome(name, rule, 1.0, **{**numbers, **rest, **values})


def pair(differences, match=(0.8, 0.8, 0.8)):
    interval = t_interval(torch.tensor(differences, dtype=torch.float64))
    mean = sum(differences) / len(differences)
    return PairOutcome("constant", "scaled", (0, 1, 2), differences, mean, interval, match, Interval(0.7, 0.9, "95% t"))


def test_the_verdict_follows_the_interval():
    both = (arm("constant", "constant"), arm("scaled", "scaled", norm=(0.2,) * 3, norm_change=(-0.1,) * 3))
    clear = verdict(Outcome(both, (pair((-0.10, -0.11, -0.09)),)))
    assert "'scaled' ended lower than 'constant' over 3 seeds (-0.1000 nats, 95% t interval -0.1248 to -0.0752" in clear
    assert "matched the best loss of 'constant' in 80% of the steps" in clear
    worse = verdict(Outcome(both, (pair((0.10, 0.11, 0.09)),)))
    assert "'scaled' ended higher" in worse
    assert "80%" not in worse
    unsure = verdict(Outcome(both, (pair((-0.10, 0.11, -0.09)),)))
    assert "No significant difference between 'scaled' and 'constant' over 3 seeds" in unsure
    assert all("--tune-lambda" in text for text in (clear, worse, unsure))


def test_the_verdict_judges_decay_and_lambda_before_the_difference():
    gain = pair((-0.10, -0.11, -0.09))
    both = (arm("constant", "constant"), arm("scaled", "scaled"))
    for lam, words in ((1.0, "too large"), (0.27, "suits"), (0.1, "small")):
        advice = advise_arm(replace(small_run(), steps=420), Arm("", OptimizerConfig(weight_decay=lam)), 1.0)
        text = verdict(Outcome(tuple(replace(one, weight_decay=lam) for one in both), (gain,)), advice=advice)
        places = [text.index(part) for part in ("Decay acts", f"Lambda {lam:g} ", words, "ended lower")]
        assert places == sorted(places)
        assert ("--tune-lambda" in text) == (words != "suits")
    # At lambdas of their own, or where no run of ours tells, nothing is said about them.
    assert "Lambda" not in verdict(Outcome((both[0], replace(both[1], weight_decay=0.5)), (gain,)), advice=advice)
    assert "Lambda" not in verdict(Outcome(both, (gain,)))


@pytest.mark.parametrize(("left", "share"), [(0.2, "80%"), (1.0, "0%"), (-0.3, "100%")])
def test_the_verdict_says_how_much_of_a_gain_is_less_decay(left, share):
    arms = (arm("constant", "constant"), arm("scaled", "scaled"), arm(CONTROL, "constant", total_decay=3.6))
    gains = (-0.10, -0.11, -0.09)
    against_control = replace(pair(tuple(left * gain for gain in gains)), baseline=CONTROL)
    text = verdict(Outcome(arms, (pair(gains), against_control)))
    assert f"So {share} of the gain is explained by less total decay." in text
    unsure = verdict(Outcome(arms, (pair((-0.10, 0.11, -0.09)), against_control)))
    assert "explained" not in unsure


def test_the_control_is_the_baseline_of_the_scaled_arm(tmp_path):
    study = CompareStudy(tiny_run(steps=4), ARMS, 2, "a title", control=True)
    report = conduct(study, by_arm(tmp_path / "runs"), tmp_path, images=False)
    data = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))
    assert [(one["baseline"], one["arm"]) for one in data["pairs"]] == [("constant", "scaled"), (CONTROL, "scaled")]
    constant, scaled, control = (one["total_decay"] for one in data["arms"])
    assert control == pytest.approx(scaled) != pytest.approx(constant)
    assert data["claims"] == []
    assert not report.failed


def test_without_a_lambda_the_formula_gives_one(tmp_path, capsys):
    def settings(*words):
        out = tmp_path / "-".join(["out", *words])
        command = [
            "compare",
            "--data",
            tokens(),
            "--seeds",
            "1",
            "--workers",
            "1",
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("muonsw.lab.commands.compare.conduct", lambda study, *_: studies.append(study) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                main([*command, *words])
        return studies[-1], capsys.readouterr().out

    studies = []
    chosen, printed = settings()
    assert math.fsum(decay_factors(chosen.base, chosen.base.optimizer)) == pytest.approx(
        more_decay("scaled", chosen.epochs), rel=0.05
    )
    assert f"lambda {chosen.base.optimizer.weight_decay:g}, by the formula" in printed
    given, printed = settings("--weight-decay", "5")
    assert given.base.optimizer.weight_decay == 5.0
    assert printed.startswith("lambda 5, as given, is ")
    short, printed = settings("--steps", "4")
    assert short.base.optimizer.weight_decay == 1.0, "no lambda acts in four steps, so that the preset's stays"
    assert "Decay does nothing" in printed


def test_the_verdict_says_when_updates_were_skipped():
    both = (arm("constant", "constant"), arm("scaled", "scaled", skipped={0: 7, 2: 1}))
    text = verdict(Outcome(both, (pair((-0.1, -0.2, -0.15)),)))
    assert text.startswith("'scaled' skipped 7 updates (seed 0), 1 update (seed 2), whose gradients were not finite")


def test_skipped_updates_are_read_from_the_results_of_runs(runs):
    first, second, third = runs["scaled"]
    some = [first, replace(second, result={**second.result, "skipped": 9}), third]
    assert compare({**runs, "scaled": some}).arms[1].skipped == {1: 9}


def test_one_seed_with_equal_losses_is_neither_below_nor_above():
    both = (arm("constant", "constant"), arm("scaled", "scaled"))
    equal = PairOutcome("constant", "scaled", (0,), (0.0,), 0.0, None, (1.0,), None)
    assert "'scaled' ended at the same loss as 'constant'; one seed gives no" in verdict(Outcome(both, (equal,)))


def test_the_verdict_says_when_decay_cannot_matter():
    """The same total as in `muonsw advise` and `muonsw diagnose`; tuning lambda is then no advice."""
    for total, idle in ((0.99 * IDLE, True), (1.01 * IDLE, False)):
        both = (arm("constant", "constant", total_decay=total), arm("scaled", "scaled", total_decay=0.73 * total))
        text = verdict(Outcome(both, (pair((-0.1, 0.1, 0.0)),)))
        assert (text.startswith("Too short for decay to matter"), text.startswith("Decay acts")) == (idle, not idle)
    # What a rule takes that follows the gradients is not known.
    both = (arm("constant", "constant", total_decay=0.0), arm("other", "gradient_norm", total_decay=math.nan))
    assert "Too short" not in verdict(Outcome(both, (pair((-0.1, 0.1, 0.0)),)))


def test_an_arm_that_lost_some_seeds_is_compared_on_the_others():
    lost = arm("scaled", "scaled", seeds=(0, 2), final=(3.0, 3.1), diverged={1: 40})
    text = verdict(Outcome((arm("constant", "constant"), lost), (pair((-0.1, -0.2, -0.15)),)))
    assert text.startswith("'scaled' diverged at update 40 (seed 1); it is compared on its other seeds")
    (row,) = arms_table(Outcome((lost,), ())).rows
    assert row[4].text.endswith(", 1 diverged")
    assert row[4].note == "at update 40 (seed 1)"


def test_a_pair_without_a_seed_in_common_has_no_numbers():
    nothing = PairOutcome("constant", "scaled", (), (), math.nan, None, (), None)
    assert pairs_table([nothing]).rows[0][2:] == (None, None, None, None)


def written(folder, rule, seed, loss, norms, **optimizer):
    """A run with a known final loss and known norms."""
    path = folder / f"{rule}-{seed}-{norms}-{optimizer}"
    path.mkdir()
    config = tiny_run(seed=seed, arm=rule, optimizer={"decay": rule, "weight_decay": 1.0, **optimizer})
    (path / "config.json").write_text(json.dumps(config.as_data()), encoding="utf-8")
    records = [
        {"kind": "telemetry", "step": step, "decayed": {"weight_rms": norm}, "all": {"weight_rms": norm}}
        for step, norm in enumerate(norms)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (path / "result.json").write_text(json.dumps({"final_loss": loss, "best_loss": loss}), encoding="utf-8")
    return load_run(path)


def both_rules(folder, gains, constant, scaled):
    return {
        rule: [written(folder, rule, seed, 3.0 - gain * (rule == "scaled"), norms) for seed, gain in enumerate(gains)]
        for rule, norms in (("constant", constant), ("scaled", scaled))
    }


@pytest.mark.parametrize(
    ("gains", "scaled", "expected"),
    [
        ((0.10, 0.11, 0.09), (1.0, 0.9), ["holds", "holds"]),
        ((0.10, -0.2, 0.09), (1.0, 0.9), ["undecided", "holds"]),
        ((-0.10, -0.11, -0.09), (1.0, 0.3), ["fails", "fails"]),
        ((0.0, 0.0, 0.0), (1.0, 0.5), ["undecided", "undecided"]),
    ],
)
def test_claims_follow_the_interval_and_nothing_moved_is_no_effect(gains, scaled, expected, tmp_path):
    runs = both_rules(tmp_path, gains, (1.0, 0.5), scaled)
    pair = PairOutcome("constant", "scaled", (0, 1, 2), gains, 0.0, Interval(0, 0, ""), (), None)
    both = (arm("constant", "constant"), arm("scaled", "scaled"))
    assert [str(claim.verdict) for claim in effects(runs, Outcome(both, (pair,)))] == expected
    assert effects(runs, Outcome((both[0], replace(both[1], weight_decay=0.5)), (pair,))) == []
    assert effects(runs, Outcome(both, (replace(pair, interval=None),))) == []
    unknown = replace(both[1], norm_change=(math.nan,) * 3)
    assert [claim.id for claim in effects(runs, Outcome((both[0], unknown), (pair,)))] == ["loss"]
    for other in ({"preset": "normuon"}, {"algorithm": "adamw"}, {"lr": 0.5}):  # of which the paper claims nothing
        runs["scaled"] = [written(tmp_path, "scaled", seed, 2.9, scaled, **other) for seed in range(3)]
        assert effects(runs, Outcome(both, (pair,))) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--arms", "scaled"], "at least two different arms"),
        (["--arms", "constant", "squared", "--control"], "needs a scaled arm"),
        (["--preset", "w3"], "unknown preset 'w3'"),
        (["--data", "/nowhere"], "holds no prepared data"),
        (["--workers", "0"], "--workers must be at least 1"),
        (
            ["--weight-decay", "1", "--arms", "scaled", "constant,lr=3"],
            "constant decay with weight_decay=1 at lr=3 would take 3 times the weight",
        ),
        (["--weight-decay", "600", "--tune-lambda"], "weight_decay=60 at lr=0.02 would take 1.2 times the weight"),
        (["--weight-decay", "0", "--control"], "give --weight-decay above zero"),
        (["--telemetry-every", "-1"], "telemetry_every=-1 must be at least 0"),
    ],
)
def test_a_wrong_option_is_explained_before_any_training(options, message, tmp_path, capsys):
    given = [] if "--data" in options else ["--data", tokens()]
    assert main(["compare", "--out", str(tmp_path / "out"), *given, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize("foreign", ["report.html", "report/notes.txt"])
def test_a_foreign_report_is_noticed_before_any_training(foreign, tmp_path, capsys):
    (tmp_path / foreign).parent.mkdir(exist_ok=True)
    (tmp_path / foreign).write_text("of another program", encoding="utf-8")
    assert main(["compare", "--out", str(tmp_path), "--data", tokens(), "--device", "cpu"]) == 2
    assert foreign.rpartition("/")[2] in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_command_prints_the_verdict_one_table_and_where_the_files_are(tmp_path, capsys):
    options = ["--seeds", "1", "--steps", "2", "--workers", "1", "--device", "cpu", "--telemetry-every", "1"]
    assert main(["compare", "--data", tokens(), "--out", str(tmp_path), *options]) == 0
    *_, sentence, _, title, heading, one, other, legend, _, files = capsys.readouterr().out.splitlines()
    assert "one seed gives no error bar" in sentence
    assert title == "Arms"
    assert [line.split()[0] for line in (heading, one, other)] == ["arm", "constant", "scaled"]
    assert "Total decay: the sum over all steps" in legend
    assert files.startswith("wrote outcome.json, report.html and")
    assert files.endswith(f"figures to {tmp_path}")
    assert load_run(tmp_path / "runs" / "scaled-seed0").telemetry.step.tolist() == [1, 2]
