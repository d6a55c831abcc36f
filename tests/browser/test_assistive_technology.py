"""What screen readers and keyboards meet: roles, names, where the focus is, and what opens on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.chromium import NAMELESS, VIOLATIONS, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

CHOSEN = (
    "() => document.getElementById(document.querySelector('[role=grid]').getAttribute('aria-activedescendant'))?.ariaRowIndex"
)


def test_a_list_is_a_grid_that_says_which_row_is_chosen(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollouts/3?run=quickstart", "of 12")
    grid = page.get_by_role("grid", name="Rollouts")
    assert grid.get_attribute("aria-rowcount") == "13"
    heads = grid.get_by_role("columnheader").all_inner_texts()
    assert [head.split()[0] for head in heads] == [
        "step",
        "task",
        "reference",
        "reward",
        "correct",
        "format",
        "advantage",
        "tokens",
        "ending",
        "beginning",
    ]
    grid.focus()
    assert page.evaluate(CHOSEN) == "2"
    for key, row in (("j", "3"), ("ArrowDown", "4"), ("End", "13"), ("Home", "2")):
        page.keyboard.press(key)
        page.wait_for_function(f"row => ({CHOSEN})() === row", arg=row)
    first = grid.get_by_role("row").nth(1)
    assert first.get_attribute("aria-selected") == "true" and first.get_by_role("link").inner_text() == "sum:10+7"
    assert first.get_by_role("gridcell").count() == len(heads)


def test_the_page_has_its_landmarks_and_a_new_view_begins_at_its_heading(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/3/0/1?run=quickstart", "calls calculator")
    page.wait_for_function("() => document.activeElement.tagName === 'H1'")
    assert [page.get_by_role(role).count() for role in ("banner", "main")] == [1, 1]
    assert {"Views", "Parts of the rollout"} == set(
        page.get_by_role("navigation").evaluate_all("all => all.map((nav) => nav.ariaLabel)")
    )
    assert page.get_by_role("link", name="Rollouts", exact=True).get_attribute("aria-current") == "page"
    page.keyboard.press("ArrowRight")
    page.get_by_role("status").filter(has_text="token 0").wait_for()  # which is read out
    show(page, "curves?runs=quickstart&find=train/reward", "1 found")
    page.wait_for_function("() => document.activeElement.tagName === 'H1'")
    assert page.title() == "Curves of quickstart"
    assert page.get_by_role("img", name="train/reward: last quickstart").count() == 1


def test_the_first_tab_leads_past_the_views(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_opens_on_demand_has_names_and_contrast_too(
    address: str, open_page: Callable[..., Any], axe: str, theme: str
) -> None:
    page = open_page(address, "middle", theme, script=axe)

    def check(what: str) -> None:
        assert page.evaluate(VIOLATIONS) == [], what
        assert page.evaluate(NAMELESS) == [], what

    show(page, "curves?runs=quickstart,wide-clip&smooth=0.5", "First")
    page.get_by_role("button", name="2 of 5 runs").click()
    page.wait_for_selector(".picker label")
    check("the choice of runs")
    page.keyboard.press("Escape")
    page.wait_for_selector(".picker label", state="detached")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    check("the list of keys")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    show(page, "rollout/3/1/1?run=quickstart&colour=clipped", "reasoning")
    page.locator("details.reasoning summary").click()
    page.wait_for_selector("details.reasoning [data-token]")
    page.keyboard.press("g")
    page.wait_for_selector(".tokens .at")
    check("reasoning with a clipped token")
    show(page, "rollout/3/9/1?run=quickstart", "step 3 has no group 9")
    check("an error")
    open_page.problems.clear()  # type: ignore[attr-defined]  # that one was meant
