"""Flags of the reward hacking monitor on stored rollouts, in a separate file per step with flagged rollouts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FlaggedRollouts = Mapping[tuple[str, int], tuple[str, ...]]
"""Detectors by task and sample."""


@dataclass(frozen=True)
class RolloutFlag:
    """A rollout named by a detector after its alarm."""

    step: int
    task: str
    sample: int
    detector: str


def encode_flags(flags: Iterable[RolloutFlag]) -> bytes:
    return "".join(json.dumps(vars(flag)) + "\n" for flag in dict.fromkeys(flags)).encode()


def read_flags(path: Path) -> list[RolloutFlag]:
    """Read the flags of a step; none if there is no file."""
    if not path.exists():
        return []
    return [RolloutFlag(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def group_flags(flags: Iterable[RolloutFlag]) -> FlaggedRollouts:
    grouped: dict[tuple[str, int], tuple[str, ...]] = {}
    for flag in flags:
        key = (flag.task, flag.sample)
        grouped[key] = (*grouped.get(key, ()), flag.detector)
    return grouped
