"""Draws of hypothesis that are the same at every run, and others for each case of a ``parametrize``."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count as numbers
from typing import Any
from zlib import crc32

from hypothesis import given, seed, settings
from hypothesis.strategies import SearchStrategy


def check_draws(
    name: str, count: int, check: Callable[..., None], *, simplest: bool = True, **strategies: SearchStrategy[Any]
) -> None:
    """Call ``check`` with ``count`` draws of the strategies, the simplest first. A failed draw is shrunk, as by ``given``.

    ``derandomize`` would give all cases of a test the same few draws. Without the ``simplest``, which is the same for all, the others
    are checked alone.
    """
    drawn_before = numbers()

    @seed(crc32(name.encode()))
    @settings(max_examples=count if simplest else count + 1, deadline=None, database=None)
    @given(**strategies)
    def holds(**drawn: Any) -> None:
        if next(drawn_before) or simplest:
            check(**drawn)

    holds()
