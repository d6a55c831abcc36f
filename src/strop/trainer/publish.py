"""Hand devices to the learner and new weights to the generators. Waits for the groups in flight where required."""

from __future__ import annotations

from strop.metrics import Metrics
from strop.trainer.run import DrainBefore, TrainingRun


async def yield_device(run: TrainingRun) -> None:
    """Free the devices that generators share with the learner, before it trains."""
    with run.timer.span("drain"):
        await _drain_if_due(run, before="training")
        await run.weights.yield_device()


async def publish(run: TrainingRun) -> Metrics:
    """Publish the learner's weights as version ``run.step``. Returns when every generator holds them."""
    with run.timer.span("drain"):
        await _drain_if_due(run, before="publishing")
    with run.timer.span("weight_sync"):
        return await run.weights.publish(run.step)


async def _drain_if_due(run: TrainingRun, *, before: DrainBefore) -> None:
    """Wait for the groups in flight if ``drain_before`` says so. Then all tokens of a rollout have the same weight version."""
    if run.options.drain_before == before:
        run.tracker.progress(f"finishing the groups in flight before {before}")
        await run.stream.drain()
