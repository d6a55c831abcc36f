"""How a key of a recipe and what it becomes here differ."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from strop.problems import Origin, Problem


class Effect(StrEnum):
    """What becomes of a key."""

    RENAMED = "renamed"  # another key says exactly the same here
    CHANGED = "changed"  # carried over, but not to the last digit: the text says how it differs
    UNUSED = "unused"  # it changes nothing of what is trained
    REFUSED = "refused"  # it asks for what Strop would not do


@dataclass(frozen=True)
class Difference:
    """One key of a recipe that does not stand as it is. ``text`` completes "KEY: ...", without a full stop."""

    key: str  # dotted, as the recipe writes it
    effect: Effect
    text: str
    fix: str = ""  # of a refusal: what to set instead
    origin: Origin | None = None

    def to_problem(self) -> Problem:
        return Problem(self.key, self.text, self.fix, self.origin)
