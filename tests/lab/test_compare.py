"""Comparisons: no bolder than their numbers, resumable, and clear about arms that diverged."""

import html
import json
import math
import shutil
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import pytest

from muonsw.lab.advise import IDLE
from muonsw.lab.arms import CONTROL, Arm, Key, decay_factors, parse_arm
from muonsw.lab.compare import FACTORS, Question, advise_arm, answer, effects, sweep_table, tune, verdict
from muonsw.lab.data.prepare import markov_texts, prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.outcome import Outcome, PairOutcome
from muonsw.lab.stats import Interval
from muonsw.lab.train.config import OptimizerConfig, with_data
from tests.lab.studies.small_comparisons import ARMS, KEY, WILD, by_arm, comparison, tiny_run
from tests.lab.test_outcome import arm, pair, written
from tests.lab.train.small_runs import small_run, tokens

BOTH = (arm("constant", "constant"), arm("scaled", "scaled"))
GAINS = (-0.10, -0.11, -0.09)


def ask(folder, **changes):
    asked = {"base": tiny_run(steps=4), "arms": ARMS, "seeds": 2, "title": "a title"} | changes
    return answer(Question(**asked), by_arm(folder / "runs").train, folder, images=False)


def numbers(folder, name="outcome.json"):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("comparison")


@pytest.fixture(scope="module")
def runs(folder):
    """Two arms with three seeds."""
    return by_arm(folder / "runs").train([comparison()])[KEY]


def test_arms_share_weights_and_batches_and_differ_in_decay_alone(runs):
    for constant, scaled in zip(runs["constant"], runs["scaled"], strict=True):
        # the rules are the same at the peak, and the first step of a warmup decays by next to nothing
        assert constant.evals["loss"][0] == scaled.evals["loss"][0]
        assert constant.train["cross_entropy"][0] == scaled.train["cross_entropy"][0]
        assert constant.train["loss"][-1] != scaled.train["loss"][-1]
    for one, other in pairwise(runs["constant"]):
        assert one.evals["loss"][0] != other.evals["loss"][0]


@pytest.mark.usefixtures("runs")
def test_a_finished_comparison_is_written_and_not_run_again(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")}
    found = ask(folder, base=tiny_run(), seeds=3, claims=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("metrics.jsonl")} == before
    data = numbers(folder)
    assert data["verdict"] == found.sentence
    assert [claim["id"] for claim in data["claims"]] == ["loss", "norm"] == [claim.id for claim in found.claims]
    assert found.paths == [folder / "outcome.json", folder / "report.html"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "<title>a title</title>" in page
    assert html.escape(found.sentence) in page.replace("&#39;", "&#x27;").replace("&#34;", "&quot;")


def test_numbers_that_cannot_be_written_are_named_before_anything_is_trained(tmp_path):
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(UsageError, match=r"outcome\.json is a folder"):
        ask(tmp_path)
    assert not (tmp_path / "runs").exists()


def test_the_numbers_of_another_comparison_are_kept(tmp_path):
    ask(tmp_path, base=tiny_run(steps=2), seeds=1, tune_lambda=True)
    tuned = (tmp_path / "outcome.json").read_bytes()
    search = numbers(tmp_path)["search"]
    assert [one["arm"] for one in search] == ["constant", "scaled"]
    for tried in search[1]["losses"]:
        (run,) = (tmp_path / "runs").glob(f"*scaled*lambda={tried['weight_decay']:g}-seed1")
        assert numbers(run, "result.json")["final_loss"] == tried["final"]
    for _ in range(2):
        ask(tmp_path, base=tiny_run(steps=2), seeds=1)
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("outcome*")}
    assert kept.keys() == {"outcome.json", "outcome.json.1"}, "the same comparison again replaces its own numbers"
    assert kept["outcome.json.1"] == tuned != kept["outcome.json"]


def test_text_that_is_replaced_while_arms_are_trained_is_noticed(tmp_path):
    data = shutil.copytree(tokens(), tmp_path / "data")
    base = with_data(tiny_run(steps=2), data)
    by_arm(tmp_path / "runs").train([replace(comparison(ARMS[:1]), base=base, seeds=(0,))])
    shutil.rmtree(data)
    prepare(islice(markov_texts(seed=1), 60), ByteTokenizer(), data, validation_fraction=0.2)
    with pytest.raises(UsageError, match="holds other tokens"):
        by_arm(tmp_path / "runs").train([replace(comparison(ARMS[1:]), base=base, seeds=(0,))])


@pytest.mark.usefixtures("runs")
def test_a_finished_run_with_other_settings_is_not_taken_for_this_one(folder):
    other = [ARMS[0], Arm("scaled", replace(ARMS[1].optimizer, weight_decay=0.5))]
    with pytest.raises(UsageError, match=r"or delete it:\n  optimizer\.weight_decay: 1\.0 there, 0\.5 now"):
        by_arm(folder / "runs").train([comparison(other)])


def test_an_arm_that_diverged_is_in_the_verdict_the_table_and_the_page(tmp_path):
    found = ask(tmp_path, base=tiny_run(steps=20, diverged=1.0), arms=(*ARMS, WILD), claims=True)
    data = numbers(tmp_path)
    steps = data["arms"][2]["diverged"]
    assert set(steps) == {"0", "1"}
    where = f"'wild' diverged at step {steps['0']} (seed 0) and {steps['1']} (seed 1)"
    assert found.sentence.startswith(where)
    assert "'wild' and 'constant' cannot be compared" in found.sentence
    assert "'scaled' and 'constant'" in found.sentence
    assert found.tables[0].rows[2][4].text == "diverged"
    assert where in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [claim.id for claim in found.claims] == ["loss", "norm"]
    assert data["pairs"][1]["mean"] is None


def test_a_preset_keeps_its_name_from_the_command_to_the_page(tmp_path):
    base = tiny_run(steps=4, optimizer={"ns_dtype": "float32"})
    arms = tuple(parse_arm(text, base.optimizer) for text in ("constant", "normuon", "lion/constant,lr=0.001"))
    found = ask(tmp_path, base=base, arms=arms, seeds=1)
    names = ["constant", "normuon/scaled", "lion/constant, lr=0.001"]
    assert [row[0] for row in found.tables[0].rows] == [one["name"] for one in numbers(tmp_path)["arms"]] == names
    assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"normuon-scaled-seed0", "constant-seed0"}
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert all(name in page for name in names)


