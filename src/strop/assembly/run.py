"""``strop grpo``, ``sft``, ``dpo``, ...: build a run from its configuration and train."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from strop.assembly.clusters import cluster_of, with_restarts
from strop.assembly.describe import describe
from strop.assembly.mistakes import run_to_end
from strop.assembly.preemption import Notice, told_to_end
from strop.assembly.recorded import build_recorded_run
from strop.assembly.rollouts import build_rollout_run
from strop.assembly.training import make_tracker, seed_everything
from strop.assembly.watch import watched
from strop.cluster.base import Cluster
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.generation.base import Generator
from strop.loop import Run, train
from strop.stopping import EndedEarly
from strop.tracking.base import Tracker


def run_training(config: TrainingRunConfig) -> int:
    """Train as configured. Return 0 on success, 1 after printing an error."""
    return run_to_end(_run(config))


async def _run(config: TrainingRunConfig) -> None:
    tracker = make_tracker(config)
    try:
        with told_to_end(config.checkpointing) as notice, watched(config, tracker) as told:
            await with_restarts(config, told, partial(_live, config, told, notice))
    finally:
        tracker.close()


async def _live(config: TrainingRunConfig, tracker: Tracker, notice: Notice) -> None:
    """Run one attempt: from the newest checkpoint to the end of the run. Raises EndedEarly if a stop signal ends it."""
    async with cluster_of(config, tracker) as cluster:
        notice.heed()
        run, generator = await build_run(config, tracker, cluster)
        run.stopper = notice.stopper
        try:
            await train(run)
            if run.checkpoints is not None:
                await asyncio.to_thread(run.checkpoints.finish)
        finally:
            if run.checkpoints is not None:
                with suppress(Exception):  # may fail for the same reason; but no write may overlap with the next attempt
                    await asyncio.to_thread(run.checkpoints.finish)
            await run.stream.close()
            if generator is not None:
                await generator.close()
        if not run.finished:
            raise EndedEarly(f"{notice.stopper.reason}: the run ended after step {run.step}.")
        run.tracker.note(f"done after step {run.step}; metrics in {config.logger.log_dir}")


async def build_run(config: TrainingRunConfig, tracker: Tracker, cluster: Cluster | None = None) -> tuple[Run, Generator | None]:
    """Build a run, in this process or on ``cluster``, restored from its newest checkpoint if there is one. Return it with its generator,
    or None for a run on recorded data."""
    seed_everything(config.training.seed)
    for line in describe(config, on_cpu=None if cluster is None else cluster.on_cpu).splitlines():
        tracker.note(line)
    if isinstance(config, RolloutRunConfig):
        return await build_rollout_run(config, tracker, cluster)
    assert isinstance(config, RecordedRunConfig)
    return await build_recorded_run(config, tracker, cluster), None
