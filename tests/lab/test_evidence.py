"""The evidence: records are runs, the page says what they say, and the runs that it rests on can be made."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from muonsw.lab.claims.statistics import ONE_SEED, over_seeds
from muonsw.lab.cli import main as command_line
from muonsw.lab.data.documents import MarkovSource
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer
from muonsw.lab.errors import UsageError
from muonsw.lab.runs import Run, load_run
from muonsw.lab.runs.metrics import Columns
from muonsw.lab.runs.records import SAMPLED, Records
from muonsw.lab.studies import evidence
from muonsw.lab.studies.arms import Key, decay_factors, lambda_arm, lr_multiples
from muonsw.lab.studies.outcome import against_constant, arm_outcome
from muonsw.lab.studies.scales import SCALES
from muonsw.lab.studies.training import (
    family,
    gradient_growth,
    lambda_scaling,
    long,
    paper_regime,
    rate_drift,
    regret,
    rows,
    schedules,
    sweeps,
    untuned,
    worked_tasks,
)
from muonsw.lab.studies.training.best_rules import best_at_an_end, candidates, judge_strengths, rules_run
from muonsw.lab.studies.training.regret import (
    Optimum,
    best_gaps,
    carried_regrets,
    good_range,
    judge_losses,
    loss_at,
    octaves_within,
    regrets,
    too_large,
)
from muonsw.lab.studies.training.sweeps import vertex
from muonsw.lab.studies.workshop import Workshop
from muonsw.lab.tasks import TaskConfig
from muonsw.lab.train.config import OptimizerConfig, RunConfig
from muonsw.lab.train.folder import identity
from tests.lab.studies.small_comparisons import by_settings, tiny_run, tiny_scale
from tests.lab.train.small_runs import tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    return evidence.read_page(ROOT / "evidence")


def test_the_page_is_what_the_records_give(found):
    template = (ROOT / "evidence" / evidence.TEMPLATE).read_text(encoding="utf-8")
    assert evidence.page(found, template) == (ROOT / evidence.PAGE).read_text(encoding="utf-8")


def test_every_record_is_a_run_of_a_study(found):
    """So that no number on the page comes from settings that cannot be looked up, and no line is there twice."""
    planned = [config for name in evidence.TEXTS for config in found.studies[name].runs(found.results[name])]
    for records in {records.path: records for records in found.records.values()}.values():
        made = {identity(run.config) for config in planned if (run := records.find(config))}
        assert made == set(records.runs)
        assert len(records.runs) == len(records.lines)


def test_every_record_of_a_task_is_a_run_of_a_worked_one(found):
    """Of each comparison the same seeds under both rules and at the same total."""
    records = found.own_tasks
    assert len(records.runs) == len(records.lines)
    assert all((ROOT / run.config.task.path).is_relative_to(ROOT / "examples/tasks") for run in records.runs.values())
    for runs in worked_tasks.recorded(records).values():
        assert {arm: [run.seed for run in those] for arm, those in runs.items()} == {
            arm: [0, 1, 2] for arm in worked_tasks.ARMS
        }


def test_best_against_best_is_one_number_everywhere(found):
    """The best of means, paired by seed: on the page, in the claims, in the README, as the difference of means."""
    lucky = [{0.1: 3.0, 0.2: 3.3}, {0.1: 3.4, 0.2: 3.0}]  # a seed's own lowest would give 3.0, the best of means 3.15
    assert best_gaps(lucky, [{0.1: 3.0, 0.2: 3.1}] * 2) == pytest.approx([0.3, 0.0])
    longest = {one.rule: one for one in found.optima() if one.steps == 6_400}
    means = [min(longest[rule].losses.values()) for rule in ("scaled", "constant")]
    claims = {claim.id: claim for claim in found.studies["regret"].judge(found.results["regret"])["regret"]}
    gap = claims["best-against-best-6400"]
    assert gap.measured == pytest.approx(means[0] - means[1])
    page = (ROOT / evidence.PAGE).read_text(encoding="utf-8")
    interval = f"interval {gap.interval.low:+.3f} to {gap.interval.high:+.3f}"
    assert f"scaled decay ends {gap.measured:+.3f} nats (95% t {interval}) from constant decay" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-")
    assert f"best against best {gap.measured:+.3f} ({interval}" in readme


@pytest.fixture
def tiny(monkeypatch):
    """The evidence of runs that take a second."""
    scale = tiny_scale(sampled_every=1, seeds=1)
    monkeypatch.setattr(evidence, "MINI", scale)
    return scale


def test_runs_are_exported_once_and_read_back_as_they_were(tmp_path, tiny):
    shop, path = by_settings(tmp_path / "runs"), tmp_path / "records.jsonl"
    assert evidence.gather("regret", shop, path) == 8
    assert evidence.gather("regret", shop, path) == 0
    records, study = Records.read(path), evidence.part("regret")
    results = evidence.results_of(study, records)
    assert evidence.missing(study, records, results) == 0
    assert records.header["tokens"] > 0
    assert all(line["made_with"]["device"] and line["made_with"]["torch"] for line in records.lines)
    folders = {load_run(folder).config: load_run(folder) for folder in (tmp_path / "runs").iterdir() if folder.is_dir()}
    for run in folders.values():
        read = records.runs[identity(run.config)]
        assert read.final_loss == run.final_loss
        assert read.epochs == run.epochs > 0
        assert read.final_norm == pytest.approx(run.final_norm, rel=1e-4)
        assert read.norm_change == pytest.approx(run.norm_change, abs=2e-4)
        assert read.evals.step.tolist() == [step for step in run.evals.step.tolist() if step]
    # Two programs add to one file, each begun when it held nothing of the other's; what both have is there once.
    config = replace(records.base, data=replace(records.base.data, path=tokens()))
    first, second = (Records.open(tmp_path / "both.jsonl", config, tokens=1) for _ in range(2))
    runs = list(folders.values())
    first.add(runs[:3])
    second.add(runs[2:5])
    first.add(runs[5:])
    both = Records.read(tmp_path / "both.jsonl")
    assert {name: run.final_loss for name, run in both.runs.items()} == {
        name: run.final_loss for name, run in records.runs.items()
    }
    assert len(both.lines) == len(runs) == len(first.lines)
    assert list(results) == [Key(steps=4), Key(steps=8)]
    tables = study.own_tables(results, tiny)
    assert [table.name for table in tables] == ["regret-map", "best-lambda", "too-large"]
    assert study.judge(results)["regret"]


def test_a_seed_counts_once_all_arms_have_it(found):
    """What a GPU has made of a study when its time is up: no table or claim rests on a part of a grid."""
    records, study = found.records["regret"], found.studies["regret"]
    last = [run for run in records.runs.values() if run.config.steps == 6_400 and run.config.seed == 2][-1]
    fewer = [line for line, run in zip(records.lines, records.runs.values(), strict=True) if run is not last]
    results = evidence.results_of(study, Records(records.path, records.header, fewer))
    assert {key.steps: len(next(iter(arms.values()))) for key, arms in results.items()} == {400: 3, 1_600: 3, 6_400: 2}
    assert study.judge(results)["regret"]


def test_the_seeds_of_two_lengths_are_paired_though_one_lacks_a_seed_between(found):
    """A machine that is lost leaves any runs: seed 2 of one length must not meet seed 1 of the other."""
    records, study = found.records["regret"], found.studies["regret"]
    kept = [
        line
        for line, run in zip(records.lines, records.runs.values(), strict=True)
        if (run.config.steps, run.config.seed) not in ((6_400, 1), (1_600, 2))
    ]
    results = evidence.results_of(study, Records(records.path, records.header, kept))
    seeds = {key.steps: [run.seed for run in next(iter(arms.values()))] for key, arms in results.items()}
    assert all(a == b for a, b in zip(seeds[1_600], seeds[6_400], strict=False))
    assert seeds[1_600] == [0, 1]


def test_telemetry_is_kept_of_runs_that_were_sampled_often(tmp_path, tiny, monkeypatch):
    monkeypatch.setattr("muonsw.lab.runs.records.SAMPLES", 10)
    path = tmp_path / "records.jsonl"
    evidence.gather("steady-state", by_settings(tmp_path / "runs"), path)
    study = evidence.part("steady-state")
    results = evidence.results_of(study, Records.read(path))
    (run, *_), _ = results[Key(width=16)].values()
    assert set(SAMPLED) <= set(run.telemetry.scope("decayed"))
    assert len(run.predicted_norms[0]) == 10
    assert all(claim.measured == claim.measured for claim in study.judge(results)["steady-state"])
    folders = (load_run(folder) for folder in (tmp_path / "runs").iterdir() if folder.is_dir())
    trained = next(one for one in folders if identity(one.config) == identity(run.config))
    assert arm_outcome([run]).norm == pytest.approx(arm_outcome([trained]).norm, rel=1e-4)
    # The table's runs, which differ in being sampled less often alone, are there with these.
    (table,) = rows.headline_row(replace(tiny, near_best=()))
    sampled = replace(table, base=replace(table.base, telemetry_every=5))
    assert Records.read(path).find(sampled.configs()[0]) is not None
    assert Records.read(path).find(replace(sampled.configs()[0], telemetry_every=0)) is None


@pytest.mark.usefixtures("tiny")
def test_a_run_on_other_text_is_another_run(tmp_path):
    path, other = tmp_path / "records.jsonl", tmp_path / "other"
    evidence.gather("steady-state", by_settings(tmp_path / "runs"), path)
    prepare((one for _, one in zip(range(40), MarkovSource(seed=7), strict=False)), ByteTokenizer(), other,
            validation_fraction=0.2)  # fmt: skip
    shop = by_settings(tmp_path / "others")
    shop = replace(shop, places=replace(shop.places, data=other))
    with pytest.raises(UsageError, match="has runs on other text"):
        evidence.gather("steady-state", shop, path)
    assert not (tmp_path / "others").exists()
    assert evidence.chosen("evidence/long", other) == ["long"]
    with pytest.raises(UsageError, match="name a study"):
        evidence.chosen("evidence", other, tmp_path)
    with pytest.raises(UsageError, match=r"unknown study of evidence 'longer' \(did you mean 'long'\?\)"):
        evidence.chosen("evidence/longer", other)


def test_runs_are_made_and_the_page_grows_with_them(tmp_path, monkeypatch, tiny):
    """One seed of two, as far as there is time: what is missing is said, and what rests on one seed."""
    monkeypatch.setattr(evidence, "MINI", replace(tiny, seeds=2))
    shop, path = by_settings(tmp_path / "runs"), evidence.file_of("hard-cases", tmp_path)
    assert evidence.gather("hard-cases", shop, path, seeds=1, only=["wsd"]) == 2
    assert evidence.gather("hard-cases", shop, path, seeds=1) == 7
    grown = evidence.read_page(tmp_path)
    page = evidence.page(grown, "{hard-cases}\n{regret}\n{conclusion}")
    assert "| little text, four times the lambda | none |" in page
    assert "One seed so far, so without intervals." in page
    assert "6 of 15 planned runs of `hard-cases` are missing." in page
    assert "Not measured yet: 8 of 8 planned runs of `regret` are missing." in page


@pytest.mark.parametrize(
    ("words", "code", "shown"),
    [
        (["evidence", "--dry-run"], 0, "without --data nothing is trained"),
        (["evidence/long", "--dry-run"], 0, "long, scale mini"),
        (["evidence/lnog"], 2, "unknown study of evidence 'lnog' (did you mean 'long'?)"),
        (["evidnce"], 2, "unknown study 'evidnce' (did you mean 'evidence'?)"),
        (["evidence", "--seeds", "0"], 2, "--seeds must be at least 1"),
    ],
)
def test_a_dry_run_and_a_wrong_name_write_nothing(words, code, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / evidence.TEMPLATE).write_text("nothing yet\n", encoding="utf-8")
    assert command_line(["reproduce", *words]) == code
    printed = capsys.readouterr()
    assert shown in printed.out + printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["evidence"]


@pytest.mark.usefixtures("tiny")
def test_outside_of_a_clone_evidence_is_refused_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    data = str(Path(tokens()).absolute())
    monkeypatch.chdir(tmp_path)
    assert command_line(["reproduce", "evidence/steady-state", "--data", data, "--device", "cpu"]) == 2
    assert "go to a clone of the repository" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_long_runs_from_training_to_the_page(tmp_path):
    shop = by_settings(tmp_path / "runs")
    assert evidence.gather("long", shop, evidence.file_of("long", tmp_path)) == 2 * (6 + 5)
    grown = evidence.read_page(tmp_path)
    page = evidence.page(grown, "{conclusion}\n{long}")
    assert "On fresh text, each at its best lambda, scaled decay ends" in page
    assert "assets/long-horizons.png" in page
    assert "| constant, 32 updates |" in page
    assert "best of scaled minus best of constant at 32 updates, minus the same at 8, in nats" in page
    evidence.draw(grown, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {"long-horizons.png", "never-tuned.png"}


@pytest.mark.usefixtures("tiny")
def test_a_run_is_in_the_file_as_soon_as_it_has_ended(tmp_path):
    """A machine on loan may be gone before all runs have ended."""
    path, seen = evidence.file_of("long", tmp_path), []

    class Watched(Workshop):
        def bring_to_end(self, jobs, after=None):
            def watch(job):
                after(job)
                seen.append(len(Records.read(path).runs))

            super().bring_to_end(jobs[:2], watch)

    shop = by_settings(tmp_path / "runs")
    evidence.gather("long", Watched(**{one.name: getattr(shop, one.name) for one in fields(shop)}), path)
    assert seen == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_schedules_from_training_to_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(schedules, "FACTORS", (1.0,))
    monkeypatch.setattr(schedules, "WSD_FACTORS", (0.5,))
    assert (
        evidence.gather("schedules", by_settings(tmp_path / "runs"), evidence.file_of("schedules", tmp_path)) == 6 * 2
    )
    page = evidence.page(evidence.read_page(tmp_path), "{schedules}")
    assert "| linear to 0 | scaled |" in page
    assert "the same under linear to 0, minus the same under WSD to 0, in nats" in page


def test_a_straight_line_begins_where_warmup_ends():
    runs = {str(one.key): one.base for one in schedules.schedules(evidence.MINI)}
    line, flat = lr_multiples(runs["linear to 0"]), lr_multiples(runs["WSD to 0"])
    warmup = runs["linear to 0"].schedule.warmup(len(line))
    assert (line[warmup - 1], line[-1]) == (1.0, 0.0)
    assert {round(one - after, 9) for one, after in pairwise(line[warmup:])} == {round(1 / (len(line) - warmup), 9)}
    assert [flat[step] for step in (warmup, len(flat) // 2)] == [1.0, 1.0]


def test_panels_are_called_as_in_the_tables(found):
    results = found.results["schedules"]
    assert [one.title for one in schedules.schedule_charts(results, evidence.MINI)] == [str(key) for key in results]


def test_claims_of_schedules_tell_where_the_rule_matters(monkeypatch):
    """Scaled decay gains under a line to zero and nothing under WSD; or the other way round."""
    keys = (schedules.COSINE, schedules.LINEAR, schedules.WSD)
    floors = {"constant": (2.05, 2.0, 2.1), "scaled": (2.05, 1.97, 2.1)}
    monkeypatch.setattr(schedules, "losses_of", lambda arms, rule: arms[rule])
    for constant, scaled, holds in (("constant", "scaled", True), ("scaled", "constant", False)):
        results = {
            key: {
                "constant": [parabola(0.1, 0.01, floors[constant][place])] * 2,
                "scaled": [parabola(0.1, 0.01, floors[scaled][place])] * 2,
            }
            for place, key in enumerate(keys)
        }
        claims = {claim.id: claim for claim in schedules.judge_schedules(results, tiny_scale())}
        assert claims["linear-to-0-best"].holds is holds
        assert claims["more-than-under-wsd"].holds is holds
        assert claims["constant-to-zero"].holds
        assert claims["scaled-to-zero"].holds
    results[schedules.COSINE] = {rule: seeds[:1] for rule, seeds in results[schedules.COSINE].items()}
    claims = {claim.id: claim for claim in schedules.judge_schedules(results, tiny_scale())}
    assert ONE_SEED in claims["scaled-to-zero"].limits  # while records come in, one schedule may have fewer seeds


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_what_decay_takes_over_a_run_does_not_follow_its_length(scale):
    """At all points at which lambda is followed, and where rates are: else the length would be what is measured."""
    runs = [*lambda_scaling.points(scale).values(), rate_drift.drift_run(scale)]
    taken = [sum(decay_factors(run, replace(run.optimizer, decay="constant"))) for run in runs]
    totals = [total / run.optimizer.lr for total, run in zip(taken, runs, strict=True)]  # widths have half the rate
    assert len({run.steps for run in runs}) > 3
    assert totals == pytest.approx([totals[0]] * len(runs), rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_drift_of_rates_from_training_to_the_page(tmp_path):
    assert (
        evidence.gather("rate-drift", by_settings(tmp_path / "runs"), evidence.file_of("rate-drift", tmp_path))
        == 3 * (3 + 4)  # the wider model has one rate more
    )
    page = evidence.page(evidence.read_page(tmp_path), "{rate-drift}")
    assert "| rule | width 16 | width 32 | moves by |" in page
    assert "constant: power of the width by which the best learning rate moves" in page


def swept_widths(name, power):
    """Two seeds whose best rate follows this power of the width, on a grid from 0.0125 on."""
    grid = [0.0125 * 2**place for place in range(7)]
    return {
        Key(name, width=width): [{rate: math.log2(rate / 0.1 / (width / 64) ** power) ** 2 for rate in grid}] * 2
        for width in (64, 128, 256)
    }


def test_claims_tell_a_rate_that_moves_from_one_that_stays(monkeypatch):
    """By a half power under constant decay, which moves a rate by four over sixteen times the width, and not at all."""
    for moves, stays, holds in ((-0.6, 0.0, True), (0.0, -0.6, False)):
        found = {"constant": moves, "scaled": (moves + 2 * stays) / 3, "hyperball": stays}
        made = {name: swept_widths(name, power) for name, power in found.items()}
        monkeypatch.setattr(rate_drift, "by_name", lambda _, made=made: made)
        claims = {claim.id: claim for claim in rate_drift.judge_drift({}, tiny_scale())}
        assert [claim.holds for claim in claims.values()] == [holds] * 3
        made["hyperball"].pop(Key("hyperball", width=256))  # a study under way
        assert [[key.width for key in one] for one in rate_drift.by_rule({}).values()] == [[64, 128]] * 3
        made["scaled"].pop(Key("scaled", width=128))  # one width is left, over which nothing moves
        assert rate_drift.by_rule({}) == {}


def test_rules_are_compared_without_widths_whose_best_rate_may_lie_beyond_the_grid(monkeypatch):
    """Under constant decay that of width 256 does, so that with it the rate would seem to move by a power of 1.5."""
    made = {name: swept_widths(name, power) for name, power in (("constant", -2.0), ("scaled", -0.5))}
    monkeypatch.setattr(rate_drift, "by_name", lambda _: made)
    claim = {claim.id: claim for claim in rate_drift.judge_drift({}, tiny_scale())}["scaled-drifts-less"]
    assert claim.measured == pytest.approx(0.5 - 2.0)
    assert claim.statement.startswith("widths 64 to 128")
    assert [rate_drift.moved(sweeps) for sweeps in made.values()] == ["8.00 times or more", "2.00 times"]
    made["constant"] = swept_widths("constant", -3.0)  # one width is left
    assert [claim.id for claim in rate_drift.judge_drift({}, tiny_scale())] == ["constant-drift"]


def test_a_run_that_two_studies_have_is_one():
    """In the middle of the lambdas: all widths at half the rate, and the first one at the rate of the other axes."""
    rates, lambdas = ({repr(run) for one in study(evidence.MINI) for run in one.configs()}
                      for study in (rate_drift.rate_drift, lambda_scaling.lambda_scaling))  # fmt: skip
    assert len(rates & lambdas) == 2 * (3 + 1) * 3  # rules, widths and seeds


@pytest.mark.slow
def test_the_scaling_of_lambda_from_training_to_the_page(tmp_path, monkeypatch, tiny):
    monkeypatch.setattr(evidence, "MINI", replace(tiny, map_seeds=2))
    monkeypatch.setattr(lambda_scaling, "FACTORS", (1.0, 2.0))
    shop = by_settings(tmp_path / "runs")
    assert evidence.gather("lambda-scaling", shop, evidence.file_of("lambda-scaling", tmp_path)) == (6 * 2 + 2) * 2 * 2
    grown = evidence.read_page(tmp_path)
    page = evidence.page(grown, "{lambda-scaling}")
    assert "| size | scaled | 48 | 2 |" in page
    assert "at an end" in page  # of two lambdas one is the smallest, the other the largest, so that no power is known
    assert "the batch at the same tokens" not in page


@pytest.mark.slow
def test_the_family_from_training_to_the_page(tmp_path, monkeypatch, tiny):
    """A search of two members on a seed of its own; then lambdas at the rate that was found, on others."""
    monkeypatch.setattr(family, "RATES", {name: family.RATES[name] for name in ("muon", "soap")})
    monkeypatch.setattr(evidence, "MINI", replace(tiny, maps=dict.fromkeys((24, 48), (0.5, 1.0)), map_seeds=2))
    shop, path = by_settings(tmp_path / "runs"), evidence.file_of("family", tmp_path)
    made = evidence.gather("family", shop, path)
    assert evidence.gather("family", shop, path) == 0
    assert not list((tmp_path / "runs").glob("*/checkpoints"))
    grown = evidence.EvidencePage(evidence.read_records(tmp_path))
    results = grown.results["family"]
    assert made == len(evidence.part("family").runs(results))
    assert sum(len(arms) for key, arms in results.items() if key.steps == 12) == 24 + 18
    assert {key.steps: {run.seed for runs in arms.values() for run in runs} for key, arms in results.items()} == {
        12: {2},
        24: {0, 1},
    }
    for member in ("muon", "soap"):
        for rule in ("constant", "scaled"):
            searched = [runs[0] for runs in results[Key(member, steps=12)].values() if runs[0].rule == rule]
            best = min(searched, key=lambda run: run.final_loss).config.optimizer.lr
            rates = sorted({run.config.optimizer.lr for run in searched})
            beside = {rates[0]: {rates[1]}, rates[-1]: {rates[-2]}}.get(best, set())
            tuned = [runs[0] for runs in results[Key(member, steps=24)].values() if runs[0].rule == rule]
            assert {run.config.optimizer.lr for run in tuned} == {best, *beside}
    page = evidence.page(grown, "{family}")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith(("| muon |", "| soap |"))]
    assert [row[1] for row in rows] == ["constant", "scaled"] * 4
    assert all("KiB" in row[-2] for row in rows[:4])
    assert rows[0][-2] != rows[2][-2]  # SOAP has more state
    assert {run.config.optimizer.preset for run in grown.records["family"].runs.values()} == {"", "soap"}


def test_after_the_search_lambda_takes_as_much_over_the_longer_run(monkeypatch):
    """Both rules are best at the lowest rate and the largest lambda; in twice the updates that is half as large."""
    short, run = family.family_run(evidence.MINI, shorter=2), family.family_run(evidence.MINI)
    monkeypatch.setattr(sweeps, "swept_loss", lambda one: one.loss)
    arms = {
        arm.name: [MadeRun(arm.optimizer, short, 3, arm.optimizer.lr / arm.optimizer.weight_decay)]
        for arm in family.grid(short, "soap")
    }
    found = family.family({Key("soap", steps=200): arms}, evidence.MINI)
    (soap,) = [one for one in found if one.key.name == "soap"]
    other = family.around(run, "soap", {name: runs for name, runs in arms.items() if name.startswith("scaled")} | {
        name: [MadeRun(runs[0].config.optimizer, short, 3, 2 * runs[0].config.optimizer.weight_decay)]
        for name, runs in arms.items() if name.startswith("constant")}, (0.25, 1.0, 4.0))  # fmt: skip
    # Each has its own best rate, and as that is an end the one next to it.
    assert [arm.optimizer.lr for arm in other[::3]] == [0.02, 0.01, 0.005, 0.01]
    totals = [arm.optimizer.lr * arm.optimizer.weight_decay for arm in other]
    assert totals[:3] * 4 == pytest.approx(totals, rel=1e-2)  # and all the same lambdas, as totals
    assert [arm.optimizer.lr for arm in soap.arms[::3]] == [0.005, 0.01] * 2
    for arm, more in zip(soap.arms, (1.0, 4.0, 16.0) * 4, strict=True):
        constant = replace(arm.optimizer, decay="constant")
        assert sum(decay_factors(run, constant)) == pytest.approx(more, rel=1e-2)


@pytest.mark.parametrize(("share", "moves", "holds"), [(0.4, 1.0, True), (0.8, 0.25, False)])
def test_claims_of_the_family_tell_a_member_that_forgives_and_one_that_moves_lambda(share, moves, holds, monkeypatch):
    """Basins over log lambda: scaled decay's is flatter by a share, normuon's best lambda another than Muon's."""
    monkeypatch.setattr(sweeps, "swept_loss", lambda one: one.loss)

    def losses(member, rule, lr, lam, steps):
        total = math.log(lam * lr * 0.545 * steps / (0.6 if member == "muon" else 0.6 * moves), 4)
        rate = math.log2(lr / (0.02 * family.RATES[member]))
        return 3.0 + 0.05 * rate**2 + 0.1 * (share if rule == "scaled" else 1.0) * total**2

    def made(one):
        return {arm.name: [MadeRun(arm.optimizer, one.base, seed, losses(one.key.name, arm.optimizer.decay,
            arm.optimizer.lr, arm.optimizer.weight_decay, one.base.steps) + 1e-4 * seed) for seed in one.seeds]
            for arm in one.arms}  # fmt: skip

    monkeypatch.setattr(family, "RATES", {name: family.RATES[name] for name in ("muon", "normuon")})
    results = {one.key: made(one) for one in family.search(evidence.MINI)}
    results |= {one.key: made(one) for one in family.family(results, evidence.MINI)}
    claims = {claim.id: claim for claim in family.judge_family(results, evidence.MINI)}
    assert {name: claim.holds for name, claim in claims.items()} == {
        "muon-forgives": holds,
        "normuon-forgives": holds,
        "normuon-constant-lambda": holds,
        "normuon-scaled-lambda": holds,
    }
    best = family.tuned_members(results, evidence.MINI)["normuon"]["constant"]
    assert (best.run.config.optimizer.lr, best.edge) == (0.05, False)


