"""Every view in a real Chromium on stored runs, at three sizes, light and dark: no error, no overflow, nothing that axe-core finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.chromium import NAMELESS, UNREADABLE, VIOLATIONS, show

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

LOOKS = [("wide", "light"), ("middle", "dark"), ("narrow", "light"), ("narrow", "dark")]
VIEWS = {
    "overview": "Side by side",
    "curves": "First",
    "curves?find=env_3": "20 found",
    "curves?log=1&axis=time&smooth=0.6": "First",
    "time?runs=quickstart": "policy_training",
    "time?run=quickstart&at=12&count=4": "of step 9 ended last",
    "time?as=share": "Engines, rollouts, weights and machines 1",
    "now?run=quickstart": "Who waits for whom",
    "now?run=just-begun": "no status.json",
    "configuration?run=quickstart": "policy.precision",
    "configuration?run=quickstart&form=keys": "loss_fn.ratio_clip_max",
    "configuration?run=quickstart&form=yaml": "policy:",
    "configuration?run=quickstart&against=wide-clip": "keys differ",
    "rollouts?run=quickstart": "of 288",
    "rollouts/3?run=quickstart": "of 12",
    "rollouts?run=quickstart&reward_min=2": "No rollout is like this",
    "rollouts?run=just-begun": "No rollouts are stored",
    "rollout/3/0/1?run=quickstart": "calls calculator",
    "rollout/3/0/1?run=quickstart&tab=tree&path=1": "branch 1",
    "rollout/3/0/1?run=quickstart&tab=facts": "rewards.correct",
    "rollout/3/0/1?run=quickstart&colour=ratio": "perfect",
    "rollout/3/0/1?run=quickstart&colour=none": "calls calculator",
    "group/3/0?run=quickstart": "4 rollouts",
    "answers?run=quickstart": "different answers",
    "answers?run=quickstart&of=validation": "it is 2",
    "tasks?run=quickstart": "What is 10 plus 7?",
    "tasks?run=quickstart&sort=-change&text=SUM": "of 3 tasks",
    "task/sum%3A10%2B7?run=quickstart": "Step 24",
    "validation?run=quickstart": "after step 24",
    "validation?run=just-begun": "No samples of a validation",
    "starred?run=quickstart": "Export",
    "replays?run=quickstart": "No replay is stored",
    "nonsense": "There is no view",
    "now?run=gone": "There is no run",
}


@pytest.mark.parametrize(("size", "theme"), LOOKS)
def test_every_view_shows_what_is_stored(address: str, open_page: Callable[..., Any], axe: str, size: str, theme: str) -> None:
    page = open_page(address, size, theme, script=axe)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    for view, text in VIEWS.items():
        show(page, view, text)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{view} is wider than the window"
        assert page.evaluate(UNREADABLE) == [], view
        assert page.evaluate(NAMELESS) == [], view
        assert page.evaluate(VIOLATIONS) == [], view
        assert page.locator("h1").count() == 1, view


def test_every_link_of_the_side_leads_to_a_view(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    names = page.locator(".side nav a").all_inner_texts()
    assert len(names) == 11
    for name in names:
        page.locator(".side nav a", has_text=name).click()
        page.wait_for_function("name => document.querySelector('[aria-current=page]').textContent === name", arg=name)
        page.wait_for_selector("h1")
        assert "failed" not in page.inner_text("main")


GIVE_UP = """async () => {
    const { fetchJson } = await import(new URL("lib/api.js", document.querySelector("script[type=module]").src));
    const given = new AbortController();
    window.fetch = async () => {
        const fail = (stream) => given.signal.addEventListener("abort", () => stream.error(given.signal.reason));
        const body = new ReadableStream({ start: fail });
        setTimeout(() => given.abort(), 10);
        return new Response(body);
    };
    return fetchJson(["runs"], {}, { signal: given.signal }).then(() => "an answer", (error) => error.name);
}"""


def test_a_request_that_is_given_up_while_its_answer_arrives_is_no_answer(address: str, open_page: Callable[..., Any]) -> None:
    assert open_page(address).evaluate(GIVE_UP) == "AbortError"


def test_an_address_opens_the_same_view_again(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    show(page, "rollouts?run=wide-clip&sort=-reward&kept=1&text=answer", "of 240")
    rows = page.locator(".row").all_inner_texts()
    page.reload()
    page.wait_for_selector(".row")
    page.wait_for_function("() => document.getElementById('main').textContent.includes('of 240')")
    assert page.locator(".row").all_inner_texts() == rows
    assert page.locator("input[type=search]").input_value() == "answer"
    assert page.locator("h1").inner_text() == "Rollouts: wide-clip"


def test_what_a_model_wrote_is_text(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    rollout = "rollout/3/1/0?run=quickstart"
    for view in ("rollouts/3?run=quickstart", f"{rollout}&colour=none", rollout, "group/3/1?run=quickstart"):
        show(page, view, "onerror=")
        assert page.locator("#main script, #main img").count() == 0
        assert "owned" not in page.title()
    assert "\\x1b[31m" in page.inner_text("main")


def test_secrets_of_the_configuration_are_not_shown(address: str, open_page: Callable[..., Any]) -> None:
    page = open_page(address)
    for form in ("", "&form=keys", "&form=yaml"):
        show(page, f"configuration?run=quickstart{form}", "API_KEY")
        assert "secret-value" not in page.content()
