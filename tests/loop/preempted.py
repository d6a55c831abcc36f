"""Preempt a run: it sends itself SIGTERM at the n-th call of a function."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loop.killing import POINTS, replace_function


@dataclass(frozen=True)
class SendStopSignal:
    """For ``before``: send ``times`` signals at the ``nth`` call of ``point``, then delay that call by ``longer`` seconds."""

    point: str
    nth: int
    times: int = 1
    extra_seconds: float = 0.0

    def __call__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        replace_function(POINTS[self.point], self._around)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(function)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.nth:
                for _ in range(self.times):
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.05)
                time.sleep(self.extra_seconds)
            return function(*arguments, **options)

        return wrapped
