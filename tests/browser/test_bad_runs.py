"""A run that goes wrong is named on the first screen of the page, with what to do, and in its curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.bad_runs import FAULTS, write_bad_run
from support.chromium import SETTLED, UNREADABLE, serve_view, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

# Whether an element is in the window as it opens, without scrolling.
SEEN = "(element) => { const box = element.getBoundingClientRect(); return box.top >= 0 && box.bottom <= window.innerHeight; }"


def test_the_first_screen_names_what_is_wrong_and_what_to_do(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    for fault in FAULTS:
        write_bad_run(tmp_path / fault, fault)
    write_bad_run(tmp_path / "sound", None)
    with serve_view(tmp_path) as url:
        page = open_page(url)
        page.wait_for_function("() => document.querySelectorAll('.runs .badge.health').length === 8")
        rows = {row.split("\t")[1].split()[0]: row for row in page.locator(".runs tbody tr").all_inner_texts()}
        for fault, (_, said, advice) in FAULTS.items():
            level = "look" if fault == "one_reward" else "wrong"
            assert f"{level} {fault.replace('_', ' ')}" in rows[fault].lower()
            show(page, f"overview?runs={fault}&run={fault}", said)
            finding = page.locator(".finding")
            assert finding.get_attribute("data-finding") == fault and advice in finding.inner_text()
            assert page.locator(".card .badge.health").inner_text() == level
            assert page.evaluate(UNREADABLE) == []
        assert rows["sound"].split("\t")[2].strip() == "ok"


def test_one_run_opens_with_its_finding_marks_its_curves_and_leads_to_the_step(
    tmp_path: Path, open_page: Callable[..., Any]
) -> None:
    with serve_view(write_bad_run(tmp_path / "mine", "kl_exploded")) as url:
        page = open_page(url)
        page.wait_for_selector(".finding")
        assert page.locator(".finding").evaluate(SEEN) and page.locator(".badge.health").evaluate(SEEN)
        page.wait_for_function(SETTLED)
        chart = page.locator('[data-metric="train/kl_penalty"]')
        chart.get_by_text("KL exploded").wait_for()
        assert "KL exploded from step 14 to 30" in (chart.locator(".plot").get_attribute("aria-label") or "")
        page.get_by_role("link", name="Steps 14 to 30").click()
        page.wait_for_function("() => document.getElementById('main').textContent.includes('of 16 rollouts')")


def test_what_is_answered_to_everything_stands_first_with_its_counts(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    with serve_view(write_bad_run(tmp_path / "mine", "one_answer")) as url:
        page = open_page(url)
        show(page, "answers", "4 different answers")
        first = page.locator("table.answers tbody tr").first.inner_text().split("\t")
        assert [each.strip() for each in first] == ["b", "25 %", "4", "16", "16"]