def made_family(one, best):
    """Runs that are best at the run's own rate, where decay takes so much in all; scaled decay's basin is flatter."""
    sums = {arm.name: sum(decay_factors(one.base, replace(arm.optimizer, decay="constant"))) for arm in one.arms}
    return {arm.name: [MadeRun(arm.optimizer, one.base, seed, (0.5 if arm.optimizer.decay == "scaled" else 1.0)
        * abs(math.log(sums[arm.name] / best, 4)) + math.log(arm.optimizer.lr / 0.02) ** 2 + 0.01 * seed)
        for seed in one.seeds] for arm in one.arms}  # fmt: skip


def searched_muon(monkeypatch):
    """What a search of Muon alone found, and the comparison at three lambdas that follows from it."""
    monkeypatch.setattr(family, "RATES", {"muon": 1.0})
    monkeypatch.setattr(sweeps, "swept_loss", lambda one: one.loss)
    (search,) = family.search(evidence.MINI)
    results = {search.key: made_family(search, 1.0)}
    (three,) = family.family(results, evidence.MINI)
    return results, three


def test_where_the_largest_lambda_is_the_best_a_larger_one_is_trained_and_judged(monkeypatch):
    results, three = searched_muon(monkeypatch)
    results[three.key] = made_family(three, 4.0)
    assert not family.judge_family(results, evidence.MINI)
    _, more = family.family(results, evidence.MINI)
    assert [len(more.arms), *more.seeds] == [2, 0, 1, 2]
    results[more.key] = made_family(more, 4.0)
    (claim,) = family.judge_family(results, evidence.MINI)
    assert (claim.id, claim.measured) == ("muon-forgives", pytest.approx(0.5 - 0.6, abs=0.01))
    assert family.family(results, evidence.MINI)[-1] == more


