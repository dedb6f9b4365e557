"""Advice before a run: its sums are exact, its norms are those that our runs had, its lambdas those that were best."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muonsw import DECAY_RULES
from muonsw.decay import decay_factors
from muonsw.lab import advice
from muonsw.lab.advice import advise
from muonsw.lab.recipes import IDLE
from muonsw.lab.runs.records import Records
from muonsw.lab.studies.arms import hidden_multiplier
from muonsw.lab.theory import next_norm, norms_with_memory, schedule
from muonsw.lab.theory.schedule import SHAPES, warmup_cosine, warmup_steps_for_horizon
from tests.common.problems import POINTS

ROOT = Path(__file__).parents[1]
RUNS, FRESH = (list(Records.read(ROOT / "evidence" / f"enwiki-{text}.jsonl").runs.values()) for text in ("23M", "123M"))
MAP = RUNS[0].config
KNOWN = advice.measured()
RULES = [rule for rule in DECAY_RULES if not DECAY_RULES[rule].uses_gradient]


def rates(steps, lr):
    warmup = warmup_steps_for_horizon(steps)
    return [lr * warmup_cosine(t, total_steps=steps, warmup_steps=warmup) for t in range(steps)]


@pytest.mark.parametrize("rule", RULES)
def test_what_decay_takes_is_the_sum_over_the_schedule(rule):
    lam = {"fixed": 0.001, "independent": 0.002}.get(rule, 0.1)
    (found,) = advise(1_000, 0.02, lam, rules=(rule,), decay_points=POINTS).rules
    expected = decay_factors(rule, lam, rates(1_000, 0.02), 0.02, POINTS)
    assert found.total == pytest.approx(math.fsum(expected), rel=1e-9)
    assert found.phi_peak == pytest.approx(max(expected), rel=1e-9)
    assert found.left == pytest.approx(math.exp(-math.fsum(expected)))


def test_the_recursion_is_that_of_the_theory():
    """With the alignment that memory makes, one step of the square is one step of `next_norm`."""
    s, phi, memory = [0.01, 0.02, 0.005, 0.3], [0.1, 0.0, 0.01, 0.2], 30.0
    norms, r = norms_with_memory(0.5, s=s, phi=phi, memory=memory), 0.5
    for size, share, now in zip(s, phi, norms[1:], strict=True):
        r = next_norm(r, s=size, phi=share, a=max(-1.0, -(memory - 1) * size / (2 * r)))
        assert now == pytest.approx(r, rel=1e-12)


def test_long_runs_are_summed_in_parts(monkeypatch):
    whole = advise(30_000, 0.01, 0.1, rules=RULES, decay_points=POINTS)
    monkeypatch.setattr(schedule, "MOST_STEPS", 40_000)
    for a, b in zip(whole.rules, advise(30_000, 0.01, 0.1, rules=RULES, decay_points=POINTS).rules, strict=True):
        assert a.total == pytest.approx(b.total, rel=1e-3)
        assert a.end_norm == pytest.approx(b.end_norm, rel=2e-3)


def known(run):
    """Whether advice can be asked about a run: every one but AdamW's, norm rules, and rules that follow gradients."""
    chosen = run.config.optimizer
    plain = chosen.algorithm == "muon" and chosen.norm == "free" and not chosen.unnormalized
    return plain and not DECAY_RULES[chosen.decay].uses_gradient


def about(run):
    """What advice says of a run; muP divides the learning rate of some."""
    return advised(replace(run.config, seed=0))


@cache
def advised(config):
    chosen = config.optimizer
    options = {
        "schedule": config.schedule.shape,
        "decay_fraction": config.schedule.decay_fraction,
        "final_fraction": config.schedule.final_fraction,
        "base_peak_lr": chosen.lr if chosen.peak == "base" else None,
        "rules": (chosen.decay,),
        "decay_points": chosen.decay_points,
    }
    return advise(config.steps, chosen.lr * hidden_multiplier(config, chosen), chosen.weight_decay, **options)


