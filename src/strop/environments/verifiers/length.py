"""The length of replies: a limit, a target, a budget, or DAPO's soft punishment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.rewards import to_number
from strop.environments.verifiers.base import Reply, Verifier, check_positive, read_path
from strop.types import Task


@dataclass(frozen=True, kw_only=True)
class LengthVerifier(Verifier):
    """A function of the length n of a reply, with a limit L.

    at_most: 1 if n <= L, else 0. target: 1 - \\|n - L\\| / L, at least 0. budget: (L - n) / tolerance + 0.5, within 0 and 1, the shape
    of L1-Max (Aggarwal & Welleck 2025). soft_overlong: 0 up to L - buffer, then down to -1 at L and beyond (DAPO, Yu et al. 2025).
    """

    mode: Literal["at_most", "target", "budget", "soft_overlong"] = "at_most"
    limit: int | None = None  # L
    limit_key: str | None = None  # the column of the rows that holds L, if rows differ
    unit: Literal["tokens", "characters", "words"] = "tokens"
    part: Literal["all", "answer"] = "all"  # answer: the text after </think>; not for tokens
    tolerance: float | None = None  # of budget: number of units over which it falls from 1 to 0
    buffer: int | None = None  # of soft_overlong: number of units before L over which it falls from 0 to -1

    def __post_init__(self) -> None:
        if (self.limit is None) == (self.limit_key is None):
            raise EnvironmentConfigError("the verifier length needs limit or limit_key; set one of them")
        check_positive(self, "limit", "tolerance", "buffer")
        for option, mode in (("tolerance", "budget"), ("buffer", "soft_overlong")):
            if (getattr(self, option) is None) == (self.mode == mode):
                raise EnvironmentConfigError(
                    f"mode is {self.mode} and {option} is {getattr(self, option)}; {option} is of mode {mode}"
                )
        if self.buffer is not None and self.limit is not None and self.buffer > self.limit:
            raise EnvironmentConfigError(f"buffer is {self.buffer} and limit is {self.limit}; the buffer lies within the limit")
        if self.part == "answer" and self.unit == "tokens":
            raise EnvironmentConfigError(
                "part is answer and unit is tokens, which are counted for a whole turn; set unit to characters or words"
            )

    def score(self, task: Task, reply: Reply) -> float:
        limit, length = self._find_limit(task), self.measure(reply)
        if self.mode == "target":
            return max(0.0, 1 - abs(length - limit) / limit)
        if self.mode == "budget":
            assert self.tolerance is not None
            return min(1.0, max(0.0, (limit - length) / self.tolerance + 0.5))
        if self.mode == "soft_overlong":
            assert self.buffer is not None
            return -min(1.0, max(0.0, (length - (limit - self.buffer)) / self.buffer))
        return float(length <= limit)

    def measure(self, reply: Reply) -> int:
        if self.unit == "tokens":
            return reply.tokens
        text = reply.content if self.part == "answer" else reply.text
        return len(text.split()) if self.unit == "words" else len(text)

    def _find_limit(self, task: Task) -> float:
        if self.limit_key is None:
            assert self.limit is not None
            return float(self.limit)
        given = read_path(task.metadata, self.limit_key)
        limit = None if isinstance(given, bool) else to_number(given)
        if limit is None or limit <= 0:
            raise ValueError(
                f"the task {task.id!r} has {given!r:.80} in its column {self.limit_key!r}; a limit is a positive number"
            )
        return limit