def test_where_the_smallest_lambda_is_the_best_that_rule_has_a_smaller_one(monkeypatch):
    results, three = searched_muon(monkeypatch)
    results[three.key] = {name: runs for best, rule in ((0.25, "constant"), (1.0, "scaled"))
                          for name, runs in made_family(three, best).items() if name.startswith(rule)}  # fmt: skip
    _, less = family.family(results, evidence.MINI)
    (arm,) = less.arms
    assert (str(less.key), arm.optimizer.decay) == ("muon, less decay, 400 updates", "constant")
    assert sum(decay_factors(less.base, arm.optimizer)) == pytest.approx(0.25 / 4, rel=1e-2)
    assert family.tuned_members(results, evidence.MINI)["muon"]["constant"].optimum.at_an_end
    results[less.key] = made_family(less, 0.25)
    assert not family.tuned_members(results, evidence.MINI)["muon"]["constant"].optimum.at_an_end
    assert family.family(results, evidence.MINI)[-1] == less


class MadeRun:
    """A run of which the loss is known."""

    def __init__(self, optimizer, base, seed, loss):
        self.config, self.loss, self.epochs = replace(base, optimizer=optimizer, seed=seed), loss, 1.0


def basin(middle, best):
    """Losses of lambdas a factor of two apart, as a scaling study has them."""
    grid = [middle * 2.0**place for place in (-2, -1, 0, 1, 2)]
    return {lam: 3.0 + 0.01 * math.log2(lam / best) ** 2 for lam in grid}


