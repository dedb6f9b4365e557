"""Every rule on a broken run and on a healthy one, findings while training, and what the command writes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from muonsw import JsonlSink, MuonSW
from muonsw.lab.diagnose import (
    AGAIN,
    MOST_SAMPLES,
    RULES,
    Diagnose,
    Findings,
    History,
    diagnose,
    examine,
)
from muonsw.lab.errors import UsageError
from muonsw.lab.runs import load_run
from muonsw.lab.theory.norm import predict_norms
from muonsw.lab.theory.schedule import lr_scheduler, warmup_cosine
from tests.lab.made_runs import make_history, make_run, simulate, telemetry_lines, watch

# Relaxation-matched to the paper: lambda * peak * steps = 40.
LONG = {"lam": 0.5, "lr": 0.02, "steps": 4000}
CONSTANT, SCALED = LONG | {"rule": "constant"}, LONG | {"rule": "scaled"}
FEW = {"lam": 2.0, "steps": 60, "every": 10, "warmup": 10}
CHECKS = {rule.name: rule.find for rule in RULES}


def with_values(**values):
    return {"change": lambda _role, record: record | values}


def times(key, factor):
    return {"change": lambda _role, record: record | {key: factor * record[key]}}


def losses(steps, rise=0.0):
    curve = [3.0 + 7.0 * math.exp(-10.0 * n / steps) for n in range(steps)]
    return [loss + (rise * (n - 0.7 * steps) / steps if n > 0.7 * steps else 0.0) for n, loss in enumerate(curve)]


# By rule, a broken run, then healthy ones.
RUNS = {
    "skipped": [{"skipped": 90}, {"skipped": 3}],
    "diverging": [{"losses": losses(4000, rise=4.0)}, {"losses": losses(4000, rise=0.5)}],
    # Healthy: a large initial norm relaxes, at a constant learning rate or until too late in the run to tell.
    "collapsing": [
        CONSTANT, SCALED, CONSTANT | {"start": 2.0, "final": 1.0}, CONSTANT | {"start": 2.0, "lam": 0.03}
    ],
    "decay-idle": [{"lam": 0.002}, SCALED, {"lam": 0.0}, {"rule": "none"}],
    # Healthy: decay divides by the base peak on purpose, or warmup has not reached the peak yet.
    "peak-not-reached": [
        {"peak": 0.05}, SCALED, {"peak": 0.08, "optimizer": {"peak": "base"}},
        {"steps": 400, "warmup": 200, "every": 5, "until": 100},
    ],
    "large-updates": [times("relative_update", 100.0), CONSTANT],
    "fast-decay": [{"lam": 1.1}, {"lam": 0.9}],
    "defect": [with_values(defect=0.5), with_values(defect=0.9)],
    "clipping": [
        {"grad_norm": 3.0, "optimizer": {"clip": 1.0, "algorithm": "adamw"}},
        {"grad_norm": 0.9, "optimizer": {"clip": 1.0, "algorithm": "adamw"}},
        {"grad_norm": 3.0, "optimizer": {"clip": 1.0}},
        {"grad_norm": None, "clipped": 0.5},
    ],
}  # fmt: skip


@pytest.mark.parametrize("rule", CHECKS)
def test_a_rule_recognizes_a_broken_run_and_no_healthy_one(tmp_path, rule):
    broken, *healthy = (
        CHECKS[rule](make_history(tmp_path / str(number), **LONG | settings))
        for number, settings in enumerate(RUNS[rule])
    )
    assert (broken.rule, broken.scope) == (rule, "decayed")
    assert set(healthy) == {None}
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "telemetry.md").read_text(encoding="utf-8")
    assert f"**{rule}**" in guide


def test_a_run_in_progress_is_not_advised_to_decay_more(tmp_path, capsys):
    """A tenth of a run has a tenth of its decay."""
    folder = make_run(tmp_path / "run", **SCALED | {"lam": 0.04, "until": 400})
    assert diagnose(load_run(folder)).findings == []
    assert Diagnose((folder,)).run() == 0
    assert "step 391 of 4,000): nothing to report" in capsys.readouterr().out


def test_divergence_is_distinguished_from_noise_and_listed_first(tmp_path):
    generator = np.random.default_rng(0)
    noisy = [3.0 - 0.1 * n / 4000 + 0.2 * float(generator.standard_normal()) for n in range(4000)]
    assert CHECKS["diverging"](make_history(tmp_path / "noisy", losses=noisy)) is None
    rising = [loss + max(0.0, (n - 3000) / 1000) for n, loss in enumerate(noisy)]
    assert CHECKS["diverging"](make_history(tmp_path / "rising", losses=rising)) is not None
    not_finite = [*losses(4000)[:3900], *[None] * 100]
    first, *later = examine(make_history(tmp_path / "run", **CONSTANT | {"losses": not_finite}))
    assert first.rule == "diverging"
    assert "since step 3,901" in first.text
    assert "collapsing" in {finding.rule for finding in later}


def test_skipped_steps_are_counted_over_a_resume(tmp_path):
    """Telemetry of a resumed run counts from zero: 7 before, 2 after."""
    folder = make_run(tmp_path / "run", steps=400, every=20, skipped=7)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in (line for line in lines if line["kind"] == "telemetry" and line["step"] > 200):
        line["skipped"] = 0 if line["step"] < 300 else 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert CHECKS["skipped"](History(load_run(folder))).text.startswith("9 of ")


def test_a_finding_about_all_weights_is_not_repeated_for_their_roles(tmp_path):
    def change(role, record):
        return record | {"defect": 0.4} if role == "experts" else record

    findings = diagnose(load_run(make_run(tmp_path / "both", **CONSTANT))).findings
    assert [finding.scope for finding in findings if finding.rule == "collapsing"] == ["decayed"]
    findings = diagnose(load_run(make_run(tmp_path / "one", **SCALED | {"change": change}))).findings
    assert [(finding.rule, finding.scope) for finding in findings] == [("defect", "role:experts")]


def test_missing_columns_silence_rules_and_break_none(tmp_path):
    keys = ("weight_rms", "lr", "numel")
    run = load_run(make_run(tmp_path / "run", **SCALED | {"change": lambda _, r: {key: r[key] for key in keys}}))
    assert diagnose(run).findings == []


@pytest.mark.parametrize("decay", ["constant", "scaled"])
def test_a_real_collapse_is_found_live_and_afterwards(decay, tmp_path):
    """A small normalized network on noisy targets."""
    steps, beta = 240, 0.8
    layers = [module for _ in range(2) for module in (nn.Linear(16, 16, bias=False), nn.RMSNorm(16))]
    model = nn.Sequential(*layers)
    for norm in (model[1], model[3]):
        norm.weight.requires_grad_(False)
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=2.0, decay=decay, momentum=beta)
    schedule = lr_scheduler(optimizer, warmup_cosine, total_steps=steps + 1)
    findings = Findings()

    def loss():
        inputs = torch.randn(16, 16)
        return (model(inputs) - inputs.flip(1) - torch.randn(16, 16)).square().mean()

    sinks = [JsonlSink(tmp_path / "metrics.jsonl"), findings]
    watch(optimizer, loss, sinks, steps=steps, schedule=schedule, model=model)
    settings = {"algorithm": "muon", "decay": decay, "weight_decay": 2.0, "lr": 0.02, "momentum": beta}
    (tmp_path / "config.json").write_text(json.dumps({"steps": steps, "optimizer": settings}), encoding="utf-8")
    (tmp_path / "result.json").write_text("{}", encoding="utf-8")

    diagnosis = diagnose(load_run(tmp_path))
    rules, history = {finding.rule for finding in diagnosis.findings}, diagnosis.history
    assert ("collapsing" in rules) == (decay == "constant")
    assert any("Constant decay collapses" in text for _, text in findings.history) == (decay == "constant")
    assert "diverging" not in rules
    assert (len(history.norm.steps), history.momentum) == (steps, beta)
    # The recursion explains every step, up to the rounding of float32 weights, at most 6e-8 of their size per step.
    assert predict_norms(history.norm).tolist() == pytest.approx(history.norm.r.tolist(), rel=steps * 6e-8)


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        (SCALED | {"skipped": 1}, set()),
        (SCALED | {"skipped": 90, "clipped": 1.0, "grad_norm": None}, {"skipped", "clipping"}),
        (CONSTANT, {"collapsing"}),
    ],
)
def test_live_findings_are_those_of_the_diagnosis(tmp_path, settings, rules):
    """On the same records, at any time."""
    folder = make_run(tmp_path / "run", **settings | {"every": 100})
    lines = telemetry_lines(folder).splitlines(keepends=True)
    path, live = tmp_path / "telemetry.jsonl", {rule.name for rule in RULES if rule.live}
    for number in (6, 20, len(lines)):
        path.write_text("".join(lines[:number]), encoding="utf-8")
        expected = [finding for finding in diagnose(load_run(path)).findings if finding.rule in live]
        findings = Findings()
        for line in lines[: number - 1]:
            findings(json.loads(line))
        findings._reported_at.clear()
        assert findings(json.loads(lines[number - 1])) == [finding.text for finding in expected]
    assert rules <= {finding.rule for finding in expected}


def test_a_finding_is_repeated_rarely_and_memory_is_bounded():
    record = {"relative_update": 0.2, "lr": 1.0, "defect": 0.9}
    findings = Findings()
    for step in range(1, 401):
        findings({"step": step, "all": record, "roles": {"hidden": record}, "skipped": 0})
    assert [step for step, _ in findings.history] == [5, 5 * AGAIN]
    assert len(findings._records) <= MOST_SAMPLES


def test_the_command_prints_findings_and_norms_and_draws_one_figure(tmp_path, capsys):
    """The runs are folders and a telemetry file, whose rule is inferred from the recorded decay."""
    runs = tuple(make_run(tmp_path / rule, rule=rule, lam=2.0, steps=1000, every=10) for rule in ("constant", "scaled"))
    file = tmp_path / "telemetry.jsonl"
    file.write_text(telemetry_lines(runs[0]), encoding="utf-8")
    out = tmp_path / "out"
    assert Diagnose(runs=(*runs, file), out=out).run() == 0
    printed = capsys.readouterr().out
    assert printed.startswith("constant (constant decay, 100 samples): 2 findings\n")
    assert {path.name for path in out.iterdir()} == {"diagnose.png", "diagnose.svg"}
    assert (out / "diagnose.png").read_bytes().startswith(b"\x89PNG")
    for name, rule in (("constant", "constant"), ("scaled", "scaled"), ("telemetry", "constant")):
        rows = simulate(rule=rule, lam=2.0, steps=1000)
        norms = [row["r"] for row in rows[:991:10]]
        total = sum(row["phi"] for row in rows[:991])
        for scope in ("decayed", "role:experts", "role:hidden"):
            shown = [norms[-1], norms[-1] / max(norms), total]
            (line,) = (line for line in printed.splitlines() if line.startswith(f"{name} {scope} "))
            first, second, _, third, _ = map(float, line.split()[2:])
            assert [first, second, third] == pytest.approx(shown, rel=5e-3)


def test_a_wrong_run_or_folder_is_refused_before_anything_is_written(tmp_path):
    run, silent = make_run(tmp_path / "run", **FEW), make_run(tmp_path / "silent", telemetry=False, **FEW)
    (tmp_path / "file").write_text("", encoding="utf-8")
    for message, command in {
        "missing run": Diagnose(),
        "does not exist": Diagnose((tmp_path / "nowhere",)),
        "role:experts, role:hidden": Diagnose((run,), scope="role:unknown"),
        "no telemetry;": Diagnose((silent,)),
        "cannot write": Diagnose((run,), out=tmp_path / "file" / "out"),
    }.items():
        with pytest.raises(UsageError, match=message):
            command.run()
    assert not (run / "diagnose").exists()


def test_a_peak_between_two_samples_counts_as_reached(tmp_path):
    path, model = tmp_path / "telemetry.jsonl", nn.Linear(8, 8, bias=False)
    for peak_lr, fires in ((None, False), (0.04, True)):
        optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.5, peak_lr=peak_lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=100)
        watch(optimizer, model.weight.sum, JsonlSink(path), steps=100, schedule=schedule, every=18, start_step=1)
        history = History(load_run(path))
        assert history.highest("lr") < 0.95 * 0.02
        assert (CHECKS["peak-not-reached"](history) is not None) == fires