def test_norms_are_those_of_our_runs():
    """Nothing is fitted but the memory, once for all runs: within an eighth of every end norm at width 128.

    Whatever the schedule, the length, the precision and how often text was seen; within a fifth where decay rises.
    A rate of 0.08 is unstable, and decay that takes more than momentum forgets shrinks what momentum adds.
    """
    every = [*RUNS, *Records.read(ROOT / "evidence" / "enwiki-123M.jsonl").runs.values()]
    seen = [run for run in every if known(run) and run.config.model.width == 128 and run.config.optimizer.lr < 0.08]
    seen = [run for run in seen if math.isfinite(run.final_norm)]
    seen = [run for run in seen if run.config.optimizer.weight_decay * run.config.optimizer.lr < 0.05]
    assert len(seen) >= 300
    for run in seen:
        slack = 0.2 if run.config.optimizer.decay == "piecewise" else 0.125
        assert about(run).rules[0].end_norm == pytest.approx(run.final_norm, rel=slack), run.settings


def columns():
    """By rule and length, by lambda: runs of the regret map below 6,400 updates, and the long ones on fresh text."""
    found = {}
    shorter = [(run, MAP.batch) for run in RUNS if run.config.steps < 6_400]
    longer = [(run, MAP.batch // 2) for run in FRESH if run.config.steps >= 6_400]
    for run, batch in shorter + longer:
        config, chosen = run.config, run.config.optimizer
        shared = replace(MAP.optimizer, decay=chosen.decay, weight_decay=chosen.weight_decay, lr=chosen.lr)
        alike = (config.model, config.data.train_windows, config.batch, config.schedule, config.weights, chosen) == (
            *(MAP.model, None, batch, MAP.schedule, MAP.weights, shared),
        )
        if alike and known(run) and chosen.decay != "none":
            found.setdefault((chosen.decay, config.steps), {}).setdefault(chosen.weight_decay, []).append(run)
    return found


def mean_loss(runs):
    return math.fsum(run.final_loss for run in runs) / len(runs)


def test_advice_gives_back_what_was_measured_at_every_measured_setting():
    """Cost, verdict, range and lambda to try, of each rule at each length and lambda that our runs tried."""
    checked = 0
    for column in columns().values():
        means = {lam: mean_loss(runs) for lam, runs in column.items()}
        best = min(means, key=means.get)
        for lam, runs in column.items():
            found, cost = about(runs[0]), means[lam] - means[best]
            rule = found.rules[0]
            assert rule.own
            assert rule.cost == pytest.approx(cost, abs=2e-4)
            assert rule.low <= best * (1 + 1e-3)
            assert best <= rule.high * (1 + 1e-3)
            assert rule.low <= rule.weight_decay * (1 + 1e-3)
            assert best / 2 <= rule.weight_decay <= best * 2
            if found.verdict != "idle":
                worse = "mild" if lam < best else "strong"
                assert found.verdict == ("good" if cost <= advice.measured()["good"] else worse)
            checked += 1
    assert checked >= 53


def of_other_widths():
    """The runs of the main table near its best lambdas, and those in which lambda is followed over widths."""
    fresh = [run for run in FRESH if known(run) and run.config.steps == 1_600 and run.config.optimizer.clip == 1.0]
    table = [run for run in fresh if run.config.optimizer.muon_lr == "adam"]
    near = [run for run in table if run.config.optimizer.lr == 0.02 and run.config.optimizer.weight_decay > 0.105]
    followed = [run for run in fresh if (run.config.optimizer.lr, run.config.optimizer.adam_lr) == (0.01, 0.02)]
    return {"table": near, "followed": [run for run in followed if run.config.model.width > 64]}


@pytest.mark.parametrize(("study", "widths", "slack"), [("table", 2, 0.015), ("followed", 3, 0.025)])
def test_what_decay_takes_in_all_tells_its_cost_at_other_widths_too(study, widths, slack):
    """Of the table the matched lambdas are beyond what was tried."""
    losses = {}
    for run in of_other_widths()[study]:
        arms = losses.setdefault((run.config.model.width, run.config.optimizer.decay), {})
        arms.setdefault((run.config.optimizer.weight_decay, run.config.optimizer.peak), []).append(run)
    assert len({width for width, _ in losses}) == widths
    for arms in losses.values():
        means = {arm: mean_loss(runs) for arm, runs in arms.items()}
        for arm, runs in arms.items():
            found, cost = about(runs[0]), means[arm] - min(means.values())
            predicted = found.rules[0].cost
            assert predicted == pytest.approx(cost, abs=slack) if predicted is not None else cost > 0.1


def test_between_two_lengths_advice_lies_between_them():
    for rule in ("constant", "scaled"):
        lengths = sorted(one["steps"] for one in KNOWN["optima"] if one["rule"] == rule)
        totals = [advice.best_totals(rule, steps)[0] for steps in (lengths[0] // 4, *lengths, 10**6)]
        assert (totals[0], totals[-1]) == (totals[1], totals[-2])
        for (before, after), ends in zip(pairwise(lengths), pairwise(totals[1:-1]), strict=True):
            between = advice.best_totals(rule, round(math.sqrt(before * after)))[0]
            assert between == pytest.approx(math.sqrt(math.prod(ends)), rel=1e-3)
        (first,) = advise(3_000, 0.02, 0.1, rules=(rule,)).rules
        (again,) = advise(3_000, 0.02, first.weight_decay, rules=(rule,)).rules
        assert again.total == pytest.approx(advice.best_totals(rule, 3_000)[0])


def test_beyond_the_lambdas_that_were_tried_no_cost_is_reported():
    found = advise(6_400, 0.01842, 1.6)
    assert [one.cost for one in found.rules] == [None, None]
    assert "beyond the lambdas that were tried in our runs of 6,400 updates" in found.sentences[0]


def test_rules_that_differ_by_a_factor_of_lambda_cost_the_same():
    """`squared` is `scaled` with the peak in its lambda, and `independent` is `constant` in the same way."""
    constant, scaled = advise(1_600, 0.02, 0.2).rules
    (squared,) = advise(1_600, 0.02, 0.2 / 0.02, rules=("squared",)).rules
    (independent,) = advise(1_600, 0.02, 0.2 * 0.02, rules=("independent",)).rules
    assert (squared.cost, independent.cost) == (pytest.approx(scaled.cost), pytest.approx(constant.cost))


def test_verdicts_follow_what_decay_takes():
    first = advise(2_000, 0.02, 0.1).rules[0]
    good, per_lambda = first.weight_decay, first.total / 0.1
    verdicts = [advise(2_000, 0.02, lam).verdict for lam in (0.0, 0.9 * IDLE / per_lambda, good, good * 5)]
    assert verdicts == ["none", "idle", "good", "strong"]
    between = (IDLE / per_lambda + first.low) / 2
    assert advise(2_000, 0.02, between).verdict == ("mild" if between < first.low else "good")
    strong = str(advise(2_000, 0.02, good * 5))
    assert "Decay is strong: 5.0 times what was best" in strong
    beyond = " ".join(str(advise(10**6, 0.002, 0.1)).split())
    ratio = 10**6 / max(one["steps"] for one in KNOWN["optima"] if one["rule"] == "constant")
    assert f"this run is {float(f'{ratio:.2g}'):.0f} times longer than what was measured" in beyond
    assert "None of this was measured for AdamW" in str(advise(2_000, 0.002, 0.1, algorithm="adamw"))


def test_a_total_at_the_end_of_what_was_tried_is_marked_and_not_extrapolated(monkeypatch):
    def limits(**of_the_last):
        own = [one for one in KNOWN["optima"] if one["rule"] == "constant"]
        known = [*own[:-1], {**own[-1], **of_the_last}]
        monkeypatch.setattr(advice, "measured", lambda: {**KNOWN, "optima": known})
        return " ".join(advise(10**6, 0.002, 0.1, rules=("constant",)).limits)

    assert "if that goes on changing" in limits(at_an_end=False, total=1.5)
    marked = limits(at_an_end=True, total=1.5)
    assert "1.5* at" in marked
    assert "if that goes on changing" not in marked


def test_absurd_lengths_are_told_in_words_and_plain_numbers():
    shortest, longest = (" ".join(str(advise(steps, 0.02, 0.1)).split()) for steps in (1, 10**9))
    assert "times shorter than what was measured" in shortest
    assert "times longer than what was measured" in longest
    for text in (shortest, longest):
        sentences = text.partition("try: a lambda.")[2]
        assert re.search(r"\de\+\d", sentences) is None


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("lr", [0.02, 0.0167, 0.0095])
def test_lambdas_to_try_can_be_tried(steps, lr):
    advice = advise(steps, lr, 0.1)
    for one in advice.rules:
        assert one.low <= one.weight_decay <= one.high
        advise(steps, lr, float(f"{one.high:.2g}"), rules=[one.rule])
    assert ("no lambda" in str(advice)) == (steps <= 2)


def test_a_rule_without_decay_has_no_lambda_to_speak_of():
    """One that decays and was not measured has constant decay's."""
    assert "Lambdas of" not in " ".join(advise(1_000, 0.02, 0.1, rules=("none",)).limits)
    both = advise(1_000, 0.02, 0.1, rules=("none", "piecewise"), decay_points=((0.0, 1.0), (1.0, 0.0)))
    assert "Lambdas of piecewise are" in " ".join(both.limits)


def test_under_a_flat_rate_both_rules_are_one():
    constant, scaled = advise(2_000, 0.02, 0.1, schedule="constant", warmup_steps=0).rules
    assert constant.total == pytest.approx(scaled.total)
    assert constant.end_norm == pytest.approx(scaled.end_norm)
    wsd = advise(2_000, 0.02, 0.1, schedule="wsd", decay_fraction=0.1, final_fraction=0.0).rules
    cosine = advise(2_000, 0.02, 0.1).rules
    assert wsd[1].total / wsd[0].total > cosine[1].total / cosine[0].total


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 10**9),
    lr=st.floats(1e-7, 0.5),
    lam=st.floats(0, 1.9),
    shape=st.sampled_from(SHAPES),
    algorithm=st.sampled_from(["muon", "adamw"]),
)
@example(steps=4_000_000, lr=0.5, lam=5e-324, shape="constant", algorithm="muon")
@example(steps=10**9, lr=0.5, lam=0.0, shape="constant", algorithm="adamw")
def test_it_fits_eighty_columns_and_is_data(steps, lr, lam, shape, algorithm):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("muonsw.lab.theory.schedule.MOST_STEPS", 50)
        found = advise(steps, lr, lam, schedule=shape, algorithm=algorithm)
    assert max(map(len, str(found).splitlines())) < 80
    assert json.loads(json.dumps(found.as_data(), allow_nan=False))["steps"] == steps


def test_sizes_that_were_not_measured_change_nothing(monkeypatch):
    monkeypatch.setattr(advice, "measured", lambda: {**KNOWN, "scaling": []})
    plain, sized = advise(1_600, 0.02, 0.1), advise(1_600, 0.02, 0.1, width=512, batch_tokens=500_000)
    assert sized.rules == plain.rules
    assert sum("was not measured: the lambdas to try do not depend on it" in limit for limit in sized.limits) == 2
    assert not any("not measured: the lambdas to try" in limit for limit in plain.limits)


def test_lambda_follows_what_was_found_with_its_uncertainty(monkeypatch):
    width = {"rule": "scaled", "of": "width", "from": 128, "power": -0.5, "low": -0.8, "high": -0.2}
    batch = {"rule": "scaled", "of": "batch", "from": 16_384, "power": 0.0, "low": -0.1, "high": 0.1}
    monkeypatch.setattr(advice, "measured", lambda: {**KNOWN, "scaling": [width, batch]})
    (plain,) = advise(1_600, 0.02, 0.1, rules=("scaled",)).rules
    found = advise(1_600, 0.02, 0.1, rules=("scaled",), width=512)
    (wide,) = found.rules
    assert wide.weight_decay == pytest.approx(plain.weight_decay / 2)
    assert (wide.low, wide.high) == (pytest.approx(plain.low * 4**-0.8), pytest.approx(plain.high * 4**-0.2))
    assert any("by the power -0.5 (-0.8 to -0.2, 95% t interval over seeds)" in limit for limit in found.limits)
    (larger,) = advise(1_600, 0.02, 0.1, rules=("scaled",), batch_tokens=4 * 16_384).rules
    (longer,) = advise(6_400, 0.02, 0.1, rules=("scaled",)).rules
    # The total of the best lambda is that of four times the updates, which see as many tokens.
    assert larger.weight_decay * larger.total == pytest.approx(longer.weight_decay * longer.total)
    (other,) = advise(1_600, 0.02, 0.1, rules=("constant",), width=512).rules
    assert other == advise(1_600, 0.02, 0.1, rules=("constant",)).rules[0]


def test_a_power_that_is_hardly_known_is_said_and_not_followed(monkeypatch):
    """One so uncertain would carry lambda to 76 times another one at 32 times the width, or to twice."""
    width = {"rule": "constant", "of": "width", "from": 128, "power": 1.25, "low": 0.2, "high": 2.3}
    monkeypatch.setattr(advice, "measured", lambda: {**KNOWN, "scaling": [width]})
    plain, wide = (advise(1_600, 0.02, 0.1, rules=("constant",), width=width) for width in (None, 4_096))
    assert wide.rules == plain.rules
    (said,) = set(wide.limits) - set(plain.limits)
    assert "not known well enough, by the power 1.2 (0.2 to 2.3, 95% t interval over seeds)" in said


def test_what_a_lambda_costs_follows_the_width_and_the_batch_as_the_lambda_to_try_does(monkeypatch):
    width = {"rule": "constant", "of": "width", "from": 128, "power": 0.5, "low": 0.2, "high": 0.8}
    batch = {"rule": "constant", "of": "batch", "from": 16_384, "power": 0.5, "low": 0.4, "high": 0.6}
    monkeypatch.setattr(advice, "measured", lambda: {**KNOWN, "scaling": [width, batch]})
    for sizes, steps in (({"width": 4_096}, 1_600), ({"batch_tokens": 64 * 16_384}, 100)):
        (tried,) = advise(steps, 0.02, 0.1, rules=("constant",), **sizes).rules
        found = advise(steps, 0.02, tried.weight_decay, rules=("constant",), **sizes)
        assert found.verdict == "good"
        assert "takes 1.0 times what was best in our runs of" in found.sentences[0]
        more = advise(steps, 0.02, 4 * tried.weight_decay, rules=("constant",), **sizes)
        assert more.verdict == "strong"
        assert "4.0 times what was best" in more.sentences[0]
    assert "in our runs of 6,400 updates" in found.sentences[0]  # which saw as many tokens
    assert not any("shorter than what was measured" in limit for limit in found.limits)


def test_a_norm_of_any_size_is_shown_in_a_few_digits():
    shown = str(advise(100, 0.02, 0.1, initial_rms=1e100))
    assert "8.97e+99" in shown
    assert max(map(len, shown.split())) < 40


def test_bad_numbers_are_named():
    for changes, words in [
        ({"steps": 0}, "steps=0: must be a whole number"),
        ({"peak_lr": 0.0}, "peak_lr=0.0: must be a positive number"),
        ({"initial_rms": 1e300}, r"initial_rms=1e\+300: must be a positive number of at most 1e\+100"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0: must be a number of at least 0"),
        ({"schedule": "linear"}, "schedule='linear' must be one of cosine, wsd, constant"),
        ({"algorithm": "sgd"}, "algorithm='sgd': must be one of muon, adamw"),
        ({"rules": ("gradient_norm",)}, "'gradient_norm' follows the gradients"),
        ({"rules": ("piecewise",)}, "'piecewise' goes through points: pass decay_points="),
        ({"rules": ("scale",)}, r"unknown decay rule 'scale' \(did you mean 'scaled'\?\)"),
        ({"rules": ()}, "name at least one"),
        ({"width": 0}, "width=0: must be at least 1"),
        ({"momentum": 1.0}, "momentum=1.0: must be at least 0 and below 1"),
        ({"momentum": math.nan}, "momentum=nan: must be at least 0 and below 1"),
        ({"weight_decay": 100.0}, "would take 2 times the weight in one step"),
    ]:
        with pytest.raises(ValueError, match=words):
            advise(**{"steps": 100, "peak_lr": 0.02, "weight_decay": 0.1, **changes})