@pytest.mark.parametrize(("shift", "holds"), [(0.0, True), (1.0, False)])
def test_claims_tell_a_constant_total_from_another(shift, holds, monkeypatch):
    """Lambda as one over the updates, which is what all axes ask; or with one more power of what grows."""
    results = {}
    for one in lambda_scaling.lambda_scaling(evidence.MINI):
        run, middle = one.base, 128 if one.key.width else 8
        grown = (run.model.width if one.key.width else run.batch) / middle
        best = 0.1 * 1_600 / run.steps * grown**shift
        seeds = basin(best, best), basin(best, 1.05 * best)
        results[one.key] = {
            arm.name: [MadeRun(arm.optimizer, run, *end) for end in enumerate(losses[lam] for losses in seeds)]
            for lam in seeds[0]
            for arm in (lambda_arm(run.optimizer, rule, lam) for rule in regret.RULES)
        }
    monkeypatch.setattr(sweeps, "swept_loss", lambda one: one.loss)
    claims = {claim.id: claim for claim in lambda_scaling.judge_scaling(results, evidence.MINI)}
    for axis, asked in (("width", 0.0), ("batch", 1.0), ("size", -2.0)):
        claim = claims[f"scaled-{axis}"]
        assert (claim.measured, claim.holds) == (pytest.approx(asked + shift), holds)
    lost = Key("size", width=64)
    lambdas = sorted({runs[0].config.optimizer.weight_decay for runs in results[lost].values()})
    for runs in results[lost].values():  # the largest is the best, and a larger one may be better
        for run in runs:
            run.loss -= 0.1 * lambdas.index(run.config.optimizer.weight_decay)
    assert lambda_scaling.exponent(lambda_scaling.AXES[2], results, "scaled").value == pytest.approx(shift - 2.0)
    assert len(lambda_scaling.known_totals(results, "scaled")) == len(results) - 1


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_the_growth_of_gradients_from_training_to_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("muonsw.lab.runs.records.SAMPLES", 10)
    path = evidence.file_of("gradient-growth", tmp_path)
    assert evidence.gather("gradient-growth", by_settings(tmp_path / "runs"), path) == 2 * 3 * 2
    grown = evidence.read_page(tmp_path)
    page = evidence.page(grown, "{gradient-growth}")
    assert "| adamw, lr 0.01 | scaled |" in page
    assert (
        "muon, lr 0.01, constant decay: size of the step over the weight at the peak, over sqrt(2 lambda/eta)" in page
    )
    folder = next(one for one in sorted((tmp_path / "runs").iterdir()) if one.is_dir())
    run = load_run(folder)
    recorded = grown.records["gradient-growth"].runs[identity(run.config)].normalized
    for key in ("weight_rms", "gradient_rms", "update_rms", "decay", "lr"):
        assert recorded[key] == pytest.approx(run.normalized[key], rel=1e-4)
    # Of all decayed weights those that enter no normalization are left out.
    assert run.normalized["weight_rms"][-1] != pytest.approx(run.telemetry.scope("decayed")["weight_rms"][-1], rel=1e-3)


