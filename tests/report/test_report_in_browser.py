"""The report in a real browser: charts are read with the pointer and with keys, nothing is complained of."""

import shutil
from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright
from viewer_world import World

from slipstream import cli

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(params=["light", "dark"])
def page(full: World, request: pytest.FixtureRequest) -> Iterator[Page]:
    assert cli.main(["report", str(full.run_dir.root)]) == 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(color_scheme=request.param).new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(full.run_dir.report.as_uri())
        yield page
        browser.close()
        assert complaints == []


def test_a_reader_sees_the_numbers(page: Page) -> None:
    for figure in page.locator("figure").all():
        plot = figure.locator(".plot")
        plot.hover()
        assert ": " in figure.locator(".reading").inner_text()
    page.locator("#fates .plot").focus()
    reading = page.locator("#fates .reading")
    page.keyboard.press("Home")
    assert reading.inner_text() == "step 1: trained 60 · over the cutoff 3 · mismatch 2 · no signal 20 · failed 5"
    page.keyboard.press("ArrowRight")
    assert reading.inner_text().startswith("step 2: ")
    page.keyboard.press("End")
    assert reading.inner_text().startswith("step 4: ")
    page.keyboard.press("Tab")
    page.locator("h1").hover()
    assert reading.inner_text() == ""
    found = Axe().run(page)
    assert [violation["id"] for violation in found.response["violations"]] == []
