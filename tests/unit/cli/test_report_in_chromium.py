"""A report in a real Chromium: nothing is said on its console, nothing is loaded, curves answer the pointer, and it fits every width."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from strop import cli
from support.reported_runs import HOSTILE, write_run

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(300)]
CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt-get install chromium")
@pytest.mark.parametrize("text", ["an answer", HOSTILE], ids=["plain", "hostile"])
def test_a_report_is_quiet_answers_the_pointer_and_fits(tmp_path: Path, text: str) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    run = write_run(tmp_path / "mine", text=text)
    assert cli.main(["report", str(run)]) == 0
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto((run / "report.html").as_uri())
        figure = page.locator("figure[data-steps]").first
        usual = figure.locator(".value").inner_text()
        figure.locator("svg").hover(position={"x": 120, "y": 60})
        assert " at step " in figure.locator(".value").inner_text()
        page.mouse.move(0, 0)
        assert figure.locator(".value").inner_text() == usual
        for width in (1400, 800, 380):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("summary").first.click()
        assert page.locator("details").first.get_attribute("open") is not None
        assert (
            page.evaluate("getComputedStyle(document.querySelector('h1')).display") == "block"
        )  # no style of the text's is applied
        assert page.locator("img").count() == 0
        browser.close()
    assert said == [] and len(asked) == 1