def settled_run(optimizer, settled="constant"):
    """A run whose norms have settled at every learning rate, as under the rule `settled`, with gradients as 1/norm."""
    config = tiny_run(optimizer={"weight_decay": 1.0, "algorithm": optimizer.algorithm, "lr": 0.02}, steps=100)
    config = replace(config, optimizer=replace(config.optimizer, decay=optimizer.decay))
    steps = np.arange(1.0, 101.0)
    lr = 0.02 * np.clip(1.1 - steps / 100, 0.1, 1.0)
    decay = lr if settled == "constant" else lr**2 / 0.02
    beta = 0.9 if optimizer.algorithm == "adamw" else 0.95
    weight = 0.2 * lr * ((1 + beta) / (1 - beta)) ** 0.5 / np.sqrt(2 * decay)
    columns = {"step": steps, "lr": lr, "decay": decay, "weight_rms": weight, "update_rms": 0.2 * lr}
    table = Columns({**columns, "gradient_rms": 1e-3 / weight})
    return Run("", Path(), config.as_data(), {}, {}, {"telemetry": {"": table, "decayed": table, "normalized": table}})


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_claims_of_gradients_hold_where_norms_have_settled(algorithm):
    optimizers = {rule: OptimizerConfig(algorithm=algorithm, decay=rule) for rule in ("constant", "scaled")}
    key = Key(f"{algorithm}, lr 0.02")
    results = {key: {rule: [settled_run(one, rule)] * 2 for rule, one in optimizers.items()}}
    claims = gradient_growth.judge_growth(results, tiny_scale())
    assert all(claim.holds for claim in claims), [claim.id for claim in claims if not claim.holds]
    swapped = {key: {rule: [settled_run(one, "scaled")] * 2 for rule, one in optimizers.items()}}
    broken = {claim.id for claim in gradient_growth.judge_growth(swapped, tiny_scale()) if not claim.holds}
    assert broken == {f"{key.slug}-rises", f"{key.slug}-rises-more"}


