"""Sweeps of which `make test` runs a part, and `make test-all` everything."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


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
