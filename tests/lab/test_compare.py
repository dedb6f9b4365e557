"""Comparisons: arms as written, paired outcomes, a verdict no bolder than its numbers, and a search for lambda."""

import html
import json
import math
import shutil
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from muonsw.lab import launch
from muonsw.lab.advise import IDLE
from muonsw.lab.compare import (
    CONTROL,
    FACTORS,
    Arm,
    ArmOutcome,
    Difference,
    Outcome,
    advice_for,
    by_arm,
    compare,
    conduct,
    decay_factors,
    differences_table,
    parse_arm,
    sweep_table,
    train_all,
    tune,
    verdict,
)
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.runs import Run, tabulate
from muonsw.lab.stats import t_interval
from muonsw.lab.train.config import OptimizerConfig, with_data
from tests.lab.studies.small_comparisons import ARMS, KEY, QUIET, WILD, comparison, tiny_run
from tests.lab.texts import markov_texts
from tests.lab.train.small_runs import small_run, tokens


def trainer(folder):
    return partial(train_all, place=by_arm(folder / "runs"), launch=partial(launch.run, console=QUIET, workers=1))


def concluded(folder, arms=ARMS, **changes):
    settings = {"base": tiny_run(steps=4), "seeds": 2, "title": "a title"} | changes
    return conduct(arms=arms, train=trainer(folder), folder=folder, **settings)


def numbers(folder, name="outcome.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


# Arms.


def test_an_arm_has_one_name_and_one_config():
    base = OptimizerConfig(lr=0.01)
    texts = ("normuon", "normuon/scaled", "soap/constant, lr=0.1", "scaled,algorithm=adamw", "scaled,lr=.05")
    arms = [parse_arm(text, base) for text in texts]
    assert arms[0] == arms[1] == Arm("normuon/scaled", replace(base, preset="normuon"))
    assert arms[2] == Arm("soap/constant, lr=0.1", replace(base, preset="soap", decay="constant", lr=0.1))
    assert arms[3] == Arm("scaled, algorithm=adamw", replace(base, algorithm="adamw"))
    assert arms[4].optimizer.lr == 0.05


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scalled", "did you mean 'scaled'"),
        ("soap/costant", "did you mean 'constant'"),
        ("saop/constant", "did you mean 'soap'"),
        ("soap,momentum=0.9", "decides momentum"),
        ("scaled,weight_decay", "setting=value"),
        ("scaled,lr=0.1,lr=0.2", "once"),
        ("scaled,decay=constant", "once"),
        ("scaled,learning_rate=0.1", "optimizer: unknown setting 'learning_rate'"),
        ("scaled,betas=0.9", "must be a list"),
        ("scaled,lr=fast", "lr='fast' must be of type float"),
        ("scaled,lr=NaN", "lr"),
    ],
)
def test_a_wrong_arm_is_explained(text, message):
    with pytest.raises(UsageError, match=message):
        parse_arm(text, OptimizerConfig())


# What runs show.


def arm(name, rule, **values):
    known = {"seeds": (0, 1, 2), "final": (3.0,) * 3, "best": (3.0,) * 3, "norm": (0.1,) * 3}
    known |= {"total_decay": 5.0, "diverged": {}, "weight_decay": 1.0}
    return ArmOutcome(name, rule, **known | values)


def minus(values, baseline="constant", measure="loss"):
    """The difference of scaled decay from a baseline."""
    interval = t_interval(torch.tensor(values, dtype=torch.float64))
    return Difference("scaled", baseline, measure, (0, 1, 2), values, sum(values) / len(values), interval)


BOTH = (arm("constant", "constant"), arm("scaled", "scaled"))
GAINS = (-0.10, -0.11, -0.09)


def ended(rule, seed, *, loss=3.0, evals=(), **result):
    """A run with a known final loss and known evaluations."""
    config = tiny_run(seed=seed, arm=rule, optimizer={"decay": rule, "weight_decay": 1.0})
    records = [{"kind": "eval", "step": step, "loss": value, **dict(metrics)} for step, value, *metrics in evals]
    result = {"steps": 10, "final_loss": loss, "best_loss": loss} | result
    return Run(rule, Path(), config.as_data(), {}, result, tabulate(records))


def test_a_comparison_is_paired_by_seed_and_leaves_out_diverged_runs():
    losses = {"constant": (3.0, 3.2, 3.1, 9.0), "scaled": (2.9, 3.0, 3.05, 1.0)}
    runs = {rule: [ended(rule, seed, loss=loss) for seed, loss in enumerate(those)] for rule, those in losses.items()}
    runs["scaled"][3] = ended("scaled", 3, loss=None, diverged=7)
    runs["constant"][0] = ended("constant", 0, loss=3.0, skipped=9)
    outcome = compare(runs)
    (difference,) = outcome.differences
    assert (difference.baseline, difference.arm, difference.seeds) == ("constant", "scaled", (0, 1, 2))
    assert difference.values == pytest.approx([-0.1, -0.2, -0.05])
    assert difference.mean == pytest.approx(-0.35 / 3)
    assert difference.interval == t_interval(torch.tensor(difference.values, dtype=torch.float64))
    assert [arm.diverged for arm in outcome.arms] == [{}, {3: 7}]
    assert outcome.arms[0].skipped == {0: 9}


