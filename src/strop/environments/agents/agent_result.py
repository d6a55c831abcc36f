"""The result of an agent's episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """The result of one episode."""

    reward: float | None = None  # None: rewards come only from functions
    unscored: bool = False  # the episode cannot be scored: the agent's reward is None
    output: str = ""  # printed or returned text; stored with the rollout
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged with the rollout's
