"""The engine chosen by ``generation.backend: auto`` on a run's machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AutoEngine:
    """The engine that ``auto`` chooses if there is a GPU, and the reason."""

    name: Literal["torch", "vllm"] = "torch"
    reason: str
    detail: str = ""  # more of the reason, for a warning
    lacking: bool = False  # whether vLLM would be chosen if it supported the configuration
