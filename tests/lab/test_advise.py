"""Advice before a run: its totals are exact, and on our own records the formula is as good as it claims."""

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.decay import decay_factors
from muonsw.lab.advise import FEW_EPOCHS, TOKENS_PER_PARAMETER, Advise
from muonsw.lab.cli import main
from muonsw.lab.studies import records
from muonsw.lab.theory import schedule
from muonsw.lab.theory.schedule import SHAPES, warmup_cosine, warmup_steps_for_horizon
from tests.faults.commands import refused

ROOT = Path(__file__).parents[2]
RULES = ("scaled", "constant")


def recorded():
    """By setting of Muon with at least three lambdas, the mean loss at each over the seeds that all lambdas share."""
    groups = defaultdict(lambda: defaultdict(dict))
    for row in records.read(ROOT / "research/runs.jsonl"):
        plain = row["algorithm"] == "muon" and row["norm"] == "free"
        if plain and not {"preset", "optimizer.unnormalized", "task"} & set(row) and row["decay"] in RULES:
            key = (row["text"], round(row["epochs"], 2), *(row.get(name) for name in SETTING))
            groups[key][row["weight_decay"]][row["seed"]] = row["final_loss"]
    for (_, epochs, *setting), by_lambda in groups.items():
        seeds = set.intersection(*map(set, by_lambda.values()))
        config = SimpleNamespace(**dict(zip(SETTING, setting, strict=True)))
        if len(by_lambda) >= 3 and seeds and config.steps >= 400:
            means = {lam: statistics.mean(losses[seed] for seed in seeds) for lam, losses in sorted(by_lambda.items())}
            yield config, epochs, means


SETTING = ("width", "base_width", "batch", "steps", "lr", "adam_lr", "decay", "muon_lr", "peak", "schedule",
           "final_fraction", "decay_fraction", "weights")  # fmt: skip
RECORDED = list(recorded())


def advised(config, epochs):
    """What the formula says about a setting; muP divides the learning rate of some."""
    divided = config.lr * (config.width / 256) ** -1 if config.muon_lr == "adam" else config.lr
    return Advise(
        config.steps,
        lr=divided,
        decay=config.decay,
        schedule=config.schedule,
        final_fraction=config.final_fraction,
        decay_fraction=config.decay_fraction,
        base_lr=config.lr if config.peak == "base" else None,
        epochs=epochs,
    ).advice()


def cost(losses, lam):
    """The loss at a lambda minus the lowest, interpolated over log lambda; outside the grid, that of its edge."""
    return np.interp(math.log(lam), np.log(list(losses)), list(losses.values())) - min(losses.values())


@pytest.mark.parametrize("rule", RULES)
def test_total_decay_of_one_is_nearly_the_best_in_our_records(rule):
    """At most the 0.004 nats in the median and 0.05 at learning rates up to 0.02 that `muonsw advise` prints."""
    ours = [
        (config.lr, advised(config, epochs).low, losses)
        for config, epochs, losses in RECORDED
        if config.decay == rule and config.schedule == "cosine" and epochs < 5
    ]
    regrets = [(lr, cost(losses, lam)) for lr, lam, losses in ours]
    assert len(regrets) >= 19
    assert statistics.median(regret for _, regret in regrets) < {"constant": 0.0025, "scaled": 0.0035}[rule]
    assert max(regret for lr, regret in regrets if lr <= 0.02) < 0.05
    tenfold = [cost(losses, 10 * lam) for _, lam, losses in ours if len(losses) > 4]
    assert statistics.median(tenfold) > 0.01, "a wrong lambda would show"


@pytest.mark.parametrize("rule", RULES)
def test_a_flat_rate_needs_a_quarter_of_the_lambda_or_less(rule):
    wsd = [
        (advised(config, epochs).low, losses)
        for config, epochs, losses in RECORDED
        if config.decay == rule and config.schedule == "wsd" and config.decay_fraction < 0.5
    ]
    assert len(wsd) >= 2
    assert all(cost(losses, lam) < 0.005 for lam, losses in wsd)
    cosine = Advise(1_600, decay=rule).advice().low
    assert all(lam < 0.26 * cosine for lam, _ in wsd)
    assert Advise(1_600, decay=rule, schedule="constant").advice().low < 0.25 * cosine


