"""The configured listeners of a run, and the monitors of its machines: one in this process and one on every other node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from strop.algorithms.base import Algorithm
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.environments.verifiers.held_out_grader import VerifierGrader, make_grader
from strop.extensions.watch.hacking.hacking_monitor import DETECTORS, HackingMonitor
from strop.extensions.watch.health.health_monitor import HealthMonitor
from strop.extensions.watch.health.health_rules import HealthFinding
from strop.monitoring.machine.machine_monitor import MachineMonitor
from strop.monitoring.machine.system_monitor import SystemMonitor
from strop.monitoring.profiling.step_profiler import ProfiledProcess, StepProfiler
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.local_device import resolve_device_name
from strop.runs.monitors.instruments import HackingWatch, MachineWatch, ProfileRecorder, RolloutRecorder, ThroughputMeter
from strop.runs.monitors.run_throughput import make_throughput
from strop.trainer.listeners import Listeners
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.run import TrainOptions

log = logging.getLogger(__name__)


async def make_listeners(
    config: TrainingRunConfig,
    algorithm: Algorithm,
    options: TrainOptions,
    store: RolloutStore,
    hacking: HackingMonitor | None,
    at_start: Iterable[HealthFinding],
    cluster: Cluster | None,
    tracker: Tracker,
) -> Listeners:
    """Create the listeners of a run, in the order in which they see a step; the health rules read the mismatch."""
    machines = await watch_machines(config, cluster)
    on_cpu = resolve_device_name(config.policy.device) == "cpu" if cluster is None else cluster.on_cpu
    throughput = make_throughput(config, machines.gpu_names, tracker.note, on_cpu=on_cpu)
    return Listeners(
        [
            *([make_mismatch_guard(config)] if isinstance(config, RolloutRunConfig) else []),
            make_recorder(config, algorithm, store),
            make_health(config, at_start),
            *([] if hacking is None else [HackingWatch(monitor=hacking, store=store)]),
            ThroughputMeter(throughput=throughput, algorithm=algorithm, options=options),
            MachineWatch(monitor=machines),
            ProfileRecorder(profiler=make_profiler(config, tracker, cluster)),
        ]
    )


def make_store(config: TrainingRunConfig, decode: Callable[[list[int]], str]) -> RolloutStore:
    """Create the store of rollouts. Recorded rollouts are already in the data, so they are stored only for per-token columns."""
    stored = isinstance(config, RolloutRunConfig) or config.logger.token_columns == "all"
    return RolloutStore(Path(config.logger.log_dir), config.logger.rollouts if stored else "none", decode=decode)


def make_mismatch_guard(config: RolloutRunConfig) -> MismatchGuard:
    policy = config.policy
    return MismatchGuard(policy.generation.mismatch, exact=policy.exact_on_policy and not policy.generation.uses_engines)


def make_recorder(config: TrainingRunConfig, algorithm: Algorithm, store: RolloutStore) -> RolloutRecorder:
    logger = config.logger
    if not isinstance(config, RolloutRunConfig):
        columns = logger.rollouts != "none" and logger.token_columns == "all"
        return RolloutRecorder(store=store, algorithm=algorithm, token_columns=columns)
    return RolloutRecorder(
        store=store,
        algorithm=algorithm,
        decode=store.decode,
        stored_routes=logger.routes,
        token_columns=logger.rollouts != "none" and logger.token_columns != "none",
        tracked_samples=logger.shown_samples,
        tracked_samples_period=logger.tracked_samples_period,
    )


def make_health(config: TrainingRunConfig, at_start: Iterable[HealthFinding]) -> HealthMonitor:
    """Create the health monitor of a restored run, which knows the steps in the log folder."""
    limit = config.training.max_skipped_steps_in_a_row
    monitor = HealthMonitor(section=config.section, max_skipped_steps=limit, at_start=tuple(at_start))
    monitor.replay(logged for step, logged in read_metrics(Path(config.logger.log_dir) / METRICS_FILE) if step > 0)
    return monitor


def make_profiler(config: TrainingRunConfig, tracker: Tracker, cluster: Cluster | None) -> StepProfiler:
    """Create the recorder of time lines for the steps in ``logger.profile``, in this process and in those of ``cluster``."""
    profile = config.logger.profile
    return StepProfiler(
        folder=Path(config.logger.log_dir).absolute(),
        steps=frozenset(profile.steps),
        operators=profile.operators,
        note=tracker.note,
        processes=(lambda: _list_working(cluster)) if cluster is not None else tuple,
    )


def _list_working(cluster: Cluster) -> list[ProfiledProcess]:
    """Return the processes that take part in a run's steps, that is, all except machine monitors."""
    return [process for process in cluster.list_processes() if not process.name.startswith("monitor-")]


def make_hacking_monitor(config: TrainingRunConfig) -> HackingMonitor | None:
    """Create the reward hacking monitor; None if it is off. Raises EnvironmentConfigError for a grader that cannot be created."""
    if not isinstance(config, RolloutRunConfig) or not config.monitor.enabled or not config.monitor.active:
        return None
    section = config.monitor
    judges = [make_grader(each, "monitor.judges") for each in section.judges]
    second = None if section.second_grader is None else make_grader(section.second_grader, "monitor.second_grader")
    for grader in (second, *judges):
        if isinstance(grader, VerifierGrader):
            grader.verifier.prepare()
    return HackingMonitor(
        detectors=[DETECTORS[name]() for name in section.active],
        false_alarm_rate=section.false_alarm_rate,
        stop_on=section.stop_on,
        second_grader=second,
        judges=(judges[0], judges[-1]) if judges else None,
        graded_samples=section.graded_samples,
        log_dir=config.logger.log_dir,
    )


async def watch_machines(config: TrainingRunConfig, cluster: Cluster | None) -> SystemMonitor:
    """Start the monitors according to ``logger.monitor_gpus``. A node that cannot be monitored causes a warning; the run goes on.

    Without a cluster node 0 is this machine; with one, every node is monitored from a separate process, because the driver may be
    elsewhere.
    """
    section = config.logger.gpu_monitoring
    if not config.logger.monitor_gpus:
        return SystemMonitor(None)
    folder = str(Path(config.logger.log_dir).absolute())
    if cluster is None:
        own = MachineMonitor(section.collection_interval, folder)
        return SystemMonitor(own, gpu_names=own.list_gpus())
    started = [_watch_node(cluster, node, section.collection_interval, folder) for node in range(cluster.num_nodes)]
    watched = await asyncio.gather(*started)
    return SystemMonitor(
        None,
        {node: _ask(each[0]) for node, each in enumerate(watched) if each is not None},
        interval=section.flush_interval,
        gpu_names=next((each[1] for each in watched if each is not None and each[1]), ()),
    )


async def _watch_node(cluster: Cluster, node: int, interval: float, folder: str) -> tuple[RemoteActor, tuple[str, ...]] | None:
    """Start the monitor of a node. Return it and the names of the node's GPUs."""
    try:
        _, gpus = cluster.locate(node, () if cluster.on_cpu else range(cluster.devices_per_node))  # the process itself sees none
        options = ActorOptions(name=f"monitor-{node}", node=node)
        actor = await cluster.spawn(options, MachineMonitor, interval, folder, gpus or None)
        return actor, await actor.call("list_gpus")
    except Exception as error:
        log.warning("node %d is not monitored (logger.monitor_gpus): %s: %s", node, type(error).__name__, error)
        return None


def _ask(actor: RemoteActor) -> Callable[[], dict[str, float]]:
    def drain() -> dict[str, float]:
        report: dict[str, float] = actor.start_call("drain")()
        return report

    return drain
