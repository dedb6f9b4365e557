"""The evidence: tables and numbers of the page and the README follow from the records."""

import math
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "research"))
import figures  # noqa: E402
import tables  # noqa: E402

PAGE = tables.PAGE.read_text(encoding="utf-8")


def test_the_tables_of_the_pages_follow_from_the_records():
    more = tables.MORE.read_text(encoding="utf-8")
    assert tables.page(PAGE) == PAGE
    assert tables.page(more) == more
    assert sorted(re.findall(r"<!-- table: (\S+) -->", PAGE + more)) == sorted(tables.TABLES)


@pytest.mark.parametrize(("name", "text"), tables.facts().items(), ids=list(tables.facts()))
def test_numbers_in_the_text_follow_from_the_records(name, text):
    assert text in " ".join(PAGE.split()), name


def test_the_readme_says_the_same():
    """Every number with an interval that it quotes from our runs is one of the page."""
    quoted = re.findall(r"\d[\d.]*%? ± \d[\d.]*\b", " ".join((ROOT / "README.md").read_text(encoding="utf-8").split()))
    assert quoted
    assert [number for number in quoted if number not in " ".join(PAGE.split())] == []


def test_a_wrong_number_is_noticed():
    assert tables.page(PAGE.replace("27% ± 3", "29% ± 3")) == PAGE != PAGE.replace("27% ± 3", "29% ± 3")


def test_every_run_has_its_settings_and_a_loss():
    for row in tables.ROWS:
        assert {"study", "steps", "seed", "decay", "weight_decay", "lr", "batch"} <= set(row)
        assert math.isfinite(row["final_loss"])
        assert row.get("total_decay", 0) >= 0
    keys = [tuple(str(value) for name, value in row.items() if not name.startswith("final")) for row in tables.ROWS]
    assert len(set(keys)) == len(keys), "a run appears twice"


def test_statistics_are_those_computed_by_hand():
    assert tables.half([1.0, 2.0, 3.0]) == pytest.approx(2.4841, abs=1e-4)
    assert tables.between({0.1: [3.0], 0.4: [3.2]}, 0.2) == pytest.approx([3.1])
    rows = [[{"seed": 0, "eval.step": [0, 10, 20], "eval.loss": losses}] for losses in ([5, 4, 3.5], [5, 3, 2])]
    assert tables.steps_saved(*rows) == pytest.approx([62.5])


def test_the_figures_are_drawn(tmp_path):
    figures.draw(tmp_path)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {name.removeprefix("assets/") for name in re.findall(r"assets/[a-z-]+\.png", PAGE)}
