"""Runs and a report of them, written once for all tests of this folder."""

import pytest

from muonsw.lab.report.page import write_report
from muonsw.lab.runs import load_runs
from tests.lab.report.made_runs import Recipe, write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    recipes = {
        "constant-0": Recipe("constant", 0, 400), "constant-1": Recipe("constant", 1, 400),
        "scaled-0": Recipe("scaled", 0, 400), "scaled-1": Recipe("scaled", 1, 400, complete=False),
    }  # fmt: skip
    return load_runs(write_run(root / name, recipe) for name, recipe in recipes.items())


@pytest.fixture(scope="module")
def written(runs, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report") / "report.html", "A report", runs)