def test_training_needs_no_library_of_the_command_line_or_of_pages(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_run(steps=1).as_data()), encoding="utf-8")
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('tyro', 'plotly', 'orjson', 'datasets', 'pyarrow'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from muonsw.lab.studies import evidence\n"
        "from muonsw.lab.run import main\n"
        f"sys.exit(main([{str(config)!r}, {str(tmp_path / 'run')!r}]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def parabola(best, curvature, floor=2.0):
    """A basin over the logarithm of lambda, on a grid of factors of two."""
    grid = [0.0125 * 2**power for power in range(7)]
    return {lam: floor + curvature * math.log2(lam / best) ** 2 for lam in grid}


def test_the_vertex_of_a_parabola_is_found():
    losses = {lam: 2.0 + 0.01 * math.log2(lam / 0.13) ** 2 for lam in (0.025, 0.05, 0.1, 0.2, 0.4)}
    assert vertex(losses) == pytest.approx(0.13)
    assert vertex({0.1: 1.0, 0.2: 2.0}) == 0.1
    assert vertex({0.1: 2.0, 0.2: 1.0, 0.4: math.inf}) == 0.2
    low, high = good_range({0.05: 2.04, 0.1: 2.0, 0.2: 2.02, 0.4: 3.0})
    assert (low, high) == (pytest.approx(0.1 * 2**-0.25), pytest.approx(0.1 * 2**0.5))


def test_too_large_a_lambda_is_compared_at_the_same_lambda_and_at_the_same_total():
    """On straight lines over log2 lambda, where what lies between two lambdas is known."""

    def valley(rule, slope, per_lambda):
        losses = {0.1 * 2**power: 3.0 + slope * abs(power) for power in range(-3, 4)}
        return Optimum(rule, 1_600, 0.02, 1.0, 2, 0.1, 0.1, 0.1, per_lambda, False, losses)

    first, second, third = too_large([valley("constant", 0.2, 15.0), valley("scaled", 0.1, 10.0)])
    assert (first.lam, first.constant, first.scaled) == (0.2, pytest.approx(0.2), pytest.approx(0.1))
    assert first.same_total == pytest.approx(0.1 * (1 + math.log2(1.5)))
    assert second.same_total == pytest.approx(0.1 * (2 + math.log2(1.5)))
    assert third.same_total is None  # beyond the lambdas that were tried


def test_arms_are_held_against_constant_decay_of_their_own_settings(found):
    table = against_constant(found.results["main-table"])
    rows = {(row[0], row[1]): row for row in table.rows}
    assert rows["width 256", "scaled"][7:] == ("-0.215", "-0.236 to -0.193", 3)
    assert rows["width 256", "scaled, group peak"][7] == "-0.134"
    assert rows["width 128", "scaled, lambda 0.109"][7:] == ("+0.001", "-0.021 to +0.023", 3)
    assert rows["width 256", "constant, same total"][7] is None, "no other arm has its lambda"


def test_a_best_strength_at_the_end_of_its_range_is_reported():
    found = {
        "low": [{0.1: 3.0, 0.2: 3.1, 0.4: 3.2}],
        "inside": [{0.1: 3.1, 0.2: 3.0, 0.4: 3.2}],
        "high": [{0.1: 3.1, 0.2: 3.2, 0.4: 3.0}],
        "none": [{0.0: 3.0}],
    }
    assert best_at_an_end(found) == ["low", "high"]


def test_a_wider_basin_has_more_octaves():
    narrow, wide = parabola(0.1, 0.01), parabola(0.1, 0.0025)
    assert octaves_within(narrow) == pytest.approx(2.0)
    assert octaves_within(wide) == pytest.approx(4.0)
    assert regrets(wide)[0.1] == 0.0
    assert carried_regrets([parabola(0.4, 0.01)], [parabola(0.1, 0.01)]) == [pytest.approx(0.04)]


def test_claims_tell_a_rule_that_forgives_from_one_that_does_not():
    """Constant decay's best lambda falls with the horizon and its basin is narrow; scaled decay's does neither."""
    losses = {
        "constant": {400: [parabola(0.4, 0.01)] * 2, 1_600: [parabola(0.1, 0.01)] * 3},
        "scaled": {400: [parabola(0.1, 0.002)] * 2, 1_600: [parabola(0.1, 0.002, floor=1.99)] * 3},
    }
    assert all(claim.holds for claim in judge_losses(losses, 400, 1_600))
    swapped = {"constant": losses["scaled"], "scaled": losses["constant"]}
    assert not any(claim.holds for claim in judge_losses(swapped, 400, 1_600))


def simulated(rng, best, *, steep=0.018, flat=0.0045, noise=0.008, seeds=3):
    """Losses of some seeds in a basin that is steeper towards large lambdas, like those of the regret map."""
    grid = [0.0125 * 2**power for power in range(7)]
    x = np.log2(np.array(grid) / best)
    truth = np.where(x > 0, steep, flat) * x**2
    return [dict(zip(grid, (truth + noise * rng.standard_normal(7)).tolist(), strict=True)) for _ in range(seeds)]


def test_intervals_hold_the_truth_though_the_best_lambda_is_chosen_on_the_same_seeds():
    """Of a difference at the best lambdas, and of the power that the best lambda follows."""
    rng, gaps, powers = np.random.default_rng(0), [], []
    for _ in range(500):
        constant, scaled = simulated(rng, 0.1), simulated(rng, 0.1, steep=0.006, flat=0.002)
        gaps.append(over_seeds(best_gaps(scaled, constant)))
        other = simulated(rng, 0.05)
        pairs = zip(constant, other, strict=True)
        powers.append(over_seeds([sweeps.power([vertex(a), vertex(b)], [1, 2]) for a, b in pairs]))
    for found, truth in ((gaps, 0.0), (powers, -1.0)):
        assert np.mean([truth in one.interval for one in found]) >= 0.93
    assert abs(np.mean([one.value for one in gaps])) <= 0.003


def test_a_longer_run_is_judged_on_all_its_lambdas():
    """Also on those that the shorter runs lack: cut at the smallest of theirs, both regions would end there."""
    fewer = {lam: loss for lam, loss in parabola(0.1, 0.01).items() if lam >= 0.05}
    wide, wider = parabola(0.1, 0.0025), parabola(0.1, 0.01 / 9.0)
    losses = {"constant": {400: [fewer], 1_600: [wide]}, "scaled": {400: [fewer], 1_600: [wider]}}
    claims = {claim.id: claim for claim in judge_losses(losses, 400, 1_600)}
    assert claims["scaled-is-wider-1600"].measured == pytest.approx(6.0 / 4.0)
    assert claims["constant-regret-grows-1600"].measured == 0.0


def test_the_claims_of_long_runs_tell_growth_from_its_absence(monkeypatch):
    """Scaled decay gains more, and forgives more, in the longer runs; or the other way round."""
    short = {"constant": [parabola(0.1, 0.01)] * 2, "scaled": [parabola(0.1, 0.009)] * 2}
    longer = {"constant": [parabola(0.05, 0.01)] * 2, "scaled": [parabola(0.05, 0.002, floor=1.98)] * 2}
    for first, last, holds in ((short, longer, True), (longer, short, False)):
        losses = {rule: {25_600: last[rule], 6_400: first[rule]} for rule in ("constant", "scaled")}
        monkeypatch.setattr(long, "map_of", lambda _results, losses=losses: losses)
        monkeypatch.setattr(long, "optima", lambda _results: [optimum_of(*at) for at in ENDS])
        claims = {claim.id: claim for claim in long.judge_long({}, tiny_scale())}
        assert claims["gap-grows"].holds is holds
        assert claims["region-grows"].holds is holds
        assert claims["best-against-best"].holds is holds
        assert claims["too-large-costs-less"].holds is holds
        assert claims["constant-total-grows"].holds
        assert ONE_SEED not in claims["constant-total-grows"].limits
    losses |= {rule: {**found, 6_400: found[6_400][:1]} for rule, found in losses.items()}
    claims = {claim.id: claim for claim in long.judge_long({}, tiny_scale())}
    assert ONE_SEED in claims["scaled-total-grows"].limits  # of the two lengths one has no other
    assert ONE_SEED in claims["gap-grows"].limits


def test_a_best_lambda_at_the_end_of_the_grid_says_nothing_of_how_it_follows_the_length(monkeypatch, found):
    optima = [replace(optimum_of(*at), at_an_end=at == ("scaled", 6_400)) for at in ENDS]
    losses = {rule: {steps: [parabola(0.1, 0.01)] for steps in (6_400, 25_600)} for rule in ("constant", "scaled")}
    monkeypatch.setattr(long, "map_of", lambda _results: losses)
    monkeypatch.setattr(long, "optima", lambda _results: optima)
    claims = {claim.id for claim in long.judge_long({}, tiny_scale())}
    assert "constant-total-grows" in claims
    assert "scaled-total-grows" not in claims
    monkeypatch.setattr(regret, "optima", lambda _results: optima)
    note = regret.map_tables(found.results["long"], tiny_scale())[1].note
    assert note.endswith("to the power: constant -0.66.")


ENDS = [(rule, steps) for rule in ("constant", "scaled") for steps in (25_600, 6_400)]


def optimum_of(rule, steps):
    best = 0.02 if steps == 25_600 else 0.05
    return Optimum(rule, steps, 0.02, 1.0, 2, best, best, best, steps / 100, False, {best: 3.0})


def test_claims_tell_a_rule_that_is_as_good_from_one_that_is_not():
    found = {
        "constant": [{0.1: 3.0, 0.2: 3.2}, {0.1: 3.1, 0.2: 3.3}],
        "same": [{1.0: 3.5, 2.0: 3.0}, {1.0: 3.6, 2.0: 3.1}],
        "worse": [{0.1: 3.1}, {0.1: 3.2}],
    }
    claims = {claim.id: claim for claim in judge_strengths(found)}
    assert claims["same-is-as-good"].holds
    assert claims["worse-is-as-good"].fails


def test_rules_have_three_strengths_around_what_corresponds():
    """Fixed and log-time decay take at their middle strength what constant decay takes in all."""
    run = rules_run(evidence.MINI)
    found = candidates(run)
    assert {rule: len(arms) for rule, arms in found.items() if len(arms) != 3} == {"none": 1}
    rules = ("constant", "fixed", "log_time")
    totals = [math.fsum(decay_factors(run, found[rule][1].optimizer)) for rule in rules]
    assert totals == [pytest.approx(totals[0], rel=0.01)] * 3
    assert found["adamc"][0].optimizer.unnormalized == "constant"
    assert {arm.optimizer.adam_lr for arm in (*found["hyperball"], *found["hyperball_target"])} == {run.optimizer.lr}


def test_prices_are_costs_above_the_better_rule_at_its_best(found):
    prices = {(one.steps, one.rule, one.choice): one for one in found.prices() if one.text == evidence.MAP_TEXT}
    losses = regret.map_of(found.results["regret"])
    for steps, rule in ((1_600, "constant"), (6_400, "scaled")):
        means = {name: regret.mean_losses(losses[name][steps]) for name in regret.RULES}
        best = min(min(one.values()) for one in means.values())
        price = prices[steps, rule, "0.1"]
        assert price.cost.value == pytest.approx(means[rule][0.1] - best, abs=1e-12)
        assert not price.beyond


def test_every_kind_of_run_at_several_lambdas_has_its_price(found):
    """Not only lengths and widths: advice costs most in the shortest run of the narrowest model."""
    studies = (found.results[name] for name in ("regret", "long", "lambda-scaling"))
    configs = [regret.first_run(arms).config for results in studies for arms in results.values()]
    priced = {(one.width, one.batch, one.steps, one.peak_lr) for one in found.prices() if one.choice == untuned.ADVICE}
    assert priced == {(run.model.width, run.batch, run.steps, run.optimizer.lr) for run in configs}
    worst = max((one for one in found.prices() if one.choice == untuned.ADVICE), key=lambda one: one.cost.value)
    assert f"(the highest with width {worst.width} and {worst.steps} updates)" in evidence.page(found, "{conclusion}")


def test_a_lambda_beyond_those_tried_costs_at_least_what_the_last_did(found):
    """Not what a line through the last two says: with 0.01 that is more than no decay at all cost."""
    asked = evidence.MAP_TEXT, 1_600, "constant", "0.01"
    (price,) = [one for one in found.prices() if (one.text, one.steps, one.rule, one.choice) == asked]
    losses = {rule: seeds[1_600] for rule, seeds in regret.map_of(found.results["regret"]).items()}
    best = min(min(regret.mean_losses(seeds).values()) for seeds in losses.values())
    assert price.beyond
    assert price.cost.value == pytest.approx(regret.mean_losses(losses["constant"])[0.0125] - best, abs=1e-12)


def test_a_kind_of_run_of_which_one_diverged_has_no_price(found):
    arms = dict(found.results["regret"][Key(steps=1_600)])
    assert untuned.prices("text", {Key("all"): arms})
    name, runs = next(iter(arms.items()))
    arms[name] = [replace(runs[0], result={**runs[0].result, "diverged": 70}), *runs[1:]]
    assert untuned.prices("text", {Key("all"): arms}) == []


def test_prices_of_two_rules_are_compared_seed_by_seed():
    """One mean over another says nothing of chance, and the best lambda's own price is no measurement of zero."""

    def price(rule, *costs):
        return untuned.Price("updates", "fresh", 128, 8, 100, 0.02, rule, "0.1", 0.1, costs, beyond=False)

    for scaled, verdict in (((0.04, 0.05), "undecided"), ((0.04, 0.041), "holds"), ((0.2, 0.201), "fails")):
        found = [price("constant", 0.1, 0.101), price("scaled", *scaled)]
        (claim,) = untuned.judge_prices(found, "fresh")
        assert str(claim.verdict) == verdict
    table = untuned.price_table([price("constant", 0.0, 0.0), price("scaled", 0.01, 0.01)])
    assert [row[6] for row in table.rows[:2]] == ["0.000", "0.010 ± 0.000"]


def test_a_loss_between_lambdas_is_on_the_line_between_its_neighbours():
    losses = {0.1: 3.0, 0.2: 3.1, 0.4: 3.5}
    assert loss_at(losses, 0.2) == pytest.approx(3.1)
    assert loss_at(losses, 0.1 * 2**0.5) == pytest.approx(3.05)
    assert loss_at(losses, 0.41) is None
    assert loss_at(losses, 0.09) is None
    assert loss_at({0.1: 3.0, 0.2: math.inf, 0.4: 3.2}, 0.3) == math.inf  # nothing is known beside a run that diverged
    assert loss_at({0.1: 3.0, 0.2: math.inf, 0.4: 3.2}, 0.4) == 3.2


def task_run(task, arm, seed, end):
    """A run of a task that ended at this loss, and on the old text at one more."""
    name, *options = task.split()
    config = RunConfig(task=TaskConfig(name, tuple(options)), optimizer=OptimizerConfig(decay=arm.split(",")[0]))
    settings = {**config.as_data(), "arm": arm, "seed": seed}
    evals = Columns(step=np.array([9.0]), old=np.array([end + 1.0]))
    return Run("", Path(), settings, {}, {"final_loss": end}, {"eval": {"": evals}})


def task_comparison(task, **ends):
    """Constant decay, at one lambda and of the same total, ends at 2; scaled decay ends elsewhere."""
    arms = {"constant": [2.0, 2.01, 2.02], "constant, same total": [2.0, 2.01, 2.02], **ends}
    return {Key(task): {arm: [task_run(task, arm, *end) for end in enumerate(those)] for arm, those in arms.items()}}


def test_the_claims_of_tasks_tell_worse_from_no_difference():
    worse, better = [2.1, 2.12, 2.11], [1.9, 1.92, 1.91]
    tuned = [f"finetune.py start=pre/{rule}-seed{{seed}} text=new.txt" for rule in ("constant", "scaled")]
    for first, last, verdicts in ((worse, better, ("fails", "holds")), (better, worse, ("holds", "fails"))):
        found = task_comparison("a.py", scaled=first) | task_comparison("b.py", scaled=first)
        found |= task_comparison(tuned[0], scaled=first) | task_comparison(tuned[1], scaled=last)
        claims = {claim.id: str(claim.verdict) for claim in worked_tasks.judge_tasks(found)}
        expected = zip(
            ("same-lambda", "same-total", "new", "old"), (v for v in verdicts for _ in range(2)), strict=True
        )
        assert claims == dict(expected)
    assert "lower in 3 of 4 comparisons beyond chance, and higher in 1; than" in worked_tasks.summary(found)
    (task, *_, gap, control, old), *_ = worked_tasks.tasks_table(found).cells()
    assert (task.text, gap.text, gap.tone) == ("`a.py`", "-0.100 (-0.125 to -0.075)", "holds")
    assert (control.text, old.text) == (gap.text, f"old {gap.text}")


def test_the_claims_at_300_tokens_per_parameter_tell_the_rules_apart(tiny):
    """A scaled rule that saves a quarter of the steps and forgives lambda holds; with the rules swapped it does not."""
    study = evidence.part("tokens-per-parameter")

    def results(better):
        """Losses with a best total of 1.3 in every cell; the better rule forgives large lambdas and falls sooner."""
        found = {}
        for one in study.planned():
            found[one.key] = {}
            lambdas = sorted({arm.optimizer.weight_decay for arm in one.arms})
            for arm in one.arms:
                off = math.log2(arm.optimizer.weight_decay / lambdas[1])
                milder = arm.optimizer.decay == better
                loss = 3.0 + (0.01 if milder else 0.05) * off**2
                steps = np.arange(1, 41) * one.base.steps / 40
                curve = loss + (0.5 if milder else 1.0) * (1.0 - steps / one.base.steps)
                tables = {"eval": {"": Columns({"step": steps, "loss": curve})}}
                config = one.config(arm, 0)
                settings, result = config.as_data(), {"steps": config.steps, "final_loss": loss, "best_loss": loss}
                found[one.key][arm.name] = [Run(arm.name, Path(), settings, {}, result, tables)]
        return {claim.id: claim for claim in study.claims(found, tiny)}

    right, swapped = results("scaled"), results("constant")
    for id in ("saves-steps", "too-large-costs-less", "scaled-is-wider", "scaled-advice"):
        assert right[id].holds, id
    for id in ("saves-steps", "too-large-costs-less", "scaled-is-wider"):
        assert not swapped[id].holds, id
    assert right["constant-advice"].measured == pytest.approx(0.0)


def test_adamw_at_the_published_lambda_has_the_published_total():
    """Power Lines' fit is of lambda times the peak rate times the steps, which is more than a schedule's sum."""
    (one,) = paper_regime.adamw_lambdas({}, evidence.MINI)
    run = one.base
    published = paper_regime.tokens_per_parameter(run) ** 0.527 / 1.084 / (run.optimizer.lr * run.steps)
    found = {}
    for arm in one.arms:
        loss = math.log(arm.optimizer.weight_decay / published) ** 2
        found[arm.name] = [Run(arm.name, Path(), one.config(arm, 0).as_data(), {}, {"final_loss": loss}, {})]
    claims = {claim.id: claim for claim in paper_regime.judge_adamw({one.key: found}, evidence.MINI)}
    assert claims["constant-published"].measured == pytest.approx(0.0, abs=0.01)
    # At the same lambda scaled decay has a smaller total.
    assert claims["scaled-published"].measured == pytest.approx(math.log2(0.73), abs=0.05)


def test_gains_of_both_peaks_are_judged_against_constant_decay_and_their_own_controls():
    study = evidence.part("which-peak")
    ends = {
        "scaled": -0.2,
        "scaled, group peak": -0.1,
        "constant, same total": -0.3,
        "constant, group peak's total": 0.0,
    }

    def verdicts(growth):
        """Scaled decay by either peak ends lower by `growth` at the wider model."""
        found = {}
        for place, one in enumerate(study.planned()):
            losses = {arm: ends.get(arm, 0.0) - growth * place * arm.startswith("scaled") for arm in by_name(one)}
            found[one.key] = {
                name: [
                    Run(name, Path(), one.config(arm, seed).as_data(), {}, {"final_loss": losses[name]}, {})
                    for seed in one.seeds
                ]
                for name, arm in by_name(one).items()
            }
        return {claim.id: str(claim.verdict) for claim in study.claims(found, study.scale)}

    def by_name(one):
        return {arm.name: arm for arm in one.arms}

    grown, shrunk = verdicts(0.05), verdicts(-0.05)
    assert grown["width-256-scaled-constant"] == "holds"
    assert grown["width-256-scaled-constant, same total"] == "fails"
    assert grown["width-256-scaled, group peak-constant, group peak's total"] == "holds"
    for arm in ("scaled", "scaled, group peak"):
        assert (grown[f"{arm}-constant-grows"], shrunk[f"{arm}-constant-grows"]) == ("holds", "fails")


def recorded_lines():
    """Every record on fresh text as plain settings, loss curve and final loss, read without the lab's own code."""
    lines = [json.loads(line) for line in (ROOT / "evidence/enwiki-123M.jsonl").read_text("utf-8").splitlines()]

    def flat(settings, prefix=""):
        for key, value in settings.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]

    usual = dict(flat(lines[0]["config"]))
    return [(usual | line["settings"], line["losses"], line["result"].get("final_loss")) for line in lines[1:]]


