"""Cumulative statistics of a vLLM engine, summed from those sent with its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from strop.generation.base import COUNTERS


class EngineStats:
    """Sums since the engine was started, and its current gauges."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.copies: dict[int, tuple[int, int, float]] = {}  # for an engine with several copies: the gauges of each
        self.gauges: dict[str, float] = {"running": 0.0, "waiting": 0.0, "cache_usage": 0.0}

    def make_logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        return _StatLogger(self)

    def read(self) -> Mapping[str, float]:
        return {**self.sums, **self.gauges}


class _StatLogger(StatLoggerBase):  # type: ignore[misc]
    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        sums, gauges = self.stats.sums, self.stats.gauges
        if iteration_stats is not None:
            sums["prompt_tokens"] += iteration_stats.num_prompt_tokens
            sums["sampled_tokens"] += iteration_stats.num_generation_tokens
            sums["preemptions"] += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            sums["prefix_queries"] += scheduler_stats.prefix_cache_stats.queries
            sums["prefix_hits"] += scheduler_stats.prefix_cache_stats.hits
            copies = self.stats.copies
            copies[engine_idx] = (
                scheduler_stats.num_running_reqs,
                scheduler_stats.num_waiting_reqs,
                scheduler_stats.kv_cache_usage,
            )
            gauges["running"] = float(sum(running for running, _, _ in copies.values()))
            gauges["waiting"] = float(sum(waiting for _, waiting, _ in copies.values()))
            gauges["cache_usage"] = float(max(usage for _, _, usage in copies.values()))
            if (drafts := scheduler_stats.spec_decoding_stats) is not None:
                sums["drafted_tokens"] += drafts.num_draft_tokens
                sums["accepted_tokens"] += drafts.num_accepted_tokens

    def log_engine_initialized(self) -> None:
        """Log nothing; the base class requires this method."""
