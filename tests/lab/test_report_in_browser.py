"""The page in a real browser: it draws, answers, asks the network for nothing, and runs no code from elsewhere."""

import math
import os
import shutil

import pytest

from muonsw.lab.report import write_report
from muonsw.lab.runs import load_runs
from tests.lab.made_runs import HOSTILE, Recipe, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]
SWITCHES = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
DRAWN = "() => document.querySelectorAll('#validation-loss g.trace').length > 0"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    recipes = {
        "constant-0": Recipe("constant", 0, 120), "constant-1": Recipe("constant", 1, 120),
        "scaled-0": Recipe("scaled", 0, 120), HOSTILE.replace("/", "|"): Recipe("scaled", 0, 120, arm=HOSTILE),
    }  # fmt: skip
    runs = load_runs(write_run(root / name, recipe) for name, recipe in recipes.items())
    return write_report(root / "report.html", HOSTILE, runs, verdict=HOSTILE)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=list(SWITCHES))
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, report):
    """Opens the page; at the end nothing may have been asked for, complained about, or run."""
    contexts, pages, asked, said = [], [], [], []

    def opened(**options):
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(180_000)  # milliseconds: a start on cores that are busy with other things
        contexts.append(context)
        pages.append(page)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(report.as_uri())
        page.wait_for_function(DRAWN)
        return page

    yield opened
    hacked = [page.evaluate("window.hacked === undefined") for page in pages]
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert all(hacked)


def traces(page, count, figure="validation-loss"):
    """Waits until a figure shows so many traces."""
    page.wait_for_function(f"() => document.querySelectorAll('#{figure} g.trace').length === {count}")
    return count


def entry(page, name):
    return page.locator(".entry").filter(has_text=name)


def test_the_legend_hides_arms_in_every_figure(visit):
    page = visit()
    assert page.locator(".entry").count() == 3
    assert traces(page, 5)  # two runs of one arm and their median, and two arms with one run
    entry(page, "constant").click()
    assert traces(page, 2)
    assert traces(page, 2, "training-loss")
    assert entry(page, "constant").get_attribute("aria-pressed") == "false"
    entry(page, "constant").focus()
    page.keyboard.press("Enter")
    assert traces(page, 5)
    assert entry(page, "constant").get_attribute("aria-pressed") == "true"


def test_tools_change_the_axes_and_hovering_shows_values(visit):
    page = visit()
    shown = page.locator("#validation-loss .modebar-btn").evaluate_all("(all) => all.map((one) => one.dataset.title)")
    assert "Zoom" in shown
    assert [title for title in shown if "share" in title.lower() or "cloud" in title.lower()] == []
    box = page.locator("#validation-loss .draglayer .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9)
    page.wait_for_function("() => document.querySelectorAll('#validation-loss .hovertext').length > 0")
    assert "·" in page.locator("#validation-loss .hovertext").first.text_content()
    axis = "document.getElementById('validation-loss')._fullLayout.yaxis"
    before = page.evaluate(f"{axis}.range")
    page.locator("[data-log=validation-loss]").click()
    assert page.evaluate(f"{axis}.type") == "log"
    assert page.evaluate(f"{axis}.range") == pytest.approx([math.log10(end) for end in before])
    page.locator("[data-log=validation-loss]").click()
    assert page.evaluate(f"{axis}.range") == pytest.approx(before)


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_readable_at_any_width_and_hostile_names_are_text(visit, width):
    page = visit(viewport={"width": width, "height": 740}, is_mobile=width == 400, has_touch=width == 400)
    assert page.locator("h1").text_content() == HOSTILE
    assert entry(page, "onerror").text_content() == HOSTILE
    assert page.locator("main img, main b, main script").count() == 0
    order = page.evaluate("[...document.querySelectorAll('.verdict, table, .chart')].map((part) => part.className)")
    assert order[0] == "verdict"
    page.locator("#decay").scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelectorAll('#decay g.trace').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    widths = page.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.getBoundingClientRect().right)")
    assert max(widths) <= width
    legend = page.locator(".legend").bounding_box()
    assert 0 <= legend["y"] < 10, "it stays in sight"
    assert legend["height"] < 740 / 4
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    hidden = page.evaluate("[...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth - box.clientWidth)")
    assert width < 1280 or max(hidden) == 0, "no table hides columns"
