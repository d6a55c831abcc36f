"""Sweeps of which `make test` runs a part, and `make test-all` everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

LEAST_EXAMPLES = 5


def sweep(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The values of a ``parametrize``: all but those ``kept`` for `make test` are marked ``exhaustive``."""
    cases = list(cases)
    assert set(kept) <= set(cases), f"{set(kept) - set(cases)} are not among {cases}"
    return [case if case in kept else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def sweep_rows(cases: Iterable[tuple[Any, ...]], *kept: tuple[Any, ...]) -> list[Any]:
    """The same for a ``parametrize`` of several names."""
    cases = list(cases)
    assert set(kept) <= set(cases), f"{set(kept) - set(cases)} are not among {cases}"
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.exhaustive) for case in cases]


def one_in(step: int, cases: Iterable[Any]) -> list[Any]:
    """The values of a ``parametrize`` of alike cases: each ``step``-th is for `make test`, from the first on; tuples are several names."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive if place % step else ())
        for place, case in enumerate(cases)
    ]


def draw_fewer_examples(item: pytest.Item) -> None:
    """Have a property of hypothesis be tried with two fifths of its examples."""
    test = getattr(item, "obj", None)
    if not hasattr(test, "hypothesis"):
        return
    asked = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
    assert asked is not None
    fewer = max(min(asked.max_examples, LEAST_EXAMPLES), asked.max_examples * 2 // 5)
    getattr(test, "__func__", test)._hypothesis_internal_use_settings = settings(asked, max_examples=fewer)