def test_the_control_is_the_baseline_of_the_scaled_arm(tmp_path):
    ask(tmp_path, control=True)
    data = numbers(tmp_path)
    assert [(one["baseline"], one["arm"]) for one in data["pairs"]] == [("constant", "scaled"), (CONTROL, "scaled")]
    constant, scaled, control = (one["total_decay"] for one in data["arms"])
    assert control == pytest.approx(scaled) != pytest.approx(constant)
    assert data["claims"] == []


# The search for lambda.


def search(loss_of, arms=ARMS[1:], **settings):
    """Tune with losses that are a function of lambda."""
    asked = []

    def train(comparisons):
        asked.append(comparisons[0])
        made = {one.name: loss_of(one.optimizer.weight_decay) for one in comparisons[0].arms}
        return {Key("search"): {name: [SimpleNamespace(**run)] for name, run in made.items()}}

    return tune(train, tiny_run(steps=4), arms, seed=7, **settings), asked


def ended(loss):
    return {"result": {}, "final_loss": loss}


def test_lambda_is_tuned_on_a_seed_of_its_own_and_beyond_the_edge_of_the_grid():
    for wanted, tried, edge in ((1.1, 3, False), (3.9, 5, False), (1e-9, 6, True)):
        (found,), asked = search(lambda lam, wanted=wanted: ended((lam - wanted) ** 2), factors=(0.5, 1.0, 2.0))
        lambdas = sorted(found.losses)
        assert all(larger == pytest.approx(2 * smaller) for smaller, larger in pairwise(lambdas))
        assert found.losses[found.best] == min(found.losses.values())
        assert (len(lambdas), found.at_edge) == (tried, edge), "it stops at an edge only after three extensions"
        assert all(one.seeds == (7,) for one in asked)
        table = sweep_table([found])
        (marked,) = (row[0] for row in table.rows if row[1].tone)
        assert float(marked) == found.best
        assert ("edge" in table.note) == found.at_edge


def test_a_search_goes_no_further_than_a_step_can_take():
    """Every larger lambda is better here, until one would take more than the weight."""
    base, optimizer = tiny_run(steps=4), replace(ARMS[1].optimizer, weight_decay=1.0)
    strong = replace(optimizer, weight_decay=0.4 / max(decay_factors(base, optimizer)))
    (found,), _ = search(lambda lam: ended(-lam), [Arm("strong", strong)])
    assert 0.5 < max(decay_factors(base, found.arm.optimizer)) <= 1.0


def test_where_every_lambda_diverges_none_is_called_best_and_no_more_are_tried():
    found, asked = search(lambda _: {"result": {"diverged": 3}, "final_loss": math.nan})
    assert [len(one.arms) for one in asked] == [len(FACTORS)]
    assert not any(tuned.at_edge for tuned in found)
    table = sweep_table(found)
    assert {(cell.text, cell.tone) for row in table.rows for cell in row[1:]} == {("diverged", "")}
    assert "diverged: lower the learning rate" in table.note


# The verdict.


