"""Attach concurrency and circuit breakers to a run on rollouts, and log what they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.config import RolloutRunConfig
from strop.extensions.watch.pacing.breaker import CircuitBreaker
from strop.extensions.watch.pacing.concurrency import AdaptiveConcurrency
from strop.extensions.watch.pacing.pacing_config import PacingConfig
from strop.runs.monitors.run_listeners import RunSetup
from strop.runs.rollout_run import SampledSource
from strop.runs.tasks import count_slots
from strop.trainer.listeners import RunListener
from strop.trainer.step_view import StepView


@dataclass(kw_only=True)
class Pacing(RunListener):
    """Tells the concurrency about each step's preemptions, and logs ``rollouts/concurrency`` and ``rollouts/paused_seconds``."""

    concurrency: AdaptiveConcurrency | None
    breaker: CircuitBreaker | None
    name: str = field(default="pacing", init=False)
    _paused: float = 0.0  # seconds logged so far

    async def on_step(self, step: StepView) -> Mapping[str, float]:
        metrics = {}
        if self.concurrency is not None:
            self.concurrency.end_step(step.metrics.get("generation/preemptions", 0.0))
            metrics["rollouts/concurrency"] = float(int(self.concurrency.limit))
        if self.breaker is not None and self.breaker.paused > self._paused:
            metrics["rollouts/paused_seconds"] = self.breaker.paused - self._paused
            self._paused = self.breaker.paused
        return metrics


def make_pacing(setup: RunSetup) -> Pacing | None:
    """Add the gates of the section ``pacing`` to the source of a run; None if it has none."""
    config, source = setup.config, setup.source
    if not isinstance(config, RolloutRunConfig) or not isinstance(source, SampledSource):
        return None
    section, training = PacingConfig.of(config), config.rollout_training
    most = count_slots(config) * (training.num_generations_per_prompt + setup.algorithm.greedy_baseline)
    concurrency = AdaptiveConcurrency(most) if section.adaptive_concurrency else None
    breaker = None
    if section.pause_above is not None:
        pause = 60 * section.max_pause_minutes
        breaker = CircuitBreaker(share=section.pause_above, max_pause=pause, note=source.tracker.note)
    source.gates += [gate for gate in (breaker, concurrency) if gate is not None]
    return Pacing(concurrency=concurrency, breaker=breaker) if source.gates else None
