"""The view of a run as one file: it opens without a server and loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop import cli
from support.chromium import SIZES, show
from support.reported_runs import HOSTILE, write_run

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_view_of_a_saved_page_is_drawn_from_the_file_alone(
    stored_runs: Path, tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    target = tmp_path / "report.html"
    assert cli.main(["report", str(stored_runs / "quickstart"), "--output", str(target)]) == 0
    page = open_page(target.as_uri())
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    show(page, "overview", "quickstart")
    show(page, "curves", "train/reward")
    assert page.locator(".uplot").count() >= 4
    show(page, "time", "mean of a step")
    show(page, "time", "Sample 3 of group 2 ended last")
    show(page, "configuration?find=clip", "ratio_clip_max")
    show(page, "now", "State")
    show(page, "rollouts", "rollouts")
    rows = page.locator(".row")
    assert rows.count() > 3
    rows.first.locator("a").click()
    page.wait_for_selector(".tokens")
    assert page.get_by_text("colour tokens by").count() == 1 and page.get_by_text("☆ star").count() == 0
    page.get_by_text("Ledger").click()
    page.wait_for_selector("text=This file does not hold it")
    page.get_by_text("its group").click()
    page.wait_for_selector("text=Rollouts, the best first")
    show(page, "tasks", "mean reward")
    page.locator(".row a").first.click()
    page.wait_for_selector("text=its group")
    show(page, "validation", "beginning of the text")
    page.locator(".row a").first.click()
    page.wait_for_selector("text=Back to the list")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_markup_in_what_a_model_wrote_does_nothing(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    run = write_run(tmp_path / "mine", text=HOSTILE)
    assert cli.main(["report", str(run)]) == 0
    page = open_page((run / "report.html").as_uri())
    views = (("now", "Starts"), ("configuration", "grpo.seed"), ("task/sum:0", "Step 1"), ("validation/0?at=1-0", "owned"))
    for view, text in views:
        show(page, view, text)
        for width, height in SIZES.values():
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("main img, main script, main style").count() == 0
