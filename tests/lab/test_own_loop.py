"""Runs of a loop of one's own, compared."""

import json
import math
import re

import pytest
import torch

from muonsw import MuonSW, Telemetry
from muonsw.lab import compare_arms
from muonsw.lab.errors import UsageError
from muonsw.lab.stats import t_interval
from muonsw.telemetry import JsonlSink


def trained(rule, seed, folder, steps=30):
    """A loop as a user has one: losses and a metric by update, and a file of telemetry."""
    torch.manual_seed(seed)
    x, model = torch.randn(64, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.5, decay=rule, ns_dtype="float32")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    path, losses = folder / f"{rule}-{seed}.jsonl", {}
    with JsonlSink(path) as sink, Telemetry(optimizer, every=5, sink=sink):
        for step in range(1, steps + 1):
            loss = (model(x).squeeze(1) - x[:, 0]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % 10 == 0:
                losses[step] = {"loss": loss.item(), "error": loss.sqrt().item()}
    return losses, path


def test_losses_metrics_and_telemetry_of_own_runs_are_compared(tmp_path):
    ends = {}

    def make_run(rule, seed):
        losses, path = trained(rule, seed, tmp_path)
        ends[rule, seed] = losses[30]["loss"]
        return losses, path

    found = compare_arms(make_run, ["constant", "scaled"], 3, folder=tmp_path / "page")
    gaps = [ends["scaled", seed] - ends["constant", seed] for seed in range(3)]
    (pair,) = found.outcome.pairs
    assert pair.differences == pytest.approx(gaps)
    assert pair.interval.high == pytest.approx(t_interval(torch.tensor(gaps, dtype=torch.float64)).high)
    assert set(pair.metrics) == {"error"}
    assert [arm.rule for arm in found.outcome.arms] == ["constant", "scaled"]  # as telemetry shows it
    assert all(math.isfinite(norm) for arm in found.outcome.arms for norm in arm.norm)
    assert "error" in str(found)
    assert "Weight norm" in found.page.read_text(encoding="utf-8").split("<script")[0]
    assert json.loads((tmp_path / "page" / "outcome.json").read_text(encoding="utf-8"))["verdict"] == found.verdict


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_metric_that_ends_without_a_number_is_not_replaced_by_an_earlier_one(lost, tmp_path):
    def make_run(arm, seed):
        end = lost if (arm, seed) == ("b", 1) else 30.0 + seed
        return {5: {"loss": 3.0, "perplexity": 20.0}, 10: {"loss": 2.5, "perplexity": end}}

    found = compare_arms(make_run, "ab", 3, folder=tmp_path)
    (pair,) = found.outcome.pairs
    assert not math.isfinite(pair.metrics["perplexity"].mean)
    assert "perplexity" not in found.verdict, "no difference is claimed"
    whole, broken = json.loads((tmp_path / "outcome.json").read_text(encoding="utf-8"))["arms"]
    assert whole["metrics"]["perplexity"] == [30.0, 31.0, 32.0]
    assert broken["metrics"]["perplexity"] == [30.0, None, 32.0]
    assert "20" not in str(found).split("perplexity", 1)[1]
    assert not re.search(r"\b(nan|inf)\b", str(found))


def test_what_make_run_may_return(tmp_path):
    def make_run(arm, seed):
        return {"list": [3.0, 2.0 + seed], "steps": {5: 3.0, 10: 2.5 + seed}, "tensor": torch.tensor([1.0]).tolist()}[
            arm
        ]

    found = compare_arms(make_run, ["list", "steps", "tensor"], [4, 7], folder=tmp_path)
    assert [arm.final for arm in found.outcome.arms] == [(6.0, 9.0), (6.5, 9.5), (1.0, 1.0)]
    assert found.outcome.arms[0].seeds == (4, 7)
    assert "nats" not in str(found)


def test_a_run_that_ends_without_a_finite_loss_has_diverged(tmp_path):
    found = compare_arms(
        lambda arm, seed: [1.0, math.nan if (arm, seed) == ("b", 1) else 0.5], "ab", 3, folder=tmp_path
    )
    assert found.outcome.arms[1].diverged == {1: 2}
    assert "'b' diverged at update 2 (seed 1)" in found.verdict


def test_seeds_that_stopped_at_different_updates_are_compared(tmp_path):
    found = compare_arms(lambda arm, seed: {10 + seed: 2.0 + 0.1 * seed - (arm == "b")}, ["a", "b"], folder=tmp_path)
    assert found.outcome.pairs[0].differences == pytest.approx([-1.0] * 3)
    assert found.page.is_file()


@pytest.mark.parametrize("wrong", [None, "abc", [], {}, {1: {"accuracy": 1.0}}, {1: "x"}, 3.0])
def test_something_else_than_losses_is_refused_by_name(wrong, tmp_path):
    with pytest.raises(UsageError, match=r"make_run\('a', 0\).*expected losses"):
        compare_arms(lambda _arm, _seed: wrong, ["a", "b"], folder=tmp_path)


def test_one_arm_is_no_comparison(tmp_path):
    with pytest.raises(UsageError, match="two arms and a seed, not 1 and 3"):
        compare_arms(lambda _arm, _seed: [1.0], ["a"], folder=tmp_path)


def test_numbers_of_other_arms_in_the_same_folder_are_kept(tmp_path):
    for arms in ("ab", "ac", "ac"):
        compare_arms(lambda arm, seed: [1.0 + seed, 0.5 * ord(arm)], arms, folder=tmp_path)
    names = {path.name: json.loads(path.read_text(encoding="utf-8"))["arms"] for path in tmp_path.glob("outcome*")}
    assert {name: "".join(arm["name"] for arm in arms) for name, arms in names.items()} == {
        "outcome.json": "ac",
        "outcome.json.1": "ab",
    }


def test_numbers_that_cannot_be_written_are_named_before_the_first_run(tmp_path):
    (tmp_path / "outcome.json").mkdir()
    with pytest.raises(UsageError, match=r"outcome\.json is a folder"):
        compare_arms(lambda arm, seed: pytest.fail(f"{arm} was run with seed {seed}"), "ab", folder=tmp_path)


@pytest.mark.parametrize("seeds", [["x", "y"], [0.2, 0.7], 2.0])
def test_seeds_that_are_no_whole_numbers_are_refused_before_the_first_run(seeds, tmp_path):
    with pytest.raises(UsageError, match="seeds are whole numbers"):
        compare_arms(lambda arm, seed: pytest.fail(f"{arm} was run with seed {seed}"), "ab", seeds, folder=tmp_path)
