"""Cumulative statistics of an SGLang engine, summed from what it says of each request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.generation.base import COUNTERS


class SglangCounters:
    """Sums since the engine was made, and how many requests it has now."""

    def __init__(self) -> None:
        self.running = 0
        self._sums: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)

    def begin(self) -> None:
        self.running += 1

    def end(self) -> None:
        self.running -= 1

    def add(self, info: Mapping[str, Any]) -> None:
        """Count a request that SGLang has answered, from its ``meta_info``."""
        prompt, cached = info.get("prompt_tokens") or 0, info.get("cached_tokens") or 0
        found = {
            "prompt_tokens": prompt,
            "sampled_tokens": info.get("completion_tokens"),
            "preemptions": info.get("num_retractions"),
            "prefix_queries": prompt,
            "prefix_hits": cached,
            "drafted_tokens": info.get("spec_draft_token_num"),
            "accepted_tokens": info.get("spec_accept_token_num"),
        }
        for name, value in found.items():
            self._sums[name] += value or 0

    def read(self) -> Mapping[str, float]:
        return {**self._sums, "running": float(self.running)}
