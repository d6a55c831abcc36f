"""Ranks are forks of a server that has imported Megatron Core; a folder with the tiny model of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loop.conftest import tiny as tiny
from support.forks import forks_with


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with forks_with("megatron"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with forks_with("megatron"):
        return (yield)
