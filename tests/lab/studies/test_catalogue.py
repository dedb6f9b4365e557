"""The catalogue: studies that can be built at their scales, share their runs, and keep their promises of size."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from muonsw.lab.compare import decay_factors
from muonsw.lab.plan import cost
from muonsw.lab.studies.catalogue import RUN, STUDIES, drift_run, family, lambda_scaling
from muonsw.lab.studies.scales import SCALES
from muonsw.lab.train.config import RunConfig

TRAINED = {name: study for name, study in STUDIES.items() if study.scales}
PAGE = Path(__file__).parents[3] / "docs" / "reproducing.md"
MINI, CPU = SCALES["mini"], SCALES["cpu"]


@pytest.mark.parametrize("scale", ["cpu", "mini"])
def test_the_page_says_how_many_runs_the_studies_of_the_paper_have(scale):
    page = PAGE.read_text(encoding="utf-8").partition("## Training experiments")[2]
    everything = set()
    for name, study in TRAINED.items():
        if scale in study.scales:
            runs = study.runs(SCALES[scale])
            everything |= set(runs)
            for cells in re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.M):
                cell = cells.split("|")[1 + list(study.scales).index(scale)]
                assert f"{len(runs)} runs" in cell or "same" in cell, name
    assert scale != "cpu" or f"all studies at scale cpu take {len(everything)} runs" in " ".join(page.split())
    assert page.count(" runs, ") >= 12  # the page has its table


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", TRAINED)
def test_every_study_builds_runs_that_can_be_written_and_read_back(name, scale):
    study = TRAINED[name]
    if scale not in study.scales:
        return
    comparisons = study.comparisons(SCALES[scale])
    assert comparisons
    assert len({comparison.key for comparison in comparisons}) == len(comparisons)
    for comparison in comparisons:
        assert len({arm.name for arm in comparison.arms}) == len(comparison.arms)
        for arm in comparison.arms:
            config = comparison.config(arm, comparison.seeds[0])
            assert RunConfig.from_data(json.loads(json.dumps(config.as_data()))) == config
            assert scale == "paper" or not max(decay_factors(config, arm.optimizer)) > 1, "more than the whole weight"


@pytest.mark.parametrize("scale", ["cpu", "mini"])
def test_small_studies_stay_within_their_promise(scale):
    chosen, (workers, limit) = SCALES[scale], {"cpu": (2, 0.5), "mini": (1, 1.1)}[scale]
    for study in TRAINED.values():
        if scale in study.scales:
            assert cost(study.runs(chosen)).hours(chosen.tflops, workers) < limit, study.name


def test_studies_share_their_runs():
    for scale in SCALES.values():
        for name in ("steady-state", "diagnostics"):
            assert set(STUDIES[name].runs(scale)) <= set(STUDIES["main-table"].runs(scale)), (name, scale.name)
    # The width sweep at the width of the horizons is one of the horizons.
    widths, horizons = (set(STUDIES[name].runs(CPU)) for name in ("width-transfer", "horizon-transfer"))
    assert len(widths & horizons) == len(CPU.rates) * CPU.seeds


def test_a_part_of_a_study_is_found_by_its_name():
    for name, part in (("main-table", "width-256"), ("regret", "1600-steps"), ("theory", "matrix")):
        assert part in STUDIES[name].parts(MINI)
        assert STUDIES[name].select(part).parts(MINI) == [part]


def test_total_decay_does_not_follow_the_length_where_lambda_is_followed():
    """Otherwise the study would measure the effect of the length."""
    runs = [*(cell.run for cell in lambda_scaling()), drift_run()]
    totals = [sum(decay_factors(run, replace(run.optimizer, decay="constant"))) / run.optimizer.lr for run in runs]
    assert len({run.steps for run in runs}) > 3
    assert totals == pytest.approx([totals[0]] * len(runs), rel=0.01)


def test_members_of_the_family_have_the_same_totals():
    for cell in family():
        totals = [cell.total("constant", lam) for lam in cell.arms["constant"]]
        assert totals == pytest.approx([0.25, 1.0, 4.0, 16.0], rel=0.05)
        assert {optimizer.adam_lr for tried in cell.arms.values() for optimizer in tried.values()} == {RUN.optimizer.lr}
