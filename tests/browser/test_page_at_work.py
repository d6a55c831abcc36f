"""What a reader does on the page: keys, search, zoom, tokens, stars, millions of rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from support.chromium import SETTLED, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

EXPLAINED = {  # modes of the colours of tokens, and words of their legends
    "advantage": "pushed up", "probability": "improbable", "ratio": "less probable to the learner", "entropy": "undecided",
    "kl": "less probable than to the reference", "clipped": "dashed frame: clipped",
}  # fmt: skip
MILLIONS = 5_120_000
CURSOR_IN_ALL = """([least, most]) => {
  const readings = [...document.querySelectorAll(".readout")].slice(0, 4).map((each) => each.textContent.match(/step (\\d+)/)?.[1]);
  const steps = readings.filter(Boolean);
  return steps.length > 2 && new Set(steps).size === 1 && least <= Number(steps[0]) && Number(steps[0]) <= most;
}"""
COLOURS = "[...document.querySelectorAll('.tokens [data-token]')].map((each) => each.className).join()"
NEXT_FRAME = "() => new Promise((resolve) => requestAnimationFrame(resolve))"
WATCH_FRAMES = """() => {
  const state = { times: [], most: 0 };
  let last = performance.now();
  const step = (now) => {
    state.times.push(now - last);
    last = now;
    state.most = Math.max(state.most, document.querySelectorAll(".row").length);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
  return state;
}"""


def test_rows_are_walked_by_keys_and_opened(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollouts/3?run=quickstart", "of 12")
    assert page.locator(".row.current").get_attribute("aria-rowindex") == "2"
    for key, row in (("j", 1), ("j", 2), ("k", 1), ("ArrowDown", 2), ("End", 11), ("Home", 0), ("j", 1)):
        page.keyboard.press(key)
        page.wait_for_selector(f'.row.current[aria-rowindex="{row + 2}"]')
    page.keyboard.press("Enter")
    page.wait_for_function("() => window.location.hash.startsWith('#/rollout/3/')")
    page.wait_for_selector(".chat")
    page.keyboard.press("Escape")
    page.wait_for_function("() => window.location.hash.startsWith('#/rollouts/3')")


def test_keys_are_listed_search_is_a_key_and_escape_leaves_it(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "curves?run=quickstart", "First")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    assert "whole range again" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.keyboard.press("/")
    page.keyboard.type("train/loss")
    page.wait_for_function("() => document.querySelectorAll('[data-metric]').length === 1")
    page.keyboard.press("Escape")
    page.keyboard.press("r")
    page.wait_for_selector(".rows")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector("h1")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_dragging_zooms_all_charts_and_a_key_shows_the_whole_again(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "curves", "First")
    page.wait_for_selector('[data-metric="train/reward"] .u-over')
    box = page.locator('[data-metric="train/reward"] .u-over').bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.wait_for_function(CURSOR_IN_ALL, arg=[5, 11])  # the cursor is at one step in all charts
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 70, steps=4)
    page.mouse.up()
    page.wait_for_function("() => window.location.hash.includes('zoom=')")
    first, last = map(float, re.search(r"zoom=([\d.]+)%3A([\d.]+)", page.evaluate("window.location.hash")).groups())
    assert 6 < first < 10 < last < 17
    page.keyboard.press("z")
    page.wait_for_function("() => !window.location.hash.includes('zoom=')")


def test_runs_that_differ_in_their_seed_are_one_line_in_a_band(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "curves?runs=quickstart,quickstart-seed-2,wide-clip", "mean of 2 seeds")
    assert page.locator(".legend li").count() == 2
    page.wait_for_selector('[data-metric="train/reward"] .u-over')
    assert re.search(r"1 more seeds?.*\(.* to .*\)", page.inner_text('[data-metric="train/reward"] .readout'), re.DOTALL)
    page.get_by_label("bands over seeds").uncheck()
    page.wait_for_function("() => document.querySelectorAll('.legend li').length === 3")


def test_a_token_tells_its_numbers_on_hover_and_by_keyboard(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/3/0/1?run=quickstart", "calls calculator")
    page.wait_for_selector("[data-token='2']")
    text = "".join(page.locator(".tokens [data-token]").all_text_contents())
    assert "I call the calculator with 10 plus 7." in text
    page.hover("[data-token='2']")
    page.wait_for_function("() => document.querySelector('.token-panel').textContent.includes('token 2')")
    panel = page.inner_text(".token-panel")
    assert all(name in panel for name in ("sampler", "learner", "ratio", "advantage", "entropy", "KL to reference"))
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-token='3'].at")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("[data-token='2'].at")
    colours = {}
    for _ in range(page.locator("select option").count() - 1):
        chosen = page.locator("select").input_value()
        page.wait_for_function(
            "mode => document.querySelector('.token-legend').textContent.includes(mode)", arg=EXPLAINED[chosen]
        )
        colours[chosen] = page.evaluate(COLOURS)
        page.keyboard.press("m")
        page.wait_for_function("old => document.querySelector('select').value !== old", arg=chosen)
    assert set(colours) == set(EXPLAINED)
    assert len(set(colours.values())) == len(colours), "modes colour differently"


def test_a_rollout_that_was_dropped_says_why_its_tokens_are_masked(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/2/2/1?run=quickstart", "dropped: filtered")
    page.keyboard.press("g")
    page.wait_for_function("() => /masked: .*filtered/.test(document.querySelector('.token-panel').textContent)")


def test_a_star_is_kept_with_its_note_and_exported(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/5/1/2?run=quickstart-seed-2", "sample 2")
    held: list[Any] = []
    sent: list[Any] = []
    page.route("**/stars", lambda route: held.append(route), times=1)
    page.on("request", lambda request: sent.append(request) if request.method == "PUT" else None)
    page.keyboard.press("*")
    page.get_by_label("Note of the star").fill("a good one")
    page.get_by_label("Note of the star").press("Enter")
    page.wait_for_timeout(300)
    assert len(sent) == 1  # the note follows once the star has arrived: two requests at once may arrive in either order
    with page.expect_response(lambda answer: "a good one" in (answer.request.post_data or "")):
        held[0].continue_()
    show(page, "starred?run=quickstart-seed-2", "a good one")
    with page.expect_download() as download:
        page.get_by_text("Export as JSON lines").click()
    (row,) = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert "a good one" in json.dumps(row) and (row["step"], row["group"], row["sample"]) == (5, 1, 2)
    page.get_by_role("button", name="Remove").click()
    page.wait_for_function("() => document.getElementById('main').textContent.includes('Nothing is starred yet')")


def make_answer(request: Any) -> str:
    """A page of a list of millions."""
    first, limit = (int(re.search(rf"[?&]{name}=(\d+)", request.url)[1]) for name in ("from", "limit"))
    rows = [
        {"step": index // 512, "group": index % 512 // 8, "sample": index % 8, "env": "sum", "task": f"sum:{index}", "reward": 0.5,
         "rewards": {}, "advantage": 0.1, "tokens": 12, "ending": "stop", "kept": True, "dropped_because": None, "preview": f"text {index}",
         "starred": False, "flags": []}
        for index in range(first, min(first + limit, MILLIONS))
    ]  # fmt: skip
    return json.dumps({"total": MILLIONS, "from": first, "rows": rows})


def test_millions_of_rows_scroll_with_few_in_the_page(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    asked: list[str] = []

    def answer(route: Any, request: Any) -> None:
        asked.append(request.url)
        route.fulfill(body=make_answer(request), content_type="application/json")

    page.route(re.compile(r"/rollouts\?"), answer)
    show(page, "rollouts?run=quickstart", "of 5,120,000")
    window = page.locator(".rows .window")
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('.row:last-of-type').textContent.includes('sum:5119999')")
    page.keyboard.press("Home")
    page.wait_for_function("() => document.querySelector('.row').textContent.includes('sum:0')")
    asked.clear()
    window.evaluate("element => { element.scrollTop = (element.scrollHeight - element.clientHeight) / 2; }")  # the scroll bar
    page.wait_for_function("() => /sum:25[56]\\d{4}/.test(document.querySelector('.row').textContent)")
    assert len(asked) <= 3
    window.hover()
    before = int(page.locator(".row").first.get_attribute("aria-rowindex"))
    frames = page.evaluate_handle(WATCH_FRAMES)
    for _ in range(40):
        page.mouse.wheel(0, 160)
        page.evaluate(NEXT_FRAME)
    page.wait_for_function(
        "least => Number(document.querySelector('.row').getAttribute('aria-rowindex')) >= least", arg=before + 195
    )
    page.wait_for_function(SETTLED)
    times, most = frames.evaluate("state => [state.times.slice(2), state.most]")
    after = int(page.locator(".row").first.get_attribute("aria-rowindex"))
    assert 195 <= after - before <= 205, "the wheel moves by pixels: 6,400 of them are 200 rows"
    assert most < 80, "only what is seen is in the page"
    assert sorted(times)[len(times) // 2] < 60, "frames keep coming while it scrolls (a loaded machine has a few long ones)"


def test_an_error_of_the_server_is_a_sentence_on_the_page(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    page.route(re.compile(r"/status"), lambda route: route.fulfill(status=422, body='{"error": "status.json cannot be read"}'))
    show(page, "now?run=quickstart", "status.json cannot be read")
    open_page.problems.clear()  # type: ignore[attr-defined]  # that one was meant