def test_the_verdict_follows_the_interval():
    clear = verdict(Outcome(BOTH, (pair(GAINS),)))
    assert "'scaled' ended lower than 'constant' over 3 seeds (-0.1000 nats, 95% t interval -0.1248 to -0.0752" in clear
    assert "matched the best loss of 'constant' in 80% of the steps" in clear
    worse = verdict(Outcome(BOTH, (pair((0.10, 0.11, 0.09)),)))
    assert "'scaled' ended higher" in worse
    assert "80%" not in worse
    unsure = verdict(Outcome(BOTH, (pair((-0.10, 0.11, -0.09)),)))
    assert "No significant difference between 'scaled' and 'constant' over 3 seeds" in unsure
    assert all("--tune-lambda" in text for text in (clear, worse, unsure))
    alone = PairOutcome("constant", "scaled", (0,), (0.0,), 0.0, None, (1.0,), None)
    equal = verdict(Outcome(BOTH, (alone,)))
    assert "one seed gives no error bar" in equal
    assert not {"below", "above"} & set(equal.split())


def test_the_verdict_judges_decay_and_lambda_before_the_difference():
    gain = pair(GAINS)
    for lam, words in ((1.0, "too large"), (0.27, "suits"), (0.1, "small")):
        advice = advise_arm(replace(small_run(), steps=420), Arm("", OptimizerConfig(weight_decay=lam)), 1.0)
        text = verdict(Outcome(tuple(replace(one, weight_decay=lam) for one in BOTH), (gain,)), advice=advice)
        places = [text.index(part) for part in ("Decay acts", f"Lambda {lam:g} ", words, "ended lower")]
        assert places == sorted(places)
        assert ("--tune-lambda" in text) == (words != "suits")
    # At lambdas of their own, or where no run of ours tells, nothing is said about them.
    assert "Lambda" not in verdict(Outcome((BOTH[0], replace(BOTH[1], weight_decay=0.5)), (gain,)), advice=advice)
    assert "Lambda" not in verdict(Outcome(BOTH, (gain,)))


@pytest.mark.parametrize(("left", "share"), [(0.2, "80%"), (1.0, "0%"), (-0.3, "100%")])
def test_the_verdict_says_how_much_of_a_gain_is_less_decay(left, share):
    arms = (*BOTH, arm(CONTROL, "constant", total_decay=3.6))
    against_control = pair(tuple(left * gain for gain in GAINS), baseline=CONTROL)
    text = verdict(Outcome(arms, (pair(GAINS), against_control)))
    assert f"So {share} of the gain is explained by less total decay." in text
    unsure = verdict(Outcome(arms, (pair((-0.10, 0.11, -0.09)), against_control)))
    assert "explained" not in unsure


def test_the_verdict_says_when_decay_cannot_matter():
    """The same total as in `muonsw advise` and `muonsw diagnose`; tuning lambda is then no advice."""
    unsure = pair((-0.1, 0.1, 0.0))
    for total, idle in ((0.99 * IDLE, True), (1.01 * IDLE, False)):
        both = (arm("constant", "constant", total_decay=total), arm("scaled", "scaled", total_decay=0.73 * total))
        text = verdict(Outcome(both, (unsure,)))
        assert (text.startswith("Too short for decay to matter"), text.startswith("Decay acts")) == (idle, not idle)
    # What a rule takes that follows the gradients is not known.
    both = (arm("constant", "constant", total_decay=0.0), arm("other", "gradient_norm", total_decay=math.nan))
    assert "Too short" not in verdict(Outcome(both, (unsure,)))


def test_the_verdict_names_skipped_steps_and_lost_seeds_first():
    skipped = verdict(Outcome((BOTH[0], replace(BOTH[1], skipped={0: 7, 2: 1})), (pair(GAINS),)))
    assert skipped.startswith("'scaled' skipped 7 steps (seed 0), 1 step (seed 2), whose gradients were not finite")
    lost = replace(BOTH[1], seeds=(0, 2), final=(3.0, 3.1), diverged={1: 40})
    text = verdict(Outcome((BOTH[0], lost), (pair(GAINS),)))
    assert text.startswith("'scaled' diverged at step 40 (seed 1): it is compared on its other seeds")


# Claims.


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
    runs = {
        rule: [
            written(tmp_path, rule, seed, loss=3.0 - gain * (rule == "scaled"), norms=norms)
            for seed, gain in enumerate(gains)
        ]
        for rule, norms in (("constant", (1.0, 0.5)), ("scaled", scaled))
    }
    one = PairOutcome("constant", "scaled", (0, 1, 2), gains, 0.0, Interval(0, 0, ""), (), None)
    assert [str(claim.verdict) for claim in effects(runs, Outcome(BOTH, (one,)))] == expected
    assert effects(runs, Outcome((BOTH[0], replace(BOTH[1], weight_decay=0.5)), (one,))) == []
    assert effects(runs, Outcome(BOTH, (replace(one, interval=None),))) == []
    unknown = replace(BOTH[1], norm_change=(math.nan,) * 3)
    assert [claim.id for claim in effects(runs, Outcome((BOTH[0], unknown), (one,)))] == ["loss"]
    for other in ({"preset": "normuon"}, {"algorithm": "adamw"}, {"lr": 0.5}):  # of which the paper claims nothing
        runs["scaled"] = [written(tmp_path, "scaled", seed, loss=2.9, norms=scaled, **other) for seed in range(3)]
        assert effects(runs, Outcome(BOTH, (one,))) == []
