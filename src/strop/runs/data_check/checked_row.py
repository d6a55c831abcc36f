"""A row as it is checked."""

from __future__ import annotations

from dataclasses import dataclass

from strop.types import Messages, Task


@dataclass(frozen=True)
class CheckedRow:
    """A row as the run reads it, before it is tokens."""

    position: int
    location: str
    question: str
    answer: str
    prompt: Messages = ()  # of a rollout
    example: Task | None = None  # recorded
