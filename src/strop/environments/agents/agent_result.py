"""What an agent leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """The result of one episode."""

    reward: float | None = None  # None: rewards are functions' alone
    unscored: bool = False  # it says that the episode cannot be scored: it gave None as its reward
    output: str = ""  # what it printed or returned; stored with the rollout
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged with the rollout's
