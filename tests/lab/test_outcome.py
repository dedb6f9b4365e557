"""What runs say: paired by seed, and shown without more than is known."""

import json
import math

import pytest
import torch

from muonsw.lab.outcome import ArmOutcome, Outcome, PairOutcome, arms_table, compare, pairs_table, steps_to_match
from muonsw.lab.runs import load_run
from muonsw.lab.stats import Interval, t_interval
from tests.lab.studies.small_comparisons import tiny_run


def arm(name, rule, **values):
    known = {"seeds": (0, 1, 2), "final": (3.0,) * 3, "best": (3.0,) * 3, "norm": (0.1,) * 3}
    known |= {"norm_change": (-0.5,) * 3, "total_decay": 5.0, "diverged": {}, "weight_decay": 1.0}
    return ArmOutcome(name, rule, **known | values)


def pair(differences, match=(0.8, 0.8, 0.8), baseline="constant"):
    interval = t_interval(torch.tensor(differences, dtype=torch.float64))
    mean = sum(differences) / len(differences)
    return PairOutcome(baseline, "scaled", (0, 1, 2), differences, mean, interval, match, Interval(0.7, 0.9, "95% t"))


def written(folder, rule, seed, *, loss=3.0, norms=(), evals=(), result=None, **optimizer):
    """A run with a known final loss, known norms and evaluations."""
    path = folder / f"{rule}-{seed}-{len(list(folder.iterdir()))}"
    path.mkdir()
    config = tiny_run(seed=seed, arm=rule, optimizer={"decay": rule, "weight_decay": 1.0, **optimizer})
    (path / "config.json").write_text(json.dumps(config.as_data()), encoding="utf-8")
    records = [{"kind": "eval", "step": step, "loss": value, **dict(metrics)} for step, value, *metrics in evals]
    for step, norm in enumerate(norms):
        scope = {"weight_rms": norm}
        records.append({"kind": "telemetry", "step": step, "decayed": scope, "all": scope})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    ended = {"steps": 10, "final_loss": loss, "best_loss": loss} | (result or {})
    (path / "result.json").write_text(json.dumps(ended), encoding="utf-8")
    return load_run(path)


def test_a_comparison_is_paired_by_seed_and_leaves_out_what_diverged(tmp_path):
    losses = {"constant": (3.0, 3.2, 3.1, 9.0), "scaled": (2.9, 3.0, 3.05, 1.0)}
    runs = {rule: [written(tmp_path, rule, seed, loss=loss) for seed, loss in enumerate(those)]
            for rule, those in losses.items()}  # fmt: skip
    runs["scaled"][3] = written(tmp_path, "scaled", 3, loss=None, result={"diverged": 7, "final_loss": None})
    runs["constant"][0] = written(tmp_path, "constant", 0, loss=3.0, result={"skipped": 9})
    outcome = compare(runs)
    (found,) = outcome.pairs
    assert (found.baseline, found.arm, found.seeds) == ("constant", "scaled", (0, 1, 2))
    assert found.differences == pytest.approx([-0.1, -0.2, -0.05])
    assert found.mean == pytest.approx(-0.35 / 3)
    assert found.interval == t_interval(torch.tensor(found.differences, dtype=torch.float64))
    assert [one.diverged for one in outcome.arms] == [{}, {3: 7}]
    assert outcome.arms[0].skipped == {0: 9}


def test_a_metric_that_ends_without_a_number_is_not_replaced_by_an_earlier_one(tmp_path):
    def run(rule, seed, end):
        return written(tmp_path, rule, seed, evals=[(1, 4.0, ("accuracy", 10.0)), (2, 3.0, ("accuracy", end))])

    runs = {
        "constant": [run("constant", seed, 30.0 + seed) for seed in range(3)],
        "scaled": [run("scaled", seed, None if seed == 1 else 33.0 + seed) for seed in range(3)],
    }
    outcome = compare(runs)
    assert outcome.arms[0].metrics == {"accuracy": (30.0, 31.0, 32.0)}
    (metric,) = outcome.pairs[0].metrics.values()
    assert metric.differences == pytest.approx((3.0, math.nan, 3.0), nan_ok=True)
    assert math.isnan(metric.mean)
    table = pairs_table(outcome.pairs)
    assert table.columns[-1].title == "difference of accuracy"
    assert table.rows[0][-1] is None


def test_steps_to_match_interpolates_between_evaluations(tmp_path):
    def run(name, *evals):
        return written(tmp_path, name, 0, evals=evals)

    baseline = run("constant", (0, 5.0), (50, 3.0), (100, 3.2))
    assert steps_to_match(baseline, run("scaled", (0, 5.0), (20, 4.0), (40, 2.0))) == pytest.approx(30 / 50)
    assert steps_to_match(baseline, run("scaled", (0, 5.0), (100, 3.1))) is None
    assert steps_to_match(baseline, run("scaled", (10, 2.0), (20, 1.0))) == 10 / 50
    assert steps_to_match(run("constant"), baseline) is None


def test_tables_show_no_more_than_is_known():
    lost = arm("scaled", "scaled", seeds=(0, 2), final=(3.0, 3.1), diverged={1: 40})
    (row,) = arms_table(Outcome((lost,), ())).rows
    assert row[4].text.endswith(", 1 diverged")
    assert row[4].note == "at step 40 (seed 1)"
    nothing = PairOutcome("constant", "scaled", (), (), math.nan, None, (), None)
    assert pairs_table([nothing]).rows[0][2:] == (None, None, None, None)
    unknown = pairs_table([pair((math.nan,) * 3, match=(None,) * 3)])
    assert not any("nan" in cell.text for row in unknown.cells() for cell in row)
    huge = pairs_table([pair((1e30, 2e30, 3e30))])
    assert max(len(cell.text) for row in huge.cells() for cell in row) < 40
