"""What is drawn: both formats, one theme, a page that needs no network, thinning that keeps extremes."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects
import pytest
import torch

from muonsw.lab.claims.claim import Claim, Criterion, Evidence
from muonsw.lab.claims.table import claims_table
from muonsw.lab.report.page import page
from muonsw.lab.report.sections import Axis, Chart, Curve, Document, LegendEntry, Level
from muonsw.lab.report.static import write_chart
from muonsw.lab.report.study_figures import draw_convergence
from muonsw.lab.report.theme import LIGHT, PALETTES, matplotlib_style, plotly_style
from tests.lab.small_experiments import SMALL


@pytest.fixture(scope="module")
def outcomes():
    torch.set_num_threads(1)
    return {name: SMALL[name].run(0) for name in ("scalar-figure", "matrix-figure")}


@pytest.fixture(scope="module")
def written(outcomes, tmp_path_factory):
    return {path.suffix: path for path in draw_convergence(outcomes, tmp_path_factory.mktemp("figure"))}


class Tags(HTMLParser):
    """Collects elements, and the text of scripts by their place."""

    def __init__(self):
        super().__init__()
        self.found, self.scripts, self.inside = [], [], False

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, _tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)


def parse(text):
    tags = Tags()
    tags.feed(text)
    return tags


def test_static_figures_are_written(written):
    assert written[".png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in written[".svg"].read_text(encoding="utf-8")[:1000]
    assert not list(written[".png"].parent.glob(".*"))


def test_equal_results_give_equal_files(outcomes, written, tmp_path):
    for path in draw_convergence(outcomes, tmp_path):
        assert path.read_bytes() == written[path.suffix].read_bytes()


def test_nothing_is_drawn_without_curves(tmp_path):
    assert draw_convergence({"scalar": Evidence([])}, tmp_path) == []


@pytest.mark.parametrize("log", [0, 10])
def test_losses_as_large_as_floats_can_be_are_drawn_as_gaps(log, tmp_path):
    heights = [2.0, 9e99, 9e299, 1e308, -1.7e308, float("inf"), float("nan"), 3.0]
    curve = Curve("run", "constant", range(len(heights)), heights)
    chart = Chart("loss", "Loss", [curve], x=Axis("step"), y=Axis("loss", log=log))
    for path in write_chart(chart, [LegendEntry("constant", "constant")], tmp_path):
        assert path.stat().st_size > 1000


def test_the_page_asks_the_network_for_nothing(written):
    text = written[".html"].read_text(encoding="utf-8")
    tags = parse(text)
    for tag, attrs in tags.found:
        assert tag not in ("link", "iframe", "img", "base"), tag
        assert attrs.get("href", "#").startswith("#")
        for attribute in ("src", "action", "data"):
            assert attribute not in attrs, (tag, attribute)
    policy = next(a["content"] for t, a in tags.found if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert "http" not in policy
    ours = [script for attrs, script in tags.scripts if len(script) < 1_000_000]
    assert not any(re.search(r"https?://", script) for script in ours)
    # Without a list of its own the page has plotly's buttons, one of which uploads the chart.
    (buttons,) = re.findall(r"modeBarButtons: (.*),\n", ours[-1])
    assert "sendChartToCloud" not in buttons
    assert len(text) < 6_000_000


def test_the_policy_admits_exactly_the_scripts_of_the_page(written):
    tags = parse(written[".html"].read_text(encoding="utf-8"))
    policy = next(a["content"] for t, a in tags.found if t == "meta" and "http-equiv" in a)
    run = [script for attrs, script in tags.scripts if attrs.get("type") != "application/json"]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in run]
    assert re.findall(r"sha256-([^']+)", policy) == hashes


def test_the_page_holds_both_panels_and_themes_that_plotly_accepts(written, outcomes):
    tags = parse(written[".html"].read_text(encoding="utf-8"))
    data = json.loads(next(script for attrs, script in tags.scripts if attrs.get("type") == "application/json"))
    assert [chart["name"] for chart in data["charts"]] == list(outcomes)
    for chart, outcome in zip(data["charts"], outcomes.values(), strict=True):
        starts = sum(len(series.values) for series in outcome.series)
        assert len(chart["curves"]) == starts + 2  # and the median of each rule
        assert [level["y"] for level in chart["levels"]] == [outcome.series[0].level]
        assert chart["x"]["log"]
        assert chart["y"]["log"]
    for theme in data["themes"].values():
        plotly.graph_objects.Figure([], {**theme["layout"], "xaxis": theme["axis"], "yaxis": theme["axis"]})


def test_a_summary_comes_before_everything(written):
    text = written[".html"].read_text(encoding="utf-8")
    assert re.search(r'<p class="verdict">[^<]* claims hold', text)
    assert text.index('class="verdict"') < min(text.index("<table"), text.index('class="chart"'))


def test_hostile_text_stays_text():
    evil = "</script><img src=x onerror=alert(1)>"
    bad = Claim(evil, evil, evil, evil, 1.0, 2.0, Criterion.ABSOLUTE, 0.0, evil, limits=evil)
    figure = Chart("plot", evil, [Curve(evil, evil, [1], [1])], note=evil, levels=[Level(1.0, evil)])
    tags = parse(page(Document(evil, [figure, claims_table({evil: [bad]})], verdict=evil)))
    assert "img" not in [tag for tag, _ in tags.found]
    assert len(tags.scripts) == 3


def test_rules_keep_their_colours_and_both_themes_define_all():
    assert (LIGHT.colour("constant"), LIGHT.colour("scaled")) == ("#0072B2", "#D55E00")
    assert matplotlib_style()["figure.facecolor"] == LIGHT.background
    for palette in PALETTES.values():
        assert plotly_style(palette)["layout"]["paper_bgcolor"] == palette.background
        assert plotly_style(palette)["axis"]["gridcolor"] == palette.grid
    with pytest.raises(KeyError):
        LIGHT.colour("unheard of")


@pytest.mark.parametrize("palette", PALETTES.values())
def test_lines_stand_out_from_the_background(palette):
    for colour in (palette.constant, palette.scaled, palette.text, palette.muted, *palette.extra):
        least = 3.0 if colour not in palette.extra else 1.9
        assert contrast(colour, palette.background) >= least, colour


def contrast(one, other):
    """The contrast ratio that web accessibility guidelines define."""

    def luminance(colour):
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
