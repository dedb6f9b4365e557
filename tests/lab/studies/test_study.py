"""Training studies: runs that diverge, and tokens that do not fit."""

from dataclasses import replace
from pathlib import Path

import pytest

from muonsw.lab.errors import UsageError
from muonsw.lab.studies.catalogue import STUDIES
from muonsw.lab.studies.main_table import all_rows
from muonsw.lab.studies.scales import GPT2_VOCAB, SCALES, find_data
from tests.lab.studies.small_comparisons import WILD, by_settings, tiny_scale
from tests.lab.train.small_runs import tokens


def test_paper_scale_refuses_other_tokens():
    assert SCALES["paper"].vocab == GPT2_VOCAB
    with pytest.raises(UsageError, match="needs GPT-2 tokens"):
        find_data(SCALES["paper"], Path(tokens()))
    assert find_data(SCALES["cpu"], Path(tokens())) == Path(tokens())


@pytest.mark.slow
def test_an_arm_that_diverges_takes_its_claims_with_it_and_a_sweep_counts_it_as_worst(tmp_path):
    scale = tiny_scale(rates=(0.01, 0.02, 9.0), seeds=1)
    scale = replace(scale, sweep=replace(scale.sweep, diverged=1.0))
    report = STUDIES["width-transfer"].at(scale).conduct(by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert "'adamw, lr 9' diverged at update" in report.sentence
    assert [row[-1].text for row in report.tables[0].rows][-1] == "diverged"
    wild = replace(STUDIES["main-table"], comparisons=lambda scale: [with_wild(one) for one in all_rows(scale)[:1]])
    scale = tiny_scale(seeds=1)
    scale = replace(scale, rows={width: replace(run, diverged=1.0) for width, run in scale.rows.items()})
    report = wild.at(scale).conduct(by_settings(tmp_path / "runs"), tmp_path, images=False)
    assert report.claims == {"main-table": []}
    assert report.sentence.startswith("No claim is made. 'scaled' diverged at update")


def with_wild(one):
    return replace(one, arms=tuple(replace(WILD, name="scaled") if arm.name == "scaled" else arm for arm in one.arms))
