"""What ``generation.backend: auto`` stands for on the machines of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AutoEngine:
    """The engine that ``auto`` stands for where there is a GPU, and why."""

    name: Literal["torch", "vllm"] = "torch"
    reason: str
    detail: str = ""  # of the reason, for a warning
    lacking: bool = False  # whether vLLM would be taken if it could do what the configuration asks for
