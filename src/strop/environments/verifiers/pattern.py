"""Regular expressions. Model output can make a pattern run forever, so matching is done in the scoring pool, under a time limit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.scoring.scoring_pool import get_scoring_pool
from strop.environments.verifiers.base import AnswerVerifier, Reply, Score
from strop.types import Task

FLAGS = {"i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


@dataclass(frozen=True, kw_only=True)
class PatternVerifier(AnswerVerifier):
    """1 if the pattern matches, or the number of matches. A match that takes too long gives 0 and counts as ``unverified``."""

    pattern: str  # in Python's re syntax; {answer} is the reference answer as literal text
    match: Literal["search", "fullmatch", "count"] = "search"
    flags: str = ""  # of i, m, s and x
    at_most: int | None = None  # of match=count: a larger number counts as 0, so that repetition gains nothing
    negate: bool = False  # 1 if it does not match
    num_workers: int = 4  # processes of the scoring pool
    timeout_s: float = 1.0  # CPU seconds for one reply

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern.replace("{answer}", ""), self._flags())
        except (re.error, KeyError) as error:
            raise EnvironmentConfigError(
                f"the pattern {self.pattern!r:.200} with flags {self.flags!r} is no regular expression: {error}; flags are i, m, s and x"
            ) from error
        if self.negate and self.match == "count":
            raise EnvironmentConfigError("negate is set, and match is count; set match to search or fullmatch")
        if self.at_most is not None and self.match != "count":
            raise EnvironmentConfigError(
                f"at_most is {self.at_most}, and match is {self.match}; set match to count, or leave it out"
            )
        if self.num_workers < 1 or self.timeout_s <= 0:
            raise EnvironmentConfigError(
                f"num_workers is {self.num_workers} and timeout_s is {self.timeout_s}; both must be positive"
            )

    def _flags(self) -> int:
        return int(sum(FLAGS[flag] for flag in set(self.flags)))

    async def score(self, task: Task, reply: Reply) -> Score:
        text = self.read(reply)
        if text is None:
            return Score(0.0, {"unverified": 0.0})
        pattern = self.pattern.replace("{answer}", f"(?:{re.escape(task.answer)})")
        arguments: dict[str, Any] = {"pattern": pattern, "flags": self._flags(), "match": self.match, "text": text}
        found = await get_scoring_pool(self.num_workers).call("pattern", self.timeout_s, **arguments)
        if found.value is None:
            return Score(0.0, {"unverified": 1.0})
        count = 0.0 if self.at_most is not None and found.value > self.at_most else found.value
        return Score(1.0 - count if self.negate else count, {"unverified": 0.0})
