"""Common parts of every training run: trackers, checkpoints, seeds and the watchdog."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy
import torch

from strop import plugins
from strop.algorithms.base import Algorithm
from strop.base_config import to_tree
from strop.checkpointing.base import Checkpointer
from strop.checkpointing.folders import BackgroundCheckpointer, FolderCheckpointer
from strop.config import TrainingRunConfig, dump_config
from strop.config.load.device_defaults import resolve_auto_backend, with_gpu_budgets
from strop.determinism import set_deterministic
from strop.distributed.base import Cluster
from strop.monitoring.console import open_console
from strop.monitoring.trackers.background_tracker import BackgroundTracker
from strop.monitoring.trackers.base import CompositeTracker, TrackedRun, Tracker
from strop.monitoring.trackers.jsonl import JsonlTracker
from strop.monitoring.watchdog import Watchdog, WatchdogTimeout, schedule_exit
from strop.runs.local_device import resolve_device_name
from strop.runs.run_contents import find_contents, write_contents
from strop.runs.summary import summarize
from strop.safety.printable import redact_secrets
from strop.stopping import EarlyStop
from strop.trainer.cadence import announce_checkpoint
from strop.trainer.run import TrainingRun

# NeMo-RL's names -> Strop's.
METRIC_ALIASES = {
    "validation/val_loss": "validation/loss",
    "validation/validation-default_loss": "validation/loss",
}


def make_early_stop(config: TrainingRunConfig) -> EarlyStop | None:
    """Create the rule that stops a run at a validation metric; None if none is configured."""
    training = config.training
    if training.stop_at_validation_metric is None:
        return None
    return EarlyStop(
        metric=resolve_metric(training.stop_at_validation_metric, "validation"),
        higher_is_better=training.stop_at_validation_higher_is_better,
        threshold=training.stop_at_validation_threshold,
        patience=training.stop_at_validation_patience,
    )


def resolve_metric(name: str, default: str = "train") -> str:
    """Return the name under which a metric is logged: ``val:accuracy`` is ``validation/accuracy``."""
    kind, colon, rest = name.partition(":")
    if not colon:
        return name if "/" in name else f"{default}/{name}"
    tag = f"{ {'val': 'validation'}.get(kind, kind) }/{rest}"
    return METRIC_ALIASES.get(tag, tag)


def make_tracker(config: TrainingRunConfig) -> CompositeTracker:
    """Create the enabled trackers. Services are imported only if enabled, and called in separate threads."""
    logger, folder = config.logger, Path(config.logger.log_dir)
    steps = config.training.last_step if config.training.last_step < 1_000_000 else None
    return CompositeTracker(
        [
            open_console(logger.console, max_steps=steps, title=config.policy.model_name, columns=config.console),
            JsonlTracker(folder),
            *(BackgroundTracker(service, close_seconds=logger.close_timeout) for service in make_services(config)),
        ]
    )


def make_services(config: TrainingRunConfig) -> list[Tracker]:
    """Create the trackers of the enabled services, importing only those. Raises ImportError or ValueError for one that cannot
    work.
    """
    settings = redact_secrets(to_tree(config))
    run = TrackedRun(logger=config.logger, name=config.run_name, folder=Path(config.logger.log_dir), settings=settings)
    return [plugins.load("trackers", name)(run) for name in config.logger.services]


def make_checkpoints(config: TrainingRunConfig, save_tokenizer: Callable[[Path], object]) -> FolderCheckpointer:
    """Make the checkpoint folders of a run. ``save_tokenizer`` writes the tokenizer to a checkpoint's folder."""
    saving = config.checkpointing
    return FolderCheckpointer(
        folder=Path(saving.checkpoint_dir),
        config_text=dump_config(config),
        contents_text=write_contents(find_contents(config)),
        save_tokenizer=save_tokenizer,
        keep_top_k=saving.keep_top_k,
        metric=resolve_metric(saving.metric_name) if saving.metric_name else None,
        higher_is_better=saving.higher_is_better,
        save_optimizer=saving.save_optimizer,
    )


def make_saver(config: TrainingRunConfig, folders: FolderCheckpointer) -> Checkpointer | None:
    """Return the checkpoints that a run writes, in the background if configured; None if checkpointing is disabled."""
    if not config.checkpointing.enabled:
        return None
    return BackgroundCheckpointer(folders) if config.checkpointing.async_save else folders


def begin_run(config: TrainingRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None) -> TrainingRunConfig:
    """Set up this process and log what is run. Return the configuration adjusted to the cluster's devices."""
    if cluster is not None:
        config = resolve_auto_backend(config, has_gpus=not cluster.on_cpu)
    seed_everything(config.training.seed)
    set_deterministic(config.policy.deterministic)
    for line in summarize(config, algorithm, on_cpu=None if cluster is None else cluster.on_cpu).splitlines():
        tracker.note(line)
    on_cpu = resolve_device_name(config.policy.device) == "cpu" if cluster is None else cluster.on_cpu
    return config if on_cpu else with_gpu_budgets(config)


@asynccontextmanager
async def finish_at_end(run: TrainingRun) -> AsyncIterator[TrainingRun]:
    """Complete the checkpoint in progress when the context ends, even with an error, and end the listeners."""
    try:
        yield run
        if run.checkpoints is not None:
            await asyncio.to_thread(run.checkpoints.finish)
        announce_checkpoint(run)
    finally:
        if run.checkpoints is not None:
            with suppress(Exception):  # may fail for the same reason; but no write may overlap with the next attempt
                await asyncio.to_thread(run.checkpoints.finish)
        await run.listeners.on_end(run.tracker)


def seed_everything(seed: int) -> None:
    """Seed the global generators, for environments and models that use them. Strop derives its own seeds from the identity of a rollout."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def watch_run(config: TrainingRunConfig, tracker: Tracker) -> Iterator[Tracker]:
    """Run the watchdog inside the context, in a running event loop. Yields the tracker to use, which also reports to the watchdog.

    Raises WatchdogTimeout."""
    section = config.watchdog
    if not section.enabled:
        yield tracker
        return
    watchdog = Watchdog(
        Path(config.logger.log_dir),
        note=tracker.note,
        config=section,
        checkpoints=config.checkpointing.checkpoint_dir if config.checkpointing.enabled else None,
    )
    try:
        with watchdog:
            yield CompositeTracker([tracker, watchdog.status_tracker])
    except WatchdogTimeout as timeout:
        schedule_exit(timeout)
        raise