@pytest.mark.parametrize("rule", RULES)
def test_repeated_text_needs_twenty_times_the_lambda_or_more(rule):
    ((config, epochs, losses),) = [s for s in RECORDED if round(s[1]) == 16 and s[0].decay == rule]
    often, once = advised(config, epochs).low, advised(config, 1.0).low
    assert often / once >= 20
    assert cost(losses, often) < 0.1
    assert cost(losses, once) > 0.5
    assert advised(config, FEW_EPOCHS).low == once
    assert once < advised(config, 8.0).low < often == advised(config, 100.0).low


def test_only_pretraining_gets_a_lambda():
    for weight_decay, verdict in ((None, ""), (0.001, ""), (0.5, "large")):
        advice = Advise(2_000, weight_decay=weight_decay, training="lora").advice()
        assert (advice.low, advice.high, advice.verdict) == (None, None, verdict)


def test_a_run_in_which_no_lambda_acts_gets_none():
    for steps, lr in ((2_000, 1e-5), (20, 0.02)):
        advice = Advise(steps, lr=lr, weight_decay=0.01).advice()
        assert (advice.low, advice.verdict) == (None, "")
        assert advice.answer.startswith("Decay is too weak to matter in this run")


def test_a_large_lambda_in_a_short_run_is_judged_by_its_total():
    for lam, verdict in ((1.0, ""), (5.0, "fine"), (20.0, "large")):
        advice = Advise(20, weight_decay=lam).advice()
        assert (advice.low, advice.verdict) == (None, verdict)


def test_verdicts_follow_the_total():
    best = Advise(2_000).advice().low
    verdicts = {0.0: "small", 0.4: "small", 0.6: "fine", 1.0: "fine", 1.9: "fine", 2.1: "large"}
    for factor, verdict in verdicts.items():
        advice = Advise(2_000, weight_decay=factor * best).advice()
        assert (advice.total, advice.verdict) == (pytest.approx(factor), verdict)
    assert advice.answer.startswith(f"Try lambda {best:.2g} ")


@pytest.mark.parametrize(
    "far",
    [
        {"steps": 80_000},
        {"steps": 190},
        {"steps": 10_000, "tokens_per_parameter": 1000},
        {"steps": 10_000, "algorithm": "adamw"},
    ],
)
def test_a_run_far_from_ours_gets_a_range(far):
    advice = Advise(**far).advice()
    assert advice.high == pytest.approx(8 * advice.low)
    near = Advise(10_000, tokens_per_parameter=TOKENS_PER_PARAMETER).advice()
    assert near.low == near.high


@pytest.mark.parametrize("rule", RULES)
def test_the_total_is_the_sum_over_the_schedule(rule, monkeypatch):
    warmup = warmup_steps_for_horizon(1_000)
    rates = [0.02 * warmup_cosine(step, total_steps=1_000, warmup_steps=warmup) for step in range(1_000)]
    exact = math.fsum(decay_factors(rule, 0.1, rates, 0.02))
    assert Advise(1_000, weight_decay=0.1, decay=rule).advice().total == pytest.approx(exact, rel=1e-9)
    monkeypatch.setattr(schedule, "MOST_STEPS", 500)
    assert Advise(1_000, weight_decay=0.1, decay=rule).advice().total == pytest.approx(exact, rel=1e-2)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 10**9),
    lr=st.floats(1e-7, 0.5),
    lam=st.none() | st.floats(0, 1.9),
    shape=st.sampled_from(SHAPES),
    algorithm=st.sampled_from(["muon", "adamw"]),
    epochs=st.floats(0.01, 1e3),
)
def test_a_lambda_to_try_can_be_tried(steps, lr, lam, shape, algorithm, epochs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "MOST_STEPS", 50)
        run = Advise(steps, lr=lr, weight_decay=lam, schedule=shape, algorithm=algorithm, epochs=epochs)
        advice = run.advice()
        if advice.low is not None:
            again = replace(run, weight_decay=(advice.low * advice.high) ** 0.5).advice()
            assert again.verdict == "fine"
            assert advice.high * lr < 1


def test_the_command_answers_first_and_names_bad_numbers(capsys):
    words = ["advise", "--steps", "1600", "--weight-decay", "0.5", "--schedule", "wsd", "--epochs", "8"]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("Try lambda ")
    bad = {"--steps": "0", "--lr": "0", "--weight-decay": "-1", "--schedule": "linear"}
    for option, value in bad.items():
        assert f"{option[2:].replace('-', '_')}=" in refused("advise", "--steps", "100", option, value)
