"""Draws of hypothesis that are the same at every run, and others for each case of a ``parametrize``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

from hypothesis import given, seed, settings
from hypothesis.strategies import SearchStrategy


def check_draws(name: str, count: int, check: Callable[..., None], **strategies: SearchStrategy[Any]) -> None:
    """Call ``check`` with ``count`` draws of the strategies, the simplest first. A failed draw is shrunk, as by ``given``.

    ``derandomize`` would give all cases of a test the same few draws.
    """

    @seed(crc32(name.encode()))
    @settings(max_examples=count, deadline=None, database=None)
    @given(**strategies)
    def holds(**drawn: Any) -> None:
        check(**drawn)

    holds()