def test_a_metric_that_ends_without_a_number_is_not_replaced_by_an_earlier_one():
    ends = {"constant": (30.0, 31.0, 32.0), "scaled": (33.0, None, 35.0)}
    runs = {
        rule: [
            ended(rule, seed, evals=[(1, 4.0, ("accuracy", 10.0)), (2, 3.0, ("accuracy", end))])
            for seed, end in enumerate(values)
        ]
        for rule, values in ends.items()
    }
    outcome = compare(runs)
    assert outcome.arms[0].metrics == {"accuracy": ends["constant"]}
    loss, metric = outcome.differences
    assert (loss.measure, metric.measure) == ("loss", "accuracy")
    assert metric.values == pytest.approx((3.0, math.nan, 3.0), nan_ok=True)
    assert differences_table(outcome.differences).rows[1][2] is None
    assert "accuracy" not in verdict(outcome)


# Whole comparisons.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def runs(folder):
    """Two arms with three seeds."""
    return trainer(folder)([comparison()])[KEY]


def test_arms_share_weights_and_batches_and_differ_in_decay_alone(runs):
    for constant, scaled in zip(runs["constant"], runs["scaled"], strict=True):
        # the rules are the same at the peak, and the first step of a warmup decays by next to nothing
        assert constant.evals["loss"][0] == scaled.evals["loss"][0]
        assert constant.train["cross_entropy"][0] == scaled.train["cross_entropy"][0]
        assert constant.train["loss"][-1] != scaled.train["loss"][-1]
    for first, second in pairwise(runs["constant"]):
        assert first.evals["loss"][0] != second.evals["loss"][0]


