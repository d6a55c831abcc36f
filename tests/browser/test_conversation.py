"""What a conversation shows: reasoning, images, what a branch continues, samples of validations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from support.chromium import show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

LOADED = """() => {
  const all = [...document.querySelectorAll("#main img")];
  return all.length > 0 && all.every((one) => one.naturalWidth === 160);
}"""


def test_the_prompt_is_shown_as_its_messages(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/3/0/1?run=quickstart", "calls calculator")
    assert page.locator(".message pre").all_inner_texts()[:2] == ["Add numbers.", "What is 10 plus 7?"]
    show(page, "group/3/0?run=quickstart", "4 rollouts")
    assert page.locator("details .message pre").all_inner_texts() == ["Add numbers.", "What is 10 plus 7?"]
    first = page.locator(".columns .card").first.locator(".message header b").all_inner_texts()
    assert first == ["assistant", "tool calculator", "assistant"]


def test_long_reasoning_is_folded_and_opens_for_a_token_in_it(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/3/1/1?run=quickstart&colour=none", "reasoning")
    answer = page.locator(".message.policy > pre")
    assert answer.count() == 1 and answer.inner_text().startswith("The answer is")
    reasoning = page.locator("details.reasoning")
    assert reasoning.get_attribute("open") is None and "tokens" in reasoning.locator("summary").inner_text()
    reasoning.locator("summary").click()
    page.wait_for_selector("details.reasoning pre")
    assert "<think>" not in reasoning.inner_text() and "nothing to carry" in reasoning.inner_text()
    page.reload()
    show(page, "rollout/3/1/1?run=quickstart", "colour tokens by")
    page.wait_for_selector(".message.policy > .tokens [data-token]", state="attached")
    assert page.locator("details.reasoning [data-token]").count() == 0
    page.locator("h1").click()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("details.reasoning [data-token='0'].at")
    assert "<think>" in "".join(page.locator("details.reasoning [data-token]").all_text_contents())


def test_images_stand_where_they_were_shown(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/3/2/2?run=quickstart&colour=none", "And here?")
    page.wait_for_function(LOADED)
    assert page.locator("#main img").count() == 2
    assert "[image:" not in page.inner_text("#main")
    said = page.locator(".message", has_text="And here?").locator("pre, img")
    assert said.evaluate_all("all => all.map((one) => one.tagName)") == ["PRE", "IMG", "PRE"]
    show(page, "rollout/3/2/2?run=quickstart&colour=advantage", "I see two numbers.")
    page.wait_for_function(LOADED)
    assert page.locator("#main img").count() == 2
    show(page, "group/3/2?run=quickstart", "4 rollouts")
    page.wait_for_function("() => document.querySelectorAll('.columns img').length === 1")


def test_a_branch_is_shown_with_what_it_continues(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollout/3/0/1?run=quickstart&tab=tree&colour=none", "leaves after token")
    heads = page.locator(".message header b")
    assert heads.all_inner_texts() == ["system", "user", "assistant", "tool calculator", "assistant"]
    page.locator(".tree a", has_text="branch 1").click()
    page.wait_for_selector(".tree a[aria-current]:has-text('branch 1')")
    page.wait_for_function("() => document.querySelectorAll('.message').length === 4")
    assert heads.all_inner_texts() == ["system", "user", "assistant", "assistant"]
    assert "Another way: count from 10." in page.locator(".message").last.inner_text()


def test_a_sample_of_a_validation_is_starred_and_exported(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "validation/16?run=wide-clip", "after step 16")
    page.locator(".row", has_text="It is 3.").click()
    page.wait_for_selector(".chat")
    assert page.locator(".message pre").all_inner_texts() == ["What is 1 plus 2?", "It is 3."]
    with page.expect_response(lambda answer: answer.request.method == "PUT"):
        page.keyboard.press("*")
    page.get_by_role("button", name="starred").wait_for()
    show(page, "starred?run=wide-clip", "validation after step 16")
    with page.expect_download() as download:
        page.get_by_text("Export as JSON lines").click()
    (row,) = [json.loads(line) for line in download.value.path().read_text().splitlines()]
    assert (row["validation"], row["step"], row["task"], row["turns"][-1]["text"]) == (True, 16, "sum:1+2", "It is 3.")
    page.locator("td a").click()
    page.wait_for_selector(".chat")
    page.get_by_role("button", name="starred").wait_for()
    with page.expect_response(lambda answer: answer.request.method == "PUT"):
        page.keyboard.press("*")
    show(page, "starred?run=wide-clip", "Nothing is starred yet")
