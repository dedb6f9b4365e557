"""The page in a real browser: it draws, answers, asks the network for nothing, and runs no code from elsewhere."""

import os
import shutil

import pytest

from muonsw.lab.report import write_report
from muonsw.lab.runs import load_runs
from tests.lab.made_runs import make_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
BROWSER = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]
SWITCHES = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
NAME = "<img src=x onerror=window.hacked=1> & $x^2$"
DRAWN = "() => document.querySelectorAll('#validation-loss g.trace').length > 0"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    arms = [("constant", 0, "constant"), ("constant", 1, "constant"), ("scaled", 0, "scaled"), ("scaled", 0, NAME)]
    runs = load_runs(
        make_run(root / str(number), rule=rule, seed=seed, arm=arm, steps=400)
        for number, (rule, seed, arm) in enumerate(arms)
    )
    return write_report(root / "report.html", NAME, runs, verdict=NAME)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=list(SWITCHES))
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, report):
    """Open the page; afterwards check that it made no request, logged nothing, and ran no code from a name."""
    contexts, pages, urls, messages = [], [], [], []

    def opened(**options):
        context = browser.new_context(**options)
        page = context.new_page()
        page.set_default_timeout(180_000)  # milliseconds: a start on cores that are busy with other things
        contexts.append(context)
        pages.append(page)
        page.on("request", lambda request: urls.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(report.as_uri())
        page.wait_for_function(DRAWN)
        return page

    yield opened
    hacked = [page.evaluate("window.hacked === undefined") for page in pages]
    for context in contexts:
        context.close()
    assert messages == []
    assert [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []
    assert all(hacked)


def traces(page, count, figure="validation-loss"):
    """Wait until a figure shows this many traces."""
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


def test_hovering_shows_values(visit):
    page = visit()
    box = page.locator("#validation-loss .draglayer .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] * 0.9)
    page.wait_for_function("() => document.querySelectorAll('#validation-loss .hovertext').length > 0")
    assert "·" in page.locator("#validation-loss .hovertext").first.text_content()


def test_names_are_text_and_a_phone_shows_the_full_width(visit):
    page = visit(viewport={"width": 400, "height": 740}, is_mobile=True, has_touch=True)
    assert page.locator("h1").text_content() == entry(page, "onerror").text_content() == NAME
    assert page.locator("main img").count() == 0
    page.locator("#decay").scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelectorAll('#decay g.trace').length > 0")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
