"""Cases of milliseconds, looped over inside one test instead of collected as one test each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each(name: str, values: Iterable[Any], *, ids: Iterable[str] | Callable[[Any], str] = str) -> Callable[[Test], Test]:
    """As ``pytest.mark.parametrize``, in one test: all cases run, and those that failed are raised together, each with its id.

    ``name`` may be several with commas between. A case that skips itself is passed over, unless all do.
    """
    names, values = [part.strip() for part in name.split(",")], list(values)
    labels = [ids(value) for value in values] if callable(ids) else [str(label) for label in ids]
    assert values and len(labels) == len(values), f"{len(values)} cases and {len(labels)} ids"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def looped(**arguments: Any) -> None:
            failed: list[Exception] = []
            skipped: list[BaseException] = []
            for label, value in zip(labels, values, strict=True):
                given: Sequence[Any] = value if len(names) > 1 else [value]
                try:
                    test(**arguments, **dict(zip(names, given, strict=True)))
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except Exception as error:
                    error.add_note(f"{name} = {label}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(values)} cases of {name}", failed)
            if len(skipped) == len(values):
                raise skipped[0]

        signature = inspect.signature(test)
        rest = [parameter for parameter in signature.parameters.values() if parameter.name not in names]
        assert len(rest) == len(signature.parameters) - len(names), f"{test.__name__} takes no {name}"
        looped.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return looped

    return decorate
