"""Each rule on a run where it must speak, and on runs where it must not."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from muonsw import JsonlSink, MuonSW, Telemetry
from muonsw.lab.diagnose.diagnosis import diagnose
from muonsw.lab.diagnose.history import History
from muonsw.lab.diagnose.rules import RULES, Finding, Severity, examine, ordered
from muonsw.lab.runs import load_run
from muonsw.lab.theory import steady_state_norm_with_memory
from tests.lab.diagnose.runs import MEMORY, make_history, make_run

# Relaxation-matched to the paper: lambda * peak * steps = 40.
LONG = {"lam": 0.5, "lr": 0.02, "steps": 4000}
CHECKS = {rule.name: rule.check for rule in RULES}


def with_values(**values):
    return lambda _role, record: record | values


def times(key, factor):
    return lambda _role, record: record | {key: factor * record[key]}


def losses(steps, *, rise=0.0, last=None):
    curve = [3.0 + 7.0 * math.exp(-10.0 * n / steps) for n in range(steps)]
    curve = [loss + (rise * (n - 0.7 * steps) / steps if n > 0.7 * steps else 0.0) for n, loss in enumerate(curve)]
    return curve if last is None else [*curve[:-5], *[last] * 5]


CONSTANT, SCALED = LONG | {"rule": "constant"}, LONG | {"rule": "scaled"}
FIRES = {
    "unfinished": {"complete": False},
    "too-few-samples": {"every": 300},
    "skipped": {"skipped": 3},
    "diverging": {"losses": losses(4000, rise=4.0)},
    "collapsing": CONSTANT,
    "norm-held": SCALED,
    "decay-idle": {"lam": 0.002},
    "partly-relaxed": {"lam": 0.02},
    "peak-not-reached": {"peak": 0.05},
    "tracking-broke": CONSTANT,
    "unexplained-norm": {"change": times("update_rms", 1.2)},
    "large-updates": {"change": with_values(relative_update=0.08)},
    "fast-decay": {"lam": 0.6},
    "defect": {"change": with_values(defect=0.5)},
    "rounding": {"change": times("applied_rms", 0.8)},
    "radial-gradient": {"change": with_values(alignment_gradient=-0.1)},
    "clipping": {"grad_norm": 3.0, "optimizer": {"clip": 1.0}},
}
SILENT = {
    "unfinished": SCALED,
    "too-few-samples": SCALED,
    "skipped": SCALED,
    "diverging": {"losses": losses(4000, rise=0.5)},
    "collapsing": SCALED,
    "norm-held": CONSTANT,
    "decay-idle": SCALED,
    "partly-relaxed": SCALED,
    "peak-not-reached": SCALED,
    "tracking-broke": SCALED,
    "unexplained-norm": CONSTANT,
    "large-updates": CONSTANT,
    "fast-decay": LONG | {"lam": 0.4},
    "defect": {"change": with_values(defect=0.9)},
    "rounding": {"change": times("applied_rms", 1.02)},
    "radial-gradient": SCALED,
    "clipping": {"grad_norm": 0.9, "optimizer": {"clip": 1.0}},
}


@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_speaks_where_it_must(tmp_path, rule):
    history = make_history(tmp_path / "run", **LONG | FIRES[rule])
    finding = CHECKS[rule](history)
    assert finding is not None
    assert finding.rule == rule
    assert finding.scope == "decayed"
    assert finding.text.endswith(".")
    assert finding.numbers


@pytest.mark.parametrize("rule", SILENT)
def test_a_rule_is_silent_where_it_should_be(tmp_path, rule):
    assert CHECKS[rule](make_history(tmp_path / "run", **LONG | SILENT[rule])) is None


def test_every_rule_has_both_tests_and_a_paragraph_in_the_guide():
    names = [rule.name for rule in RULES]
    assert set(FIRES) == set(SILENT) == set(names)
    assert len(set(names)) == len(names)
    guide = (Path(__file__).parents[3] / "docs" / "guide" / "diagnose.md").read_text(encoding="utf-8")
    for name in names:
        assert f"**{name}**" in guide


def test_one_run_is_not_told_to_raise_and_to_lower_lambda(tmp_path):
    """Too short for decay to act, and decay is fast against momentum already."""
    found = examine(make_history(tmp_path / "run", lam=1.0, steps=20, warmup=2, every=1))
    text = " ".join(finding.text for finding in found)
    assert {"decay-idle", "fast-decay"} <= {finding.rule for finding in found}
    assert "smaller lambda" in text
    assert "raise lambda" not in text
    assert "times as long" in text


def test_a_healthy_run_has_nothing_to_worry_about(tmp_path):
    findings = examine(make_history(tmp_path / "run", **SCALED | {"lam": 0.4}))
    assert [finding.rule for finding in findings] == ["norm-held"]


def test_what_scaled_decay_would_hold_is_what_it_holds(tmp_path):
    constant, scaled = (make_history(tmp_path / s["rule"], **s) for s in (CONSTANT, SCALED))
    finding = CHECKS["collapsing"](constant)
    assert finding is not None
    expected = steady_state_norm_with_memory(s=0.176 * 0.02, phi=0.5 * 0.02, memory=MEMORY)
    assert finding.numbers["held_norm"] == pytest.approx(expected, rel=0.01)
    # The simulation drops nothing, the formula drops phi against 1.
    assert scaled.last("weight_rms") == pytest.approx(finding.numbers["held_norm"], rel=0.02)
    lost = 1.0 - constant.last("weight_rms") / constant.highest("weight_rms")
    assert finding.numbers["lost"] == pytest.approx(lost)
    assert f"lost {100 * lost:.0f}% of the norm that they had at step" in finding.text
    assert "learning rate is at 10% of its peak" in finding.text
    assert 'Try decay="scaled", or a smaller lambda.' in finding.text


def test_a_norm_that_falls_from_a_large_start_is_no_collapse(tmp_path):
    """The fall is the initial norm being forgotten, at a constant learning rate or until too late to tell."""
    for name, settings in {"steady": {"final": 1.0}, "slow": {"lam": 0.03}}.items():
        history = make_history(tmp_path / name, **CONSTANT | {"start": 2.0} | settings)
        assert history.last("weight_rms") < 0.5 * history.highest("weight_rms")
        assert CHECKS["collapsing"](history) is None


def test_a_collapse_is_counted_from_where_the_start_is_forgotten(tmp_path):
    small, large = (make_history(tmp_path / str(start), **CONSTANT | {"start": start}) for start in (0.05, 0.5))
    found = [CHECKS["collapsing"](history) for history in (small, large)]
    assert large.highest("weight_rms") == pytest.approx(0.5)
    # After 3 relaxation times exp(-3) of the initial square is left, so the top is at most this much higher.
    top = found[0].numbers["peak_norm"]
    assert top <= found[1].numbers["peak_norm"] <= (top**2 + math.exp(-3.0) * 0.5**2) ** 0.5
    assert found[1].numbers["peak_step"] > 100


def test_decay_that_is_off_is_a_note_not_a_warning(tmp_path):
    finding = CHECKS["decay-idle"](make_history(tmp_path / "run", lam=0.0, steps=400, rule="constant"))
    assert finding is not None
    assert finding.severity is Severity.NOTE
    assert "lambda is 0" in finding.text
    none = CHECKS["decay-idle"](make_history(tmp_path / "none", lam=0.1, steps=400, rule="none"))
    assert none is not None
    assert "or their decay rule takes nothing" in none.text


@pytest.mark.parametrize(
    ("steps", "every", "text"),
    [
        (6, 1, "Only 6 telemetry samples with norm, update, decay and alignment: too few"),
        (6, 1, "A run of 6 steps has no more of them."),
        (150, 140, "Sample every step (--telemetry-every)."),
        (900, 300, "Sample every 9 steps (--telemetry-every)."),
    ],
)
def test_few_samples_get_advice_that_can_be_followed(tmp_path, steps, every, text):
    finding = CHECKS["too-few-samples"](make_history(tmp_path / "run", steps=steps, every=every))
    assert finding is not None
    assert text in finding.text


def test_decay_that_no_record_tells_is_not_found_by_more_samples(tmp_path):
    history = make_history(tmp_path / "run", **SCALED | {"change": with_values(decay=None)})
    finding = CHECKS["too-few-samples"](history)
    assert finding is not None
    assert "The decay of the decayed weights is not known" in finding.text
    assert "Sample every" not in finding.text


def test_idle_decay_says_how_much_there_is(tmp_path):
    history = make_history(tmp_path / "run", rule="constant", lam=0.008, steps=1000, every=1)
    finding = CHECKS["decay-idle"](history)
    assert finding is not None
    total = 0.008 * float(np.sum(history.column("lr")))
    assert finding.numbers["decay_total"] == pytest.approx(total, rel=1e-9)
    assert f"is {total:.2g}" in finding.text


def test_a_run_that_goes_on_is_not_told_to_decay_more(tmp_path):
    """A tenth of a run has a tenth of its decay."""
    history = make_history(tmp_path / "run", **SCALED | {"lam": 0.04, "complete": False})
    lines = (history.run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (history.run.path / "metrics.jsonl").write_text("".join(lines[: len(lines) // 10]), encoding="utf-8")
    early = History(load_run(history.run.path))
    assert early.relaxations < 0.6 < history.relaxations
    assert early.lr_left < 1.0
    assert CHECKS["decay-idle"](early) is None


def test_a_peak_between_two_samples_was_reached(tmp_path):
    """The summaries of the groups know of updates that were not sampled."""
    path, model = tmp_path / "telemetry.jsonl", torch.nn.Linear(8, 8, bias=False)
    for peak_lr, fires in ((None, False), (0.04, True)):
        optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.5, peak_lr=peak_lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
        with JsonlSink(path) as sink, Telemetry(optimizer, every=30, start_step=1, sink=sink):
            for _ in range(100):
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
                schedule.step()
        history = History(load_run(path))
        assert history.highest("lr") < 0.95 * 0.02
        assert (CHECKS["peak-not-reached"](history) is not None) == fires


def test_a_peak_ahead_or_divided_on_purpose_is_no_mistake(tmp_path):
    base = make_history(tmp_path / "base", **SCALED | {"peak": 0.08, "optimizer": {"peak": "base"}})
    assert CHECKS["peak-not-reached"](base) is None
    early = make_history(tmp_path / "early", steps=100, warmup=200, every=5, complete=False)
    assert CHECKS["peak-not-reached"](early) is None
    assert CHECKS["decay-idle"](early) is None


@pytest.mark.parametrize("seed", range(5))
def test_noise_around_a_loss_that_hardly_falls_is_no_divergence(tmp_path, seed):
    generator = np.random.default_rng(seed)
    curve = [3.0 - 0.1 * n / 4000 + 0.2 * float(generator.standard_normal()) for n in range(4000)]
    assert CHECKS["diverging"](make_history(tmp_path / "run", losses=curve)) is None
    rising = [loss + max(0.0, (n - 3000) / 1000) for n, loss in enumerate(curve)]
    assert CHECKS["diverging"](make_history(tmp_path / "rising", losses=rising)) is not None


def test_a_loss_that_is_not_a_number_is_the_worst(tmp_path):
    curve = losses(4000)
    history = make_history(tmp_path / "run", **SCALED | {"losses": [*curve[:3900], *[None] * 100]})
    findings = examine(history)
    assert findings[0].rule == "diverging"
    assert findings[0].severity is Severity.PROBLEM
    assert "since step 3,901" in findings[0].text


def test_skipped_steps_are_counted_over_a_resume(tmp_path):
    """Telemetry that is attached anew counts from zero: 3 before, 2 after."""
    folder = make_run(tmp_path / "run", steps=400, every=20, skipped=3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in (line for line in lines if line["kind"] == "telemetry" and line["step"] > 200):
        line["skipped"] = 0 if line["step"] < 300 else 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    finding = CHECKS["skipped"](History(load_run(folder)))
    assert finding is not None
    assert finding.numbers["skipped"] == 5


def test_the_share_of_skipped_steps_decides_how_bad_it_is(tmp_path):
    few, many = (make_history(tmp_path / str(n), steps=400, every=20, skipped=n) for n in (1, 40))
    found = [CHECKS["skipped"](history) for history in (few, many)]
    assert [finding.severity for finding in found if finding] == [Severity.NOTE, Severity.WARNING]
    assert found[1].numbers["share"] == pytest.approx(40 / 381)


def test_fast_decay_has_two_degrees(tmp_path):
    # phi_peak = lambda * 0.02 against 1 - beta = 0.05
    found = [CHECKS["fast-decay"](make_history(tmp_path / str(lam), lam=lam, steps=400)) for lam in (0.7, 1.5)]
    assert [finding.severity for finding in found if finding] == [Severity.NOTE, Severity.WARNING]
    assert found[0].numbers["ratio"] == pytest.approx(0.7 * 0.02 / 0.05, rel=1e-3)


@pytest.mark.parametrize(("defect", "word"), [(0.5, "dead experts"), (1.4, "overshoots")])
def test_a_defect_names_its_likely_cause(tmp_path, defect, word):
    finding = CHECKS["defect"](make_history(tmp_path / "run", steps=400, change=with_values(defect=defect)))
    assert finding is not None
    assert word in finding.text


def test_clipping_costs_what_it_costs_the_algorithm(tmp_path):
    always = {**LONG, "grad_norm": 3.0}
    muon = CHECKS["clipping"](make_history(tmp_path / "muon", **always, optimizer={"clip": 1.0}))
    adamw = {"clip": 1.0, "algorithm": "adamw", "betas": [0.9, 0.95]}
    other = CHECKS["clipping"](make_history(tmp_path / "adamw", **always, optimizer=adamw))
    assert (muon.severity, other.severity) == (Severity.NOTE, Severity.WARNING)
    assert muon.numbers == other.numbers == {"share": 1.0}
    off = CHECKS["clipping"](make_history(tmp_path / "off", **always, optimizer={"clip": 0.0}))
    assert off is None


@pytest.mark.parametrize(("clipped", "speaks"), [(0.95, True), (0.5, False)])
def test_clipping_in_a_users_own_loop_is_what_telemetry_counted(tmp_path, clipped, speaks):
    finding = CHECKS["clipping"](make_history(tmp_path / "run", **LONG, grad_norm=None, clipped=clipped))
    assert (finding is not None) == speaks
    assert finding is None or finding.numbers["share"] == pytest.approx(clipped)


def test_a_run_that_never_settles_is_reported_from_one_that_stops_following(tmp_path):
    leaves = CHECKS["tracking-broke"](make_history(tmp_path / "leaves", **CONSTANT))
    never = CHECKS["tracking-broke"](make_history(tmp_path / "never", lam=0.01, steps=1000))
    assert leaves is not None
    assert never is not None
    assert f"until step {leaves.numbers['broke_at']:,.0f}" in leaves.text
    # The paper, with the same amount of decay, puts its boundary at 300 of 376 thousand steps.
    assert leaves.numbers["broke_at"] / 4000 == pytest.approx(300 / 376, abs=0.05)
    assert "never came within a fifth" in never.text


def test_what_holds_for_the_whole_is_said_once(tmp_path):
    run = load_run(make_run(tmp_path / "run", **CONSTANT))
    finding = next(found for found in diagnose(run).findings if found.rule == "collapsing")
    assert finding.scope == "decayed"
    assert finding.also == ("role:experts", "role:hidden")


def test_what_holds_for_one_role_is_said_of_that_role(tmp_path):
    def change(role, record):
        return record | {"defect": 0.4} if role == "experts" else record

    run = load_run(make_run(tmp_path / "run", **SCALED | {"change": change}))
    findings = [found for found in diagnose(run).findings if found.rule == "defect"]
    assert [(found.scope, found.also) for found in findings] == [("role:experts", ())]
    assert findings[0].text.startswith("Muon's direction for the weights of role experts")


def test_roles_without_decay_are_no_part_of_the_decayed_weights(tmp_path):
    def change(role, record):
        return record | ({"decay": 0.0, "defect": 0.4} if role == "hidden" else {})

    run = load_run(make_run(tmp_path / "run", **SCALED | {"change": change}))
    assert not [found for found in diagnose(run).findings if found.rule == "defect"]
    assert [found.scope for found in diagnose(run, scope="all").findings if found.rule == "defect"] == ["role:hidden"]


def test_the_worst_comes_first():
    found = [Finding(str(n), severity, "all", "") for n, severity in enumerate(reversed(Severity))]
    assert [finding.severity for finding in ordered(found)] == list(Severity)


def test_missing_columns_silence_rules_and_break_none(tmp_path):
    kept = ("weight_rms", "lr", "numel")
    run = load_run(make_run(tmp_path / "run", **SCALED | {"change": lambda _, r: {key: r[key] for key in kept}}))
    rules = [finding.rule for finding in diagnose(run).findings]
    assert rules == ["too-few-samples"]
    history = History(run, "decayed")
    assert history.tracking is None
    assert math.isnan(history.held_norm())
    assert examine(replace(history, scope="nowhere"))[0].rule == "too-few-samples"


def test_weights_that_move_more_than_intended_lose_nothing(tmp_path):
    """Cautious decay in float32, of which a record does not say that it is."""
    model, path = torch.nn.Linear(8, 8, bias=False), tmp_path / "telemetry.jsonl"
    optimizer = MuonSW.for_model(model, lr=0.01, weight_decay=5.0, cautious=True)
    with JsonlSink(path) as sink, Telemetry(optimizer, every=1, sink=sink):
        for _ in range(60):
            model(torch.randn(16, 8)).sub(1.0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finding = CHECKS["rounding"](History(load_run(path)))
    assert finding is not None
    assert finding.numbers["arrived"] > 1.05
    assert finding.severity is Severity.NOTE
    assert "or decay is cautious" in finding.text
