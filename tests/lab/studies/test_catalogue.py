"""The catalogue: studies that can be built at every scale, share their runs, and keep their promises of size."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from muonsw.lab.arms import decay_factors, lr_multiples
from muonsw.lab.plan import cost
from muonsw.lab.studies.catalogue import (
    TRAINING_STUDIES,
    best_rules,
    drift_run,
    family,
    find_study,
    lambda_scaling,
    repeated_text,
    schedules,
)
from muonsw.lab.studies.scales import SCALES
from muonsw.lab.train.config import RunConfig

STUDIES = {study.name: study for study in TRAINING_STUDIES}
PAGE = Path(__file__).parents[3] / "docs" / "reproducing.md"
MINI, CPU = SCALES["mini"], SCALES["cpu"]


@cache
def planned(name, scale):
    return STUDIES[name].at(SCALES[scale]).planned()


@pytest.mark.parametrize("scale", ["cpu", "mini"])
def test_the_page_says_how_many_runs_every_study_has(scale):
    page = PAGE.read_text(encoding="utf-8").partition("## Training experiments")[2]
    everything = set()
    for name, study in STUDIES.items():
        *_, cells = re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.M)
        runs, cell = study.at(SCALES[scale]).runs(), cells.split("|")[1 + list(SCALES).index(scale)]
        everything |= set(runs)
        assert f"{len(runs)} runs" in cell or "same" in cell or "those of" in cell or not runs, name
    assert scale != "cpu" or f"all studies together are {len(everything)}" in " ".join(page.split())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_builds_runs_that_can_be_written_and_read_back(name, scale):
    comparisons = planned(name, scale)
    assert set(STUDIES[name].notes) <= set(SCALES)
    assert len({one.key for one in comparisons}) == len(comparisons)
    for one in comparisons:
        assert len({arm.name for arm in one.arms}) == len(one.arms)
        assert len(one.seeds) >= 1
        for arm in one.arms:
            config = one.config(arm, one.seeds[0])
            assert RunConfig.from_data(json.loads(json.dumps(config.as_data()))) == config
            assert scale == "paper" or not max(decay_factors(config, arm.optimizer)) > 1, "more than the whole weight"
    assert bool(comparisons) == (name != "recipes")


@pytest.mark.parametrize("scale", ["cpu", "mini"])
def test_small_studies_stay_within_their_promise(scale):
    chosen, limit = SCALES[scale], {"cpu": 0.5, "mini": 1.1}[scale]
    for study in TRAINING_STUDIES:
        assert cost(study.at(chosen).runs()).hours(chosen.tflops, chosen.workers) < limit, study.name


def test_studies_share_their_runs():
    table = set(STUDIES["main-table"].at(CPU).runs())
    for name in ("steady-state", "diagnostics"):
        assert set(STUDIES[name].at(CPU).runs()) <= table, name
    # The width sweep at the width of the horizons is one of the horizons.
    widths, horizons = (set(STUDIES[name].at(CPU).runs()) for name in ("width-transfer", "horizon-transfer"))
    assert len(widths & horizons) == len(CPU.rates) * CPU.sweep_seeds


def test_a_part_of_a_study_is_found_by_its_name():
    assert [one.key.width for one in find_study("main-table/width-256").at(MINI).planned()] == [256]
    assert [one.key.steps for one in find_study("regret/1600-steps").at(MINI).planned()] == [1600]
    assert find_study("main-table/width-7").at(MINI).planned() == []


def test_the_grids_are_those_of_the_evidence():
    """The runs of docs/evidence.md: lengths, lambdas and totals as they were tried."""
    grids = {str(one.key): [arm.name for arm in one.arms] for one in planned("long", "mini")}
    assert grids["25600 steps"][-1] == "scaled, lambda 0.08"
    (longest,) = planned("tokens-per-parameter", "mini")
    assert (longest.base.model.width, longest.base.steps) == (64, 34_800)
    assert {arm.optimizer.weight_decay for arm in longest.arms} == {0.003, 0.0065, 0.02, 0.05, 0.1}
    (repeated,) = repeated_text(MINI)
    assert repeated.run.data.train_windows * 16 == repeated.run.steps * repeated.run.batch
    assert list(repeated.arms["scaled"]) == [0.4, 0.8, 1.6, 3.2, 6.4]


@pytest.mark.parametrize("scale", SCALES.values(), ids=list(SCALES))
def test_total_decay_does_not_follow_the_length_where_lambda_is_followed(scale):
    """Else the length would be what is measured."""
    runs = [*(cell.run for cell in lambda_scaling(scale)), drift_run(scale)]
    totals = [sum(decay_factors(run, replace(run.optimizer, decay="constant"))) / run.optimizer.lr for run in runs]
    assert len({run.steps for run in runs}) > 3
    assert totals == pytest.approx([totals[0]] * len(runs), rel=0.01)


def test_members_of_the_family_have_the_same_totals():
    for cell in family(MINI):
        totals = [cell.total("constant", lam) for lam in cell.arms["constant"]]
        assert totals == pytest.approx([0.25, 1.0, 4.0, 16.0], rel=0.05)
        assert {one.adam_lr for own in cell.arms.values() for one in own.values()} == {MINI.map_run.optimizer.lr}


def test_a_straight_line_begins_where_warmup_ends():
    runs = {str(cell.key): cell.run for cell in schedules(MINI)}
    line, flat = lr_multiples(runs["linear to 0"]), lr_multiples(runs["WSD to 0"])
    warmup = runs["linear to 0"].schedule.warmup(len(line))
    assert (line[warmup - 1], line[-1]) == (1.0, 0.0)
    assert {round(one - after, 9) for one, after in pairwise(line[warmup:])} == {round(1 / (len(line) - warmup), 9)}
    assert [flat[step] for step in (warmup, len(flat) // 2)] == [1.0, 1.0]


def test_strengths_of_rules_begin_at_the_total_of_constant_decay():
    (cell,) = best_rules(MINI)
    totals = [cell.total(rule, sorted(cell.arms[rule])[1]) for rule in ("constant", "fixed", "log_time")]
    assert totals == [pytest.approx(totals[0], rel=0.01)] * 3
    assert math.isnan(cell.total("gradient_norm", next(iter(cell.arms["gradient_norm"]))))
    held = (one for rule in ("hyperball", "hyperball_target") for one in cell.arms[rule].values())
    assert {one.adam_lr for one in held} == {cell.run.optimizer.lr}
