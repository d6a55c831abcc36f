"""``strop grpo``, ``strop ppo``, ...: open a run from its configuration and train."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from strop.checkpointing.saved_model import list_steps
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.learner.budget.device_memory import repeating_steps
from strop.monitoring.console import Closing
from strop.runs.cluster.cluster_run import Restarts, open_cluster
from strop.runs.exit_codes import run_command
from strop.runs.lifecycle import make_tracker, watch_run
from strop.runs.open_run import open_run
from strop.runs.restore import finish_run
from strop.runs.run_algorithm import make_run_algorithm
from strop.runs.run_folders import lock_run_folders
from strop.safety.remote_code import trust_remote_code
from strop.stopping import RunStopped
from strop.trainer.run import TrainingRun
from strop.trainer.stop_signal import handle_stop_signals
from strop.trainer.train import train


def run_training(config: TrainingRunConfig) -> int:
    """Train as configured, and print suggested next commands. Return 0 on success, 1 after printing an error."""
    return run_command(train_as_configured(config), quiet=config.logger.console == "none")


async def train_as_configured(config: TrainingRunConfig) -> Closing | str:
    """Train, starting from the newest checkpoint, and return the closing message. Raises RunStopped if a stop signal ends the
    run.
    """
    started = time.monotonic()
    log_dir = Path(config.logger.log_dir).absolute()  # a reward may change the working directory
    algorithm = make_run_algorithm(config)  # may refuse the run before a log folder is created and processes are started
    with lock_run_folders(config) as plan:
        if plan.nothing_to_do is not None:
            return plan.nothing_to_do
        with (
            closing(make_tracker(config)) as services,
            trust_remote_code(config.policy.trust_remote_code),
            handle_stop_signals(config.checkpointing) as signals,
            watch_run(config, services) as tracker,
        ):
            restarts = Restarts(config, tracker)
            while restarts.due:
                with restarts.attempt() as attempt:
                    async with open_cluster(attempt, tracker) as cluster:
                        signals.install()  # again: Ray has replaced the handler
                        async with open_run(attempt, algorithm, tracker, cluster) as run:
                            run.stop_request = signals.stop_request
                            with repeating_steps():
                                await train(run)
            if run.ending == "stopped":
                raise RunStopped(f"{signals.stop_request.reason}: the run ended after step {run.step}.")
            finish_run(log_dir, run)
            tracker.note(f"done after step {run.step}; metrics in {config.logger.log_dir}")
        return make_closing(config, run, services.failures, time.monotonic() - started)


def make_closing(config: TrainingRunConfig, run: TrainingRun, failures: Sequence[str], seconds: float) -> Closing:
    """Create the last lines of a finished run."""
    folder = Path(config.checkpointing.checkpoint_dir)
    newest = max(list_steps(folder), default=None) if config.checkpointing.enabled else None
    return Closing(
        log_dir=Path(config.logger.log_dir),
        samples=isinstance(config, RolloutRunConfig),
        stores_rollouts=isinstance(config, RolloutRunConfig) and config.logger.rollouts != "none",
        trains_scores=config.trains_scores,
        checkpoint=None if newest is None else folder / f"step_{newest}",
        seconds=seconds,
        tokens=run.last_metrics.get("train/total_tokens", 0.0),
        warnings=[warning for each in run.listeners.attached for warning in each.warnings],
        failed_trackers=failures,
        hints=[hint for each in config.logger.trackers.values() for hint in each.closing_hints(config.logger.log_dir)],
    )