def with_half(values, digits=3):
    """A mean and half of its interval: over three seeds that is 4.303 standard errors."""
    half = 4.303 * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def steps_saved(constant, scaled):
    """The share of steps, in percent, after which one loss curve has the best loss of another, by lines in between."""
    best_step, best = min(constant, key=lambda row: row[1])[:2]
    for (x0, y0, *_), (x1, y1, *_) in pairwise(scaled):
        if y1 <= best:
            return 100 - 100 * (x0 + (y0 - best) / (y0 - y1) * (x1 - x0)) / best_step
    return math.nan


def saved_text(constant, scaled):
    mean, half = with_half([steps_saved(*pair) for pair in zip(constant, scaled, strict=True)], 0).split(" ± ")
    return f"{mean}% ± {half}"


def template():
    return (ROOT / "evidence" / evidence.TEMPLATE).read_text("utf-8")


def test_the_short_answer_is_what_the_records_say():
    """Recomputed from the lines of the file."""
    found = {}
    for settings, curve, final in recorded_lines():
        if settings["optimizer.algorithm"] != "muon" or settings["schedule.shape"] != "cosine":
            continue
        names = ("model.width", "steps", "batch", "optimizer.weight_decay", "optimizer.decay", "optimizer.peak")
        key = (*(settings[name] for name in names), settings["telemetry_every"], settings["optimizer.lr"])
        found.setdefault(key, {})[settings["seed"]] = (curve, final)

    def runs(width, steps, batch, lam, rule, peak, every, lr):
        matching = {key: own for key, own in found.items() if math.isclose(key[3], lam, rel_tol=5e-3)}
        (own,) = [
            own for key, own in matching.items() if (*key[:3], *key[4:]) == (width, steps, batch, rule, peak, every, lr)
        ]
        return [own[seed] for seed in range(3)]

    def saved(*cell, peak, every, lr):
        curves = [
            [curve for curve, _ in runs(*cell, *rule, every, lr)] for rule in (("constant", "group"), ("scaled", peak))
        ]
        return saved_text(*curves)

    page = template()
    table = page[: page.index("## What to conclude")]
    long_lr = next(key[-1] for key in found if key[:3] == (128, 25_600, 8))
    assert saved(256, 1600, 16, 2.19, peak="base", every=160, lr=0.02) + " at width 256" in table
    own_peak = [
        saved(*cell, peak="group", every=160, lr=0.02) for cell in ((256, 1600, 16, 2.19), (512, 1600, 16, 4.38))
    ]
    assert saved(512, 1600, 16, 4.38, peak="base", every=160, lr=0.02) + " at width 512" in table
    assert " and ".join(own_peak) + " with the group" in table
    assert saved(128, 1600, 16, 1.09, peak="base", every=160, lr=0.02) + " at width 128" in table
    assert saved(128, 25_600, 8, 0.08, peak="group", every=2560, lr=long_lr) + " in 25,600 steps" in table
    longest_lr = next(key[-1] for key in found if key[:3] == (64, 34_800, 8))
    assert saved(64, 34_800, 8, 0.1, peak="group", every=3480, lr=longest_lr) + " at width 64" in table
    ends = {
        (rule, lam): [final for _, final in runs(128, 25_600, 8, lam, rule, "group", 2560, long_lr)]
        for rule in ("constant", "scaled")
        for lam in (0.01, 0.08)
    }
    gap = np.subtract(ends["scaled", 0.08], ends["constant", 0.01])
    assert f"ends {with_half(gap)} nats below scaled decay at 0.08" in table
    losses = [with_half(np.subtract(ends[rule, 0.08], ends[rule, 0.01])) for rule in ("constant", "scaled")]
    assert f"constant decay loses {losses[0]} nats against its best, scaled decay {losses[1]}" in table


