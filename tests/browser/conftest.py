"""A real Chromium on the page of ``strop view``. ``make test-browser`` installs it and names it in STROP_CHROMIUM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from support.chromium import SIZES, serve_view
from support.viewed_runs import write_runs, write_tokenizer

TIMEOUT = 90_000  # milliseconds that a loaded machine may take for what is there at once on a free one
CHROMIUM = os.environ.get("STROP_CHROMIUM", "")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if not CHROMIUM:
        pytest.skip("needs a Chromium: `make test-browser` installs one and runs these tests")
    if not os.access(CHROMIUM, os.X_OK):
        pytest.fail(
            f"STROP_CHROMIUM is {CHROMIUM}, which is no program: `make test-browser` installs one, or name another", pytrace=False
        )
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def stored_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    write_runs(folder, write_tokenizer(tmp_path_factory.mktemp("tokenizer")), num_extra_metrics=500)
    return folder


@pytest.fixture(scope="session")
def address(chromium: Any, stored_runs: Path) -> Iterator[str]:
    """The page on stored runs."""
    with serve_view(stored_runs) as url:
        yield url


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, which finds what is wrong for assistive technology."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        pytest.skip("needs axe-playwright-python: `make test-browser` installs it")
    return (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Open a page; at the end of the test there must have been no error on its console and no request that failed."""
    problems: list[str] = []
    contexts = []

    def open_it(url: str, size: str = "wide", theme: str = "light", wait: bool = True, script: str = "") -> Any:
        width, height = SIZES[size]
        context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        contexts.append(context)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("response", lambda answer: problems.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
        page.goto(url)
        if wait:
            page.wait_for_selector("h1")
        return page

    open_it.problems = problems  # type: ignore[attr-defined]
    yield open_it
    for context in contexts:
        context.close()
    assert problems == []
