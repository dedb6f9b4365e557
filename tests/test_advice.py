"""Advice before a run: its sums are exact, its norms are those that our runs had, its lambdas those that were best."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muonsw import DECAY_RULES, advice, advise
from muonsw.decay import decay_factors
from muonsw.recipes import IDLE
from muonsw.schedule import warmup_cosine, warmup_steps_for_horizon
from muonsw.theory import next_norm, norms_with_memory

ROOT = Path(__file__).parents[1]
RECORDS = [json.loads(line) for line in (ROOT / "evidence" / "regret-mini.jsonl").read_text().splitlines()]
RULES = [rule for rule in DECAY_RULES if not DECAY_RULES[rule].uses_gradient]


def rates(steps, lr):
    warmup = warmup_steps_for_horizon(steps)
    return [lr * warmup_cosine(t, total_steps=steps, warmup_steps=warmup) for t in range(steps)]


@pytest.mark.parametrize("rule", RULES)
def test_what_decay_takes_is_the_sum_over_the_schedule(rule):
    lam = {"fixed": 0.001, "independent": 0.002}.get(rule, 0.1)
    (found,) = advise(1_000, 0.02, lam, rules=(rule,)).rules
    expected = decay_factors(rule, lam, rates(1_000, 0.02), 0.02)
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
    whole = advise(30_000, 0.01, 0.1, rules=RULES)
    monkeypatch.setattr(advice, "MOST_STEPS", 40_000)
    for a, b in zip(whole.rules, advise(30_000, 0.01, 0.1, rules=RULES).rules, strict=True):
        assert a.total == pytest.approx(b.total, rel=1e-3)
        assert a.end_norm == pytest.approx(b.end_norm, rel=2e-3)


def test_norms_are_those_of_our_runs():
    """Nothing is fitted but the memory, once for all runs: within a tenth of every end norm that was measured."""
    seen = [record for record in RECORDS if record["seed"] == 0]
    assert len(seen) >= 44
    for record in seen:
        (found,) = advise(record["steps"], record["lr"], record["lambda"], rules=(record["rule"],)).rules
        assert found.end_norm == pytest.approx(record["end_norm"], rel=0.1), record


def test_the_lambda_to_try_takes_what_was_best():
    for rule in ("constant", "scaled", "cosine"):
        (first,) = advise(5_000, 0.01, 0.1, rules=(rule,)).rules
        best, low, high = advice.best_totals(rule)
        for lam, total in ((first.weight_decay, best), (first.low, low), (first.high, high)):
            assert advise(5_000, 0.01, lam, rules=(rule,)).rules[0].total == pytest.approx(total)
        assert first.low < first.weight_decay < first.high
    assert not advise(5_000, 0.01, 0.1, rules=("cosine",)).rules[0].own


@pytest.mark.parametrize("rule", ["constant", "scaled"])
def test_the_cost_is_that_of_the_same_lambda_in_our_longest_runs(rule):
    """At the lambdas that were tried, except the outermost, it is their mean loss above the best one's."""
    steps = max(record["steps"] for record in RECORDS)
    runs = [record for record in RECORDS if (record["steps"], record["rule"]) == (steps, rule)]
    seeds = {record["seed"] for record in runs if record["lambda"] == 0.8}  # the last of a seed to be made
    runs = [record for record in runs if record["seed"] in seeds]
    lambdas = sorted({record["lambda"] for record in runs})
    mean = {lam: math.fsum(r["final_loss"] for r in runs if r["lambda"] == lam) / len(seeds) for lam in lambdas}
    for lam in lambdas[1:-1]:
        (found,) = advise(steps, runs[0]["lr"], lam, rules=(rule,)).rules
        assert found.cost == pytest.approx(mean[lam] - min(mean.values()), abs=5e-4)
    (beyond,) = advise(steps, runs[0]["lr"], 2 * lambdas[-1], rules=(rule,)).rules
    assert beyond.cost is None
    assert "more than we tried" in advise(steps, runs[0]["lr"], 2 * lambdas[-1], rules=(rule,)).sentences[0]


def test_verdicts_follow_what_decay_takes():
    first = advise(2_000, 0.02, 0.1).rules[0]
    good, per_lambda = first.weight_decay, first.total / 0.1
    verdicts = [advise(2_000, 0.02, lam).verdict for lam in (0.0, 0.9 * IDLE / per_lambda, good, good * 5)]
    assert verdicts == ["none", "idle", "good", "strong"]
    between = (IDLE / per_lambda + first.low) / 2
    assert advise(2_000, 0.02, between).verdict == ("mild" if between < first.low else "good")
    strong = str(advise(2_000, 0.02, good * 5))
    assert "Decay is strong: 5.0 times what was best" in strong
    assert "times beyond what was measured" in str(advise(10**6, 0.002, 0.1))
    assert "None of this was measured for AdamW" in str(advise(2_000, 0.002, 0.1, algorithm="adamw"))


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
    schedule=st.sampled_from(advice.SCHEDULES),
    algorithm=st.sampled_from(["muon", "adamw"]),
)
@example(steps=4_000_000, lr=0.5, lam=5e-324, schedule="constant", algorithm="muon")
@example(steps=10**9, lr=0.5, lam=0.0, schedule="constant", algorithm="adamw")
def test_it_fits_eighty_columns_and_is_data(steps, lr, lam, schedule, algorithm):
    monkey, advice.MOST_STEPS = advice.MOST_STEPS, 50
    try:
        found = advise(steps, lr, lam, schedule=schedule, algorithm=algorithm)
    finally:
        advice.MOST_STEPS = monkey
    assert max(map(len, str(found).splitlines())) < 80
    assert json.loads(json.dumps(found.as_data(), allow_nan=False))["steps"] == steps


def test_bad_numbers_are_named():
    for changes, words in [
        ({"steps": 0}, "steps=0: must be a whole number"),
        ({"peak_lr": 0.0}, "peak_lr=0.0: must be a positive number"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0: must be a number of at least 0"),
        ({"schedule": "linear"}, "schedule='linear': must be one of cosine, wsd, constant"),
        ({"algorithm": "sgd"}, "algorithm='sgd': must be one of muon, adamw"),
        ({"rules": ("gradient_norm",)}, "'gradient_norm' follows the gradients"),
        ({"rules": ("scale",)}, r"unknown decay rule 'scale' \(did you mean 'scaled'\?\)"),
        ({"rules": ()}, "name at least one"),
        ({"weight_decay": 100.0}, "would take 2 times the weight in one step"),
    ]:
        with pytest.raises(ValueError, match=words):
            advise(**{"steps": 100, "peak_lr": 0.02, "weight_decay": 0.1, **changes})