def test_what_is_said_about_adamw_is_what_the_records_say(found):
    runs = {}
    for settings, curve, final in recorded_lines():
        if (settings["optimizer.algorithm"], settings["steps"], settings["batch"]) == ("adamw", 6_400, 8):
            cell = settings["optimizer.decay"], settings["optimizer.weight_decay"]
            runs.setdefault(cell, {})[settings["seed"]] = (curve, final)
    lambdas = sorted({lam for _, lam in runs})
    ends = {cell: np.array([own[seed][1] for seed in range(3)]) for cell, own in runs.items()}
    gaps = [ends["scaled", lam] - ends["constant", lam] for lam in lambdas]
    page = " ".join(template().split())
    listed = [f"{'+' if np.mean(gap) > 0 else ''}{with_half(gap)}" for gap in gaps]
    assert f"{', '.join(listed[:-1])} and {listed[-1]}" in page
    small, large = np.mean(gaps[:3], axis=0), -np.mean(gaps[3:], axis=0)
    assert f"{with_half(small)} higher up to constant decay's best lambda and {with_half(large)} lower above it" in page

    best = {rule: min(lambdas, key=lambda lam: ends[rule, lam].mean()) for rule in regret.RULES}
    assert best == {"constant": 0.02, "scaled": 0.04}
    gap = with_half(ends["scaled", 0.04] - ends["constant", 0.02])
    assert f"one setting: {gap}, not decided" in page
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"best against best {gap}".replace("-", "\N{MINUS SIGN}") in readme
    curves = {cell: [own[seed][0] for seed in range(3)] for cell, own in runs.items()}
    saved = [saved_text(curves["constant", lam], curves["scaled", lam]) for lam in (0.08, 0.16)]
    assert f"with AdamW {saved[0]} at four times and {saved[1]} at eight times constant decay's best lambda" in page

    # The scatter of seeds goes with the step at which the loss passes 4.
    passed = {
        cell: np.array([next(row[0] for row in one if row[1] < 4.0) for one in own]) for cell, own in curves.items()
    }
    every = np.concatenate(list(passed.values()))
    apart = [np.concatenate([own - own.mean() for own in (table[cell] for cell in runs)]) for table in (passed, ends)]
    assert f"passes 4.0 after {every.min():,} to {every.max():,} updates" in page
    assert f"correlation {np.corrcoef(*apart)[0, 1]:.2f}" in page

    (arms,) = [arms for key, arms in found.results["adamw-lambda"].items() if key.name == paper_regime.ADAMW]
    for rule, words in (("constant", "The best totals are {} under constant"), ("scaled", "and {} under scaled decay")):
        one = regret.optimum(arms, rule)
        totals = over_seeds([math.log(vertex(losses) * one.per_lambda) for losses in regret.losses_of(arms, rule)])
        mean, low, high = map(math.exp, (totals.value, totals.interval.low, totals.interval.high))
        assert words.format(f"{mean:.1f} ({low:.1f} to {high:.1f})") in page


def test_what_is_said_about_peaks_is_what_the_records_say():
    runs = {}
    for settings, curve, final in recorded_lines():
        names = ("optimizer.algorithm", "steps", "batch", "telemetry_every", "optimizer.lr", "schedule.shape")
        if tuple(settings[name] for name in names) == ("muon", 1_600, 16, 160, 0.02, "cosine"):
            names = ("model.width", "optimizer.decay", "optimizer.peak")
            cell = (*(settings[name] for name in names), round(settings["optimizer.weight_decay"], 3))
            runs.setdefault(cell, {})[settings["seed"]] = (curve, final)

    def ends(*cell):
        return np.array([runs[cell][seed][1] for seed in range(3)])

    def pair(values):
        return " and ".join(map(with_half, values))

    constant, base, group, of_base, of_group = zip(
        *(
            (
                ends(width, "constant", "group", lam),
                ends(width, "scaled", "base", lam),
                ends(width, "scaled", "group", lam),
                ends(width, "constant", "group", 0.797),
                ends(width, "constant", "group", control),
            )
            for width, lam, control in ((256, 2.19, 1.594), (512, 4.38, 3.188))
        ),
        strict=True,
    )
    lower = {
        "base": np.subtract(constant, base),
        "group": np.subtract(constant, group),
        "base, same total": np.subtract(of_base, base),
        "group, same total": np.subtract(of_group, group),
    }
    page = " ".join(template().split())
    assert f"at widths 256 and 512 by {pair(lower['base'])} (27% ± 3 and 37% ± 2 fewer steps)" in page
    assert f"by {pair(lower['group'])} (17% ± 2 and 19% ± 2) by the group's own" in page
    assert f"the undivided peak leads, by {pair(np.subtract(group, base))}, because" in page
    assert f"also ends {pair(np.subtract(group, of_base))} below scaled decay by the group's own peak" in page
    gained = f"gains {pair(lower['base, same total'])}, the group's own {pair(lower['group, same total'])}"
    assert gained in page
    shrinks, grows = -np.diff(lower["base, same total"], axis=0)[0], np.diff(lower["group, same total"], axis=0)[0]
    assert f"shrinks by {with_half(shrinks)}, and by the group's own it grows by {with_half(grows)}" in page
    assert (
        f"ends {with_half(base[0] - ends(256, 'constant', 'group', 0.219))} below scaled decay by the undivided" in page
    )


def test_tuned_rules_differ_by_what_the_short_answer_says(found):
    """Best of means against best of means, one mean for each of 20 settings of Muon; AdamW's is the 21st."""
    gaps, shares = {}, {}
    for name in ("regret", "tokens-per-parameter", "lambda-scaling", "schedules", "adamw-lambda"):
        for key, arms in found.results[name].items():
            if key.name == paper_regime.ADAMW_SEARCH:
                continue
            scaled, constant = (regret.losses_of(arms, rule) for rule in ("scaled", "constant"))
            lowest = tuple(min(losses.values()) for losses in (*scaled, *constant))  # a setting of two axes counts once
            gaps[lowest] = np.mean(best_gaps(scaled, constant))
            means = [regret.mean_losses(losses) for losses in (constant, scaled)]
            best = [min(losses, key=losses.get) for losses in means]
            for lam in (lam for lam in means[0].keys() & means[1].keys() if lam > max(best)):
                theirs, ours = (losses[lam] - losses[own] for losses, own in zip(means, best, strict=True))
                if theirs > 0.02:
                    shares[lowest, lam] = ours / theirs
    page, readme = ((ROOT / path).read_text("utf-8") for path in ("evidence/evidence.md.in", "README.md"))

    def shown(values):
        interval = over_seeds(values)
        return f"{interval.value:.4f} ± {interval.interval.high - interval.value:.4f}"

    *muons, _adamws = gaps.values()
    assert len(muons) == 20
    assert f"next to no difference: {shown(muons)} nats, the mean over 20 settings" in page
    assert f"{shown(muons)} nats over 20 settings".replace("-", "\N{MINUS SIGN}") in readme
    assert f"[short answer](#the-short-answer) {shown(list(gaps.values()))}." in page
    costs = f"{np.median(list(shares.values())):.1f} as much in the median ({min(shares.values()):.1f} to"
    assert f"{costs} {max(shares.values()):.2f} over {len(shares)} cases" in readme
