"""The figures of the studies that train no run, as pictures and as a page."""

import pytest
import torch

from muonsw.lab.studies.figures import draw_convergence
from tests.lab.small_experiments import SMALL
from tests.lab.test_report import data_of


@pytest.fixture(scope="module")
def outcomes():
    torch.set_num_threads(1)
    return {name: SMALL[name].run(0) for name in ("scalar-figure", "matrix-figure")}


@pytest.fixture(scope="module")
def drawn(outcomes, tmp_path_factory):
    return {path.suffix: path for path in draw_convergence(outcomes, tmp_path_factory.mktemp("figure"))}


def test_equal_results_give_equal_files(outcomes, drawn, tmp_path):
    assert set(drawn) == {".png", ".svg", ".html"}
    for path in draw_convergence(outcomes, tmp_path):
        assert path.read_bytes() == drawn[path.suffix].read_bytes()


def test_the_page_holds_every_start_the_median_and_the_bound(drawn, outcomes):
    figures = data_of(drawn[".html"].read_text(encoding="utf-8"))["figures"]
    assert [figure["name"] for figure in figures] == list(outcomes)
    for figure, outcome in zip(figures, outcomes.values(), strict=True):
        starts = sum(len(series.values) for series in outcome.series)
        assert len(figure["data"]) == starts + 2  # and the median of each rule
        assert [shape["y0"] for shape in figure["layout"]["shapes"]] == [outcome.series[0].level]
        assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