@pytest.mark.usefixtures("runs")
def test_a_finished_comparison_is_written_and_not_run_again(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    conclusion = concluded(folder, base=tiny_run(), seeds=3)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before
    assert numbers(folder)["verdict"] == conclusion.sentence
    assert conclusion.paths == [folder / "outcome.json", folder / "report.html"]
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    assert "<title>a title</title>" in page
    assert conclusion.sentence in page


def test_an_unwritable_outcome_is_refused_before_training(tmp_path):
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(UsageError, match=r"outcome\.json is a folder"):
        concluded(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_tokens_that_change_between_arms_are_noticed(tmp_path):
    data = shutil.copytree(tokens(), tmp_path / "data")
    base = with_data(tiny_run(steps=2), data)
    train = trainer(tmp_path)
    train([replace(comparison(ARMS[:1]), base=base, seeds=(0,))])
    shutil.rmtree(data)
    prepare(islice(markov_texts(seed=1), 60), ByteTokenizer(), data, validation_fraction=0.2)
    with pytest.raises(UsageError, match="holds other tokens"):
        train([replace(comparison(ARMS[1:]), base=base, seeds=(0,))])


def test_an_arm_that_diverged_is_in_the_verdict_the_table_and_the_page(tmp_path):
    conclusion = concluded(tmp_path, (*ARMS, WILD), base=tiny_run(steps=20, diverged=1.0))
    data = numbers(tmp_path)
    assert set(data["arms"][2]["diverged"]) == {"0", "1"}
    where = f"'wild' diverged at step {data['arms'][2]['diverged']['0']} (seed 0)"
    assert conclusion.sentence.startswith(where)
    assert "'scaled' and 'constant'" in conclusion.sentence
    assert conclusion.tables[1].rows[2][3].text == "diverged"
    assert where in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert data["differences"][1]["mean"] is None


def test_numbers_have_every_lambda_tried_and_the_control_as_baseline_of_the_scaled_arm(tmp_path):
    concluded(tmp_path, base=tiny_run(steps=2), seeds=1, tune_lambda=True, control=True)
    data = numbers(tmp_path)
    for tried in data["search"][1]["losses"]:
        (run,) = (tmp_path / "runs").glob(f"scaled-lambda={tried['weight_decay']:g}-seed1")
        assert numbers(run, "result.json")["final_loss"] == tried["final"]
    constant, scaled, control = (each["name"] for each in data["arms"])
    assert control == CONTROL
    assert [(each["baseline"], each["arm"]) for each in data["differences"]] == [(constant, scaled), (control, scaled)]
    assert data["arms"][2]["total_decay"] == pytest.approx(data["arms"][1]["total_decay"])


# The search for lambda.


def search(loss_of, arms=ARMS[1:]):
    """Tune with losses that are a function of lambda; None where the run diverges."""
    calls = []

    def train(comparisons):
        calls.append(comparisons[0])
        losses = {each.name: loss_of(each.optimizer.weight_decay) for each in comparisons[0].arms}
        return {"search": {name: [SimpleNamespace(final_loss=loss)] for name, loss in losses.items()}}

    return tune(train, tiny_run(steps=4), arms, seed=7), calls


def test_the_search_uses_a_separate_seed_and_extends_beyond_the_edge():
    for best, further, edge in ((1.1, [], False), (3.9, [4.0, 8.0], False), (1e-9, [0.04, 0.016, 0.0064], True)):
        (result,), calls = search(lambda lam, best=best: (lam - best) ** 2)
        assert list(result.losses) == pytest.approx([*FACTORS, *further]), "three extensions at most"
        assert result.losses[result.best] == min(result.losses.values())
        assert all(call.seeds == (7,) for call in calls)
        assert result.at_edge == edge == ("at the edge" in verdict(Outcome(BOTH, ()), [result]))


def test_a_search_stops_before_a_step_removes_the_weight_or_if_every_lambda_diverges():
    # Every larger lambda is better, until one would take more than the weight.
    base, optimizer = tiny_run(steps=4), replace(ARMS[1].optimizer, weight_decay=1.0)
    strong = replace(optimizer, weight_decay=0.4 / max(decay_factors(base, optimizer)))
    (result,), _ = search(lambda lam: -lam, [Arm("strong", strong)])
    assert 0.5 < max(decay_factors(base, result.at(result.best).optimizer)) <= 1.0

    (result,), calls = search(lambda _: math.nan)
    assert [len(call.arms) for call in calls] == [len(FACTORS)]
    assert not result.at_edge
    assert {(row[1].text, row[1].tone) for row in sweep_table([result]).rows} == {("diverged", "")}


# The verdict.


def test_the_verdict_follows_the_interval():
    clear = verdict(Outcome(BOTH, (minus(GAINS), minus(tuple(-gain for gain in GAINS), measure="accuracy"))))
    assert "'scaled' ended with a lower loss than 'constant' over 3 seeds (-0.1000 nats" in clear
    assert "'scaled' ended with a higher accuracy than 'constant' over 3 seeds (+0.1000, " in clear
    unsure = verdict(Outcome(BOTH, (minus((-0.10, 0.11, -0.09)),)))
    assert "No significant difference in loss" in unsure
    alone = Difference("scaled", "constant", "loss", (0,), (0.0,), 0.0, None)
    assert "one seed gives no error bar" in verdict(Outcome(BOTH, (alone,)))
    lost = Difference("scaled", "constant", "loss", (), (), math.nan, None)
    assert "no seed completed in both" in verdict(Outcome(BOTH, (lost,)))


def test_the_verdict_judges_lambda_unless_arms_have_their_own():
    gain = minus(GAINS)
    for lam, words in ((1.0, "favours the rule"), (0.27, "lambda is fine"), (0.1, "Try lambda")):
        advice = advice_for(replace(small_run(), steps=420), OptimizerConfig(weight_decay=lam), 1.0)
        text = verdict(Outcome(tuple(replace(each, weight_decay=lam) for each in BOTH), (gain,)), advice=advice)
        assert words in text
        assert ("--tune-lambda" in text) == (lam != 0.27)
    assert "Try" not in verdict(Outcome((BOTH[0], replace(BOTH[1], weight_decay=0.5)), (gain,)), advice=advice)


@pytest.mark.parametrize(("left", "share"), [(0.2, "80%"), (1.0, "0%"), (-0.3, "100%")])
def test_the_verdict_says_how_much_of_a_gain_is_less_decay(left, share):
    arms = (*BOTH, arm(CONTROL, "constant", total_decay=3.6))
    against_control = minus(tuple(left * gain for gain in GAINS), baseline=CONTROL)
    text = verdict(Outcome(arms, (minus(GAINS), against_control)))
    assert f"{share} of the gain is explained" in text
    unsure = verdict(Outcome(arms, (minus((-0.10, 0.11, -0.09)), against_control)))
    assert "explained" not in unsure


def test_the_verdict_begins_with_lost_seeds_and_skipped_steps_or_whether_decay_can_matter():
    for changes, beginning in (
        ({"total_decay": 0.99 * IDLE}, "Too short for decay to matter"),
        ({"total_decay": 1.01 * IDLE}, "Decay matters under 'scaled' only"),
        ({"skipped": {0: 7, 2: 1}}, "'scaled' skipped 7 steps (seed 0), 1 step (seed 2)"),
        ({"seeds": (0, 2), "final": (3.0, 3.1), "diverged": {1: 40}}, "'scaled' diverged at step 40 (seed 1)"),
    ):
        arms = arm("constant", "constant", total_decay=0.1), arm("scaled", "scaled", **changes)
        assert verdict(Outcome(arms, (minus(GAINS),))).startswith(beginning)
