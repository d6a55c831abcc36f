"""``strop grpo``, ``sft``, ``dpo``, ...: build a run from its configuration and train."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

from strop.algorithms.base import Algorithm
from strop.checkpointing.step_folders import list_steps
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.load.auto_backend import resolve_auto_backend
from strop.determinism import set_deterministic
from strop.distributed.base import Cluster
from strop.generation.base import Generator
from strop.monitoring.console.closing import Closing
from strop.monitoring.console.message_style import discard_output
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.wandb import is_wandb_offline
from strop.runs.algorithm.run_algorithm import make_run_algorithm
from strop.runs.cluster.cluster_run import open_cluster, run_with_restarts
from strop.runs.exit_codes import run_command
from strop.runs.lifecycle import make_profiler, make_tracker, seed_everything, watch_run
from strop.runs.local_device import resolve_device_name
from strop.runs.monitors.instruments import MachineWatch, ProfileRecorder, ThroughputMeter
from strop.runs.monitors.machine_monitors import watch_machines
from strop.runs.monitors.run_throughput import make_throughput
from strop.runs.recorded_run import build_recorded_run
from strop.runs.resume.restore import finish_run
from strop.runs.rollout_run import build_rollout_run
from strop.runs.run_folders import check_checkpoint_space, lock_run_folders
from strop.runs.summary import summarize
from strop.safety.remote_code import trust_remote_code
from strop.stopping import RunStopped
from strop.trainer.cadence import announce_checkpoint
from strop.trainer.health.health_monitor import HealthMonitor
from strop.trainer.run import TrainingRun
from strop.trainer.stop_signal import SignalHandler, handle_stop_signals
from strop.trainer.train import train


def run_training(config: TrainingRunConfig) -> int:
    """Train as configured. Return 0 on success, 1 after printing an error."""
    return run_command(_train_and_close(config))


async def _train_and_close(config: TrainingRunConfig) -> None:
    """Train, and say what can be done next."""
    closing = await train_as_configured(config)
    if config.logger.console == "none":
        return
    try:
        print(closing, flush=True)
    except BrokenPipeError:  # the run is fine
        discard_output()


async def train_as_configured(config: TrainingRunConfig) -> Closing | str:
    """Train, from the newest checkpoint on, and return what to say at the end. Raises RunStopped if a stop signal ends the run."""
    started = time.monotonic()
    algorithm = make_run_algorithm(config)  # may refuse the run, before a log folder is made and processes are started
    with lock_run_folders(config) as plan:
        if plan.nothing_to_do is not None:
            return plan.nothing_to_do
        return await _train_in_folders(config, algorithm, started)


async def _train_in_folders(config: TrainingRunConfig, algorithm: Algorithm, started: float) -> Closing:
    tracker = make_tracker(config)
    try:
        if config.logger.wandb_enabled and is_wandb_offline(config.logger.wandb.mode):
            tracker.note(describe_offline(config))
        attempts = chain([config], repeat(continue_from_newest(config)))
        with (
            trust_remote_code(config.policy.trust_remote_code),
            handle_stop_signals(config.checkpointing) as signals,
            watch_run(config, tracker) as watched,
        ):
            run = await run_with_restarts(config, watched, lambda: _run_attempt(next(attempts), algorithm, watched, signals))
    finally:
        tracker.close()
    return make_closing(config, run, tracker.failures, time.monotonic() - started)


def make_closing(config: TrainingRunConfig, run: TrainingRun, failures: Sequence[str], seconds: float) -> Closing:
    """Make the last lines of a run that has ended."""
    folder = Path(config.checkpointing.checkpoint_dir)
    newest = max(list_steps(folder), default=None) if config.checkpointing.enabled else None
    return Closing(
        section=config.section,
        log_dir=Path(config.logger.log_dir),
        stores_rollouts=isinstance(config, RolloutRunConfig) and config.logger.rollouts != "none",
        checkpoint=None if newest is None else folder / f"step_{newest}",
        seconds=seconds,
        tokens=run.last_metrics.get("train/total_tokens", 0.0),
        warnings=[
            str(finding) for each in run.listeners.attached if isinstance(each, HealthMonitor) for finding in each.findings
        ],
        failed_trackers=failures,
        hints=[describe_offline(config)] if config.logger.wandb_enabled and is_wandb_offline(config.logger.wandb.mode) else [],
    )


def describe_offline(config: TrainingRunConfig) -> str:
    section = config.logger.wandb
    folder = Path(section.dir or config.logger.log_dir) / "wandb" / "offline-run-*"
    why = "WANDB_MODE" if section.mode is None else f"logger.wandb.mode={section.mode}"
    return f"Weights & Biases is offline ({why}): nothing is sent; to send it later: wandb sync {folder}"


def continue_from_newest(config: TrainingRunConfig) -> TrainingRunConfig:
    """Return the configuration of further attempts, which continue what the first one began."""
    return replace(config, checkpointing=replace(config.checkpointing, resume="auto"))


async def _run_attempt(config: TrainingRunConfig, algorithm: Algorithm, tracker: Tracker, signals: SignalHandler) -> TrainingRun:
    """Run one attempt: from the newest checkpoint to the end of the run. Return the run. Raises RunStopped if a stop signal ends it."""
    log_dir = Path(config.logger.log_dir).absolute()  # a reward may change the working directory
    async with open_cluster(config, tracker) as cluster:
        signals.install()
        if cluster is not None:
            config = resolve_auto_backend(config, has_gpus=not cluster.on_cpu)
        run, generator = await build_run(config, tracker, cluster, algorithm)
        machines = await watch_machines(config, cluster)
        on_cpu = cluster.on_cpu if cluster is not None else resolve_device_name(config.policy.device) == "cpu"
        throughput = make_throughput(config, machines.gpu_names, tracker.note, on_cpu=on_cpu)
        run.listeners.attach(
            ThroughputMeter(throughput=throughput, algorithm=algorithm, options=run.options),
            MachineWatch(monitor=machines),
            ProfileRecorder(profiler=make_profiler(config, tracker, cluster)),
        )
        run.stop_request = signals.stop_request
        check_checkpoint_space(config, run.learners, tracker)
        try:
            await train(run)
            if run.checkpoints is not None:
                await asyncio.to_thread(run.checkpoints.finish)
            announce_checkpoint(run)
        finally:
            if run.checkpoints is not None:
                with suppress(Exception):  # may fail for the same reason; but no write may overlap with the next attempt
                    await asyncio.to_thread(run.checkpoints.finish)
            await run.stream.close()
            await run.listeners.on_end(tracker)
            for close in run.on_close:
                await close()
            if generator is not None:
                await generator.close()
        if run.ending == "stopped":
            raise RunStopped(f"{signals.stop_request.reason}: the run ended after step {run.step}.")
        finish_run(log_dir, run)
        run.tracker.note(f"done after step {run.step}; metrics in {config.logger.log_dir}")
        return run


async def build_run(
    config: TrainingRunConfig, tracker: Tracker, cluster: Cluster | None = None, algorithm: Algorithm | None = None
) -> tuple[TrainingRun, Generator | None]:
    """Build a run, in this process or on ``cluster``, restored from its newest checkpoint if there is one. Return it with its generator,
    or None for a run on recorded data. ``algorithm``: the configuration's, if it has been made."""
    algorithm = algorithm or make_run_algorithm(config)
    seed_everything(config.training.seed)
    set_deterministic(config.policy.deterministic)
    for line in summarize(config, algorithm, on_cpu=None if cluster is None else cluster.on_cpu).splitlines():
        tracker.note(line)
    if isinstance(config, RolloutRunConfig):
        return await build_rollout_run(config, algorithm, tracker, cluster)
    assert isinstance(config, RecordedRunConfig)
    return await build_recorded_run(config, algorithm, tracker, cluster), None
