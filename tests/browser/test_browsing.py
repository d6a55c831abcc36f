"""What a reader looks for: rollouts by their numbers and words, a group by reward, a task over the run, a curve that is smoothed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from support.chromium import SETTLED, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

# What is asked of the rows after a filter was set: a column, and whether each value in it fits.
FILTERS = {
    "step": ("3", "step", lambda text: text == "3"),
    "task": ("sum:12+9", "task", lambda text: text == "sum:12+9"),
    "environment": ("calculator", "task", lambda text: text == "sum:10+7"),
    "reference": ("21", "reference", lambda text: text == "21"),
    "least reward": ("1", "reward", lambda text: float(text) >= 1),
    "most reward": ("0", "reward", lambda text: float(text) <= 0),
    "fewest tokens": ("60", "tokens", lambda text: int(text) >= 60),
    "most tokens": ("30", "tokens", lambda text: int(text) <= 30),
}
COLUMN = """title => {
  const place = [...document.querySelectorAll(".rows [role=columnheader]")].findIndex((each) => each.textContent.startsWith(title));
  return [...document.querySelectorAll(".rows .row")].map((row) => row.children[place].textContent.trim());
}"""


def read_total(page: Any) -> int:
    page.wait_for_function(SETTLED)
    return int(re.search(r"of ([\d,]+)", page.inner_text(".rows .foot"))[1].replace(",", ""))  # type: ignore[index]


def test_rollouts_are_filtered_by_the_controls(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollouts?run=quickstart", "of 288")
    for label, (value, column, fits) in FILTERS.items():
        field = page.get_by_label(label, exact=True)
        field.fill(value)
        field.press("Enter")
        page.wait_for_function("() => !document.getElementById('main').textContent.includes('of 288')")
        assert 0 < read_total(page) < 288, label
        values = page.evaluate(COLUMN, column)
        assert len(values) > 5 and all(fits(each) for each in values), (label, values)
        field.fill("")
        field.press("Enter")
        page.wait_for_function("() => document.getElementById('main').textContent.includes('of 288')")
    page.get_by_label("task", exact=True).fill("sum:12+9")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('main').textContent.includes('of 96')")
    page.get_by_role("button", name="Clear").click()
    page.wait_for_function("() => document.getElementById('main').textContent.includes('of 288')")


def test_rollouts_are_found_by_ending_and_by_what_was_said_and_sorted_by_a_heading(
    address: str, open_page: Callable[..., Any]
) -> None:
    page = open_page(address)
    show(page, "rollouts?run=quickstart", "of 288")
    page.get_by_label("ending").select_option("length")
    page.wait_for_function("() => document.getElementById('main').textContent.includes('of 72')")
    assert set(page.evaluate(COLUMN, "ending")) == {"length"}
    page.get_by_label("ending").select_option("")
    page.get_by_label("Search in texts").fill("NOTHING to carry")
    page.wait_for_function("() => document.getElementById('main').textContent.includes('of 24')")
    assert set(page.evaluate(COLUMN, "task")) == {"sum:11+8"}
    page.get_by_role("button", name="reward").click()
    page.wait_for_selector("[role=columnheader][aria-sort=descending]:has-text('reward')")
    page.wait_for_function(SETTLED)
    rewards = [float(each) for each in page.evaluate(COLUMN, "reward")]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) > 1


def test_rollouts_are_filtered_and_sorted_by_one_of_several_rewards(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollouts?run=quickstart", "of 288")
    page.get_by_label("which reward").select_option("correct")
    page.get_by_label("most reward", exact=True).fill("0.5")
    page.keyboard.press("Enter")
    page.wait_for_function("() => !document.getElementById('main').textContent.includes('of 288')")
    assert (
        0 < read_total(page) < 288
        and set(page.evaluate(COLUMN, "correct")) == {"0"}
        and set(page.evaluate(COLUMN, "format")) == {"1"}
    )
    page.get_by_role("button", name="Clear").click()
    page.get_by_role("button", name="correct").click()
    page.wait_for_selector("[role=columnheader][aria-sort=descending]:has-text('correct')")
    page.wait_for_function(SETTLED)
    assert set(page.evaluate(COLUMN, "correct")) == {"1"}


def test_a_group_stands_side_by_side_the_best_first_and_is_walked_by_keys(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "group/12/1?run=quickstart", "4 rollouts")
    cards = page.locator(".columns .card")
    rewards = [float(text.split()[-1]) for text in page.locator(".card > header > b").all_inner_texts()]
    assert len(rewards) == 4 and rewards == sorted(rewards, reverse=True) and len(set(rewards)) > 1
    tops = cards.evaluate_all("cards => cards.map((card) => card.getBoundingClientRect().top)")
    assert len(set(tops)) == 1, "side by side"
    page.keyboard.press("ArrowRight")
    page.wait_for_function("() => document.querySelectorAll('.columns .card')[1].classList.contains('current')")
    name = page.locator(".columns .card.current h3").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_selector(".tabs")
    assert page.locator("h1").inner_text().endswith(name.strip())


def test_a_task_is_followed_over_the_run(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "tasks?run=quickstart", "of 3 tasks")
    page.locator(".row", has_text="sum:11+8").click()
    page.wait_for_selector(".columns")
    steps = [int(re.search(r"Step (\d+)", text)[1]) for text in page.locator("h2").all_inner_texts() if "Step" in text]  # type: ignore[index]
    assert steps[0] == 1 and steps[-1] == 24 and steps == sorted(steps) and len(steps) == 8
    page.get_by_role("button", name="Show all 24 steps").click()
    page.wait_for_function("() => document.querySelectorAll('.columns').length === 24")
    page.get_by_role("link", name="its group").nth(4).click()
    page.wait_for_function("() => document.querySelector('h1')?.textContent === 'Group 1 of step 5'")


def test_the_samples_of_a_step_are_walked_zoomed_and_opened(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "time?run=quickstart&at=12", "Sample 3 of group 2 ended last, 0.45 s after the median")
    text = page.inner_text("main")
    assert "engine 23 %" in text and "waited for rollouts for 1.6 s of 3.6 s (44 %)" in text and "and 5 more samples" in text
    chart = page.locator(".timeline")
    chart.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_selector(".readout:has-text('group 2, sample 0 (dropped): waiting')")
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 90)
    page.mouse.up()
    page.get_by_role("button", name="All of it").click()
    page.get_by_role("button", name="Earlier steps").click()
    page.wait_for_function("() => window.location.hash.includes('at=11')")
    page.wait_for_function("() => document.querySelector('.toolbar input[type=number]').value === '11'")  # step 11 is drawn
    chart.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('h1')?.textContent.startsWith('Step 11, task')")


def test_smoothing_changes_what_is_read_and_the_axis_is_steps_or_time(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "curves?runs=quickstart&find=train/loss", "1 found")
    chart = page.locator('[data-metric="train/loss"]')
    last = chart.locator(".readout b").inner_text()
    page.get_by_label("smoothing").press("End")  # the slider to its right end
    page.wait_for_function("() => document.querySelector('.readout').textContent.includes('averaged')")
    assert "0.99" in page.inner_text(".toolbar output")
    assert chart.locator(".readout b").inner_text() == last, "the last value stays what it was"
    averaged = re.search(r"averaged (\S+)\)", chart.locator(".readout").inner_text())
    assert averaged is not None and abs(float(averaged[1])) < abs(float(last))
    page.get_by_role("button", name="time").click()
    page.wait_for_function("() => /\\d (s|min)/.test(document.querySelector('.readout').textContent)")
    page.get_by_role("button", name="steps").click()
    page.wait_for_function("() => /step 24/.test(document.querySelector('.readout').textContent)")


def test_the_parts_of_a_step_sum_to_it_and_follow_a_zoom(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    for zoom, count in (("", 24), ("&zoom=7.5:8.5", 1)):
        show(page, f"time?runs=quickstart{zoom}", f"mean of {count}")
        rows = [text.split("\t") for text in page.locator("tbody tr").all_inner_texts()]
        assert {"generation", "policy_training", "the rest"} <= {row[0].strip() for row in rows}
        shares = [float(row[2].replace("<", "").replace("%", "")) for row in rows if "%" in row[-1]]
        assert sum(shares) == pytest.approx(100, abs=3)
    assert float(dict((row[0].strip(), row[2]) for row in rows[:-1])["validation"].split()[0]) > 10, "step 8 validated"


def test_what_is_being_typed_stays_while_the_page_is_drawn_again(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollouts?run=quickstart", "of 288")
    field = page.get_by_label("task", exact=True)
    for part in ("sum:", "12+9"):
        field.press_sequentially(part)
        with page.expect_response(re.compile(r"/api/runs$")):  # asked for every two seconds
            pass
        page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert field.input_value() == "sum:12+9"
    field.press("Enter")
    page.wait_for_function("() => document.getElementById('main').textContent.includes('of 96')")
