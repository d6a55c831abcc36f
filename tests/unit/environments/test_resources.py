"""Resources that environments need are opened before a run starts, in the process that holds the environments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

from strop import plugins
from strop.base_config import BaseConfig
from strop.environments.resources import configure_resources, find_section, open_resources, read_sections
from strop.tools.base import InfrastructureError
from strop.user_code import UserCodeError


class BrowserConfig(BaseConfig):
    tabs: int = 4


opened: list[str] = []


@asynccontextmanager
async def open_browser() -> AsyncIterator[str]:
    tabs = find_section(BrowserConfig).tabs
    if not tabs:
        raise InfrastructureError("browser.tabs is 0; set it to 1 or more")
    opened.append("open")
    try:
        yield f"a browser with {tabs} tabs"
    finally:
        opened.append("closed")


@pytest.fixture(autouse=True)
def browser_of_a_package(monkeypatch: pytest.MonkeyPatch) -> Any:
    point = EntryPoint("browser", f"{__name__}:open_browser", "strop.resources")
    monkeypatch.setattr(plugins, "declared", lambda group: {"browser": point} if group == "resources" else {})
    monkeypatch.setattr(plugins, "load", lambda group, name: open_browser if name == "browser" else no_extension(name))
    opened.clear()
    yield
    configure_resources({})


def no_extension(name: str) -> Any:
    raise UserCodeError(f"no extension declares {name!r}")


def needing(*names: str) -> Any:
    return SimpleNamespace(traits=SimpleNamespace(needed_resources=names))


async def run(*environments: Any) -> list[str]:
    said: list[str] = []
    async with open_resources(environments, said.append):
        said += opened
    return said


def test_a_resource_is_opened_once_as_its_section_says_and_closed_with_the_run() -> None:
    configure_resources(read_sections(SimpleNamespace(browser=BrowserConfig(tabs=2))))  # type: ignore[arg-type]
    assert asyncio.run(run(needing("browser"), needing(), needing("browser"))) == ["a browser with 2 tabs", "open"]
    assert opened == ["open", "closed"]


def test_a_run_that_needs_no_resource_opens_none() -> None:
    assert asyncio.run(run(needing())) == []


def test_a_section_that_no_run_has_configured_has_its_defaults() -> None:
    configure_resources(read_sections(SimpleNamespace()))  # type: ignore[arg-type]
    assert find_section(BrowserConfig).tabs == 4


def test_a_resource_that_does_not_work_ends_the_run_in_its_words() -> None:
    configure_resources({"browser": BrowserConfig(tabs=0)})
    with pytest.raises(InfrastructureError, match="set it to 1 or more"):
        asyncio.run(run(needing("browser")))


def test_a_resource_that_no_extension_declares_is_named() -> None:
    with pytest.raises(UserCodeError, match="'telescope'"):
        asyncio.run(run(needing("browser", "telescope")))
    assert opened == ["open", "closed"]
