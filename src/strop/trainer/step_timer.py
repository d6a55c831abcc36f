"""Time the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from strop.monitoring.process_profile import RECORDER
from strop.monitoring.waits import WaitKind, waiting

# The watchdog limit that applies to each phase. Other phases have no limit, or contain waits with their own limits.
PHASE_KINDS: Mapping[str, WaitKind] = {
    "drain": "generation",
    "logprobs": "training",
    "policy_training": "training",
    "weight_sync": "weight_sync",
    "checkpointing": "checkpoint",
}


class StepTimer:
    """Records the seconds of each phase of a step: ``with timer.span("packing"):``."""

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        self.started = self.ended = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase, and register the phase with the watchdog meanwhile."""
        started = time.perf_counter()
        with waiting("training loop", on=phase, kind=PHASE_KINDS.get(phase, "")):
            yield
        ended = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + ended - started
        RECORDER.add("training loop", phase, started, ended)

    def metrics(self, *, tokens_read: int, tokens_sampled: int | None) -> dict[str, float]:
        """Return the seconds of each phase, and the tokens per second of the step, of generation and of training.

        ``tokens_sampled`` None means recorded rollouts, which have no generation rate.
        """
        self.ended = time.perf_counter()
        total = self.ended - self.started
        logged = {f"timing/train/{phase}": seconds for phase, seconds in self.seconds.items()}
        logged["timing/train/total_step_time"] = total
        logged["performance/tokens_per_sec"] = tokens_read / (total - self.seconds.get("validation", 0.0))
        if tokens_sampled is not None:
            logged["performance/generation_tokens_per_sec"] = tokens_sampled / max(self.seconds["generation"], 1e-9)
        logged["performance/training_tokens_per_sec"] = tokens_read / max(self.seconds["policy_training"], 1e-9)
        return logged
