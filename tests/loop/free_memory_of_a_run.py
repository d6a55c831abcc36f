"""A run that finds a chosen amount of free memory, and that may be killed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loop.killing import replace_function


@dataclass(frozen=True)
class FreeMemory:
    """For ``before``: the learner finds so many bytes free. ``then`` is called too."""

    free_bytes: int
    then: Callable[[], None] | None = None

    def __call__(self) -> None:
        replace_function("strop.learner.torch.learner:measure_free", self._around)
        if self.then is not None:
            self.then()

    def _around(self, function: Callable[..., Any]) -> Callable[..., int]:
        return lambda device: self.free_bytes
