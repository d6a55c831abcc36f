"""Section ``logger.profile``: steps to record as a time line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from strop.base_config import BaseConfig
from strop.problems import Problem

MOST_STEPS = 50  # one trace per step, of several megabytes each


class ProfileConfig(BaseConfig):
    """Steps to record as a time line."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    steps: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        (), description="Steps whose spans, of all processes, are written to profiles/ as a trace that Perfetto opens (steps)."
    )
    operators: bool = Field(False, description="Record torch's operators and kernels in them too, which slows them down.")

    def errors(self, key: str) -> Iterator[Problem]:
        if wrong := [step for step in self.steps if step < 1]:
            yield Problem(
                f"{key}.steps", f"found {wrong[0]}: the first step of a run is 1", f"Set steps from 1 on: {key}.steps=[3,4]."
            )
        if len(set(self.steps)) > MOST_STEPS:
            yield Problem(
                f"{key}.steps",
                f"found {len(set(self.steps))} steps: each is a trace of megabytes, and recording costs time",
                f"Name at most {MOST_STEPS}, such as {key}.steps=[3,4].",
            )
        if self.operators and not self.steps:
            yield Problem(
                f"{key}.operators", "found true, but no step is profiled", f"Set {key}.steps=[3,4], or {key}.operators=false."
            )
