"""The page in a real browser: it draws, answers, asks the network for nothing, and runs no code from elsewhere."""

import os
import shutil

import pytest

from muonsw.lab.report.report import write_report
from muonsw.lab.runs import load_runs
from tests.lab.report.made_runs import Recipe, write_run
from tests.lab.report.test_report_runs import HOSTILE

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
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    recipes = {
        "constant-0": Recipe("constant", 0, 120), "constant-1": Recipe("constant", 1, 120),
        "scaled-0": Recipe("scaled", 0, 120), HOSTILE.replace("/", "|"): Recipe("scaled", 0, 120, arm=HOSTILE),
    }  # fmt: skip
    runs = load_runs(write_run(root / name, recipe) for name, recipe in recipes.items())
    return write_report(root / "report.html", HOSTILE, runs, verdict=HOSTILE, images=False)[0]


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


def test_the_legend_hides_arms_in_every_figure_and_tells_runs_apart(visit):
    page = visit()
    assert page.locator(".entry").count() == 3
    assert traces(page, 4)  # the runs of one arm and their median, and two arms with one run
    entry(page, "constant").click()
    assert traces(page, 2)
    assert traces(page, 4, "training-loss")
    assert entry(page, "constant").get_attribute("aria-pressed") == "false"
    entry(page, "constant").focus()
    page.keyboard.press("Enter")
    assert traces(page, 4)
    assert entry(page, "constant").get_attribute("aria-pressed") == "true"
    page.get_by_label("thin lines").uncheck()
    assert traces(page, 3, "training-loss")
    page.get_by_label("Group curves").select_option("run")
    assert page.locator(".entry").count() == 4
    assert traces(page, 4)
    entry(page, "constant-1").click()
    assert traces(page, 3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_reader_and_the_button(visit, scheme):
    page = visit(color_scheme=scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    paper = "document.getElementById('validation-loss')._fullLayout.paper_bgcolor"
    first = page.evaluate(f"[{background}, {paper}]")
    assert (first[1] == "#FFFFFF") == (scheme == "light")
    page.get_by_role("button", name="Switch to").click()
    second = page.evaluate(f"[{background}, {paper}]")
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert page.locator("#theme").inner_text() == scheme


def test_tools_change_the_axes_and_hovering_shows_values(visit):
    page = visit()
    shown = page.locator("#validation-loss .modebar-btn").evaluate_all("(all) => all.map((one) => one.dataset.title)")
    assert "Zoom" in shown
    assert [title for title in shown if "share" in title.lower()] == []
    box = page.locator("#validation-loss .draglayer .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9)
    page.wait_for_function("() => document.querySelectorAll('#validation-loss .hovertext').length > 0")
    assert "·" in page.locator("#validation-loss .hovertext").first.text_content()
    axis = "document.getElementById('validation-loss')._fullLayout.yaxis"
    top = page.evaluate(f"{axis}.range[1]")
    page.locator("[data-tool=all][data-figure=validation-loss]").click()
    assert page.evaluate(f"{axis}.range[1]") > top
    page.locator("[data-tool=log][data-figure=validation-loss]").click()
    assert page.evaluate(f"{axis}.type") == "log"
    width = page.locator("#validation-loss").bounding_box()["width"]
    page.locator("[data-tool=wide][data-figure=validation-loss]").click()
    assert page.locator("#validation-loss").bounding_box()["width"] > 1.5 * width


def test_a_phone_needs_no_sideways_scrolling_and_hostile_names_are_text(visit):
    page = visit(**PHONE)
    assert page.locator("h1").text_content() == HOSTILE
    assert entry(page, "onerror").text_content() == HOSTILE
    assert page.locator("main img, main b, main script").count() == 0
    page.locator("#decay").scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelectorAll('#decay g.trace').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    widths = page.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.getBoundingClientRect().right)")
    assert max(widths) <= 360


def test_on_a_phone_the_legend_stays_in_sight_and_wide_tables_say_that_they_scroll(visit):
    page = visit(**PHONE)
    page.locator("#decay").scroll_into_view_if_needed()
    box = page.locator(".legend").bounding_box()
    assert 0 <= box["y"] < 10
    assert box["height"] < 740 / 4
    table = page.locator("#runs .scroll")
    table.scroll_into_view_if_needed()
    hint = page.locator("#runs .more")
    assert hint.inner_text().startswith("→ scroll for ")
    table.evaluate("(box) => box.scrollTo(box.scrollWidth, 0)")
    hint.wait_for(state="hidden")
    first = page.locator("#runs tbody th").first.bounding_box()
    assert first["x"] >= 0  # the names of the rows do not scroll away
    assert not page.locator("#runs .scroll.cut").count()


def test_a_summary_comes_before_any_table(visit):
    page = visit()
    order = page.evaluate("[...document.querySelectorAll('.verdict, table, .chart')].map((part) => part.className)")
    assert order[0] == "verdict"
