"""The viewer's pages in a real browser, from file://: list, filters, tokens and keys work; nothing is complained of."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright
from viewer_world import World

from slipstream import cli

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


@pytest.fixture(params=["light", "dark"])
def page(full: World, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    assert cli.main(["view", str(full.run_dir.root), "--out", str(tmp_path / "pages")]) == 0
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(color_scheme=request.param).new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{(tmp_path / 'pages' / 'index.html').as_uri()}#trajectory=1")
        expect(page.locator("#title")).to_contain_text("#1")
        yield page
        browser.close()
        assert complaints == []


def test_a_reader_finds_reads_and_goes_on(page: Page) -> None:
    found, title, tip = page.locator("#found"), page.locator("#title"), page.locator("#tip")
    expect(found).to_have_text("8 trajectories")
    page.locator("section.sampled .t").first.hover()
    expect(tip).to_contain_text("log-prob")
    for mode in ("Difference", "Version", "Advantage", "Log-prob", "Mask"):
        page.get_by_role("radio", name=mode, exact=True).check()
        expect(page.locator("#legend li").first).to_be_visible()
    page.locator("#stream").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".t.now")).to_have_count(1)
    page.keyboard.press("j")
    expect(title).to_contain_text("#2")
    page.locator("select[name=outcome]").select_option("timeout")
    expect(found).to_contain_text("1 of 8")
    page.locator("#clear").click()
    page.locator("#q").fill("no idea")
    expect(found).to_contain_text("1 of 8")
    page.locator("#clear").click()
    page.locator("#list").focus()
    page.keyboard.press("End")
    expect(found).to_have_text("8 trajectories")
    violations = Axe().run(page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in violations] == []


def test_what_a_model_says_harms_nobody(page: Page) -> None:
    page.locator("#q").fill("onerror")
    page.locator("#rows .row").first.click()
    expect(page.locator("#title")).to_contain_text("#7")
    assert page.evaluate("window.hurt") is None
    assert page.locator("#stream img").count() == 0
