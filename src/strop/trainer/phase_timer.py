"""Time the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from strop.monitoring.watchdog.waits import WaitKind, waiting
from strop.trainer.run import Run
from strop.types import Batch

# The watchdog limit that applies to each phase. Other phases have no limit, or contain waits with limits of their own.
PHASE_KINDS: Mapping[str, WaitKind] = {
    "drain": "generation",
    "logprobs": "training",
    "policy_training": "training",
    "weight_sync": "weight_sync",
    "checkpointing": "checkpoint",
}


class PhaseTimer:
    """Measures the seconds of each phase of a step, and registers a phase with the watchdog while it runs."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with waiting("training loop", on=phase, kind=PHASE_KINDS.get(phase, "")):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, run: Run, batch: Batch) -> dict[str, float]:
        """Return the seconds of each phase, and tokens per second of the step, of generation and of training."""
        total = time.perf_counter() - self.started
        timing = {f"timing/train/{phase}": seconds for phase, seconds in self.seconds.items()}
        sampled = len(batch.target) + sum(rollout.sampled_tokens for group, _ in run.dropped for rollout in group.rollouts)
        busy = total - self.seconds.get("validation", 0.0)
        logged = {**timing, "timing/train/total_step_time": total, "performance/tokens_per_sec": len(batch.tokens) / busy}
        if not run.algorithm.recorded_data:
            logged["performance/generation_tokens_per_sec"] = sampled / max(self.seconds["generation"], 1e-9)
        return {
            **logged,
            "performance/training_tokens_per_sec": len(batch.tokens) / max(self.seconds["policy_training"], 1e-9),
        }
