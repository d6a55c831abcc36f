"""The configured listeners of a run, the monitors of its machines, and the inputs of its throughput rates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop import plugins
from strop.algorithms.base import Algorithm
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.hardware import DecoderDimensions, find_device
from strop.learner.policy_extension import fixes_order
from strop.learner.throughput import Throughput
from strop.models.decoder_dimensions import UnknownDimensions, dimensions_of
from strop.models.loading import read_model_config
from strop.monitoring.machine_monitor import MachineMonitor, SystemMonitor
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.runs.local_device import resolve_device_name
from strop.runs.monitors.instruments import MachineWatch, RolloutRecorder, ThroughputMeter
from strop.runs.recorded_run import RecordedSource
from strop.runs.rollout_run import SampledSource
from strop.trainer.listeners import Listeners, RunListener
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.run import TrainOptions
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DevicePeak:
    """The peak of one training device, and its source."""

    flops: float  # a second
    source: str


def make_throughput(
    config: TrainingRunConfig, gpu_names: Sequence[str], note: Callable[[str], object], *, on_cpu: bool
) -> Throughput:
    """Return the throughput of a run on processors, or on GPUs with these NVML names; empty names: unknown.

    ``note`` receives the peak that ``perf/mfu`` refers to.
    """
    counts, policy = count_devices(config), config.policy
    training = counts.learner_devices
    generating = 0 if counts.colocated or not counts.uses_ray else counts.generating_nodes * counts.generating_per_node
    model = read_dimensions(policy.model_name)
    peak = None if model is None else find_peak(config, gpu_names, on_cpu=on_cpu)
    if peak is not None:
        each = f"each of {training} devices that train" if training > 1 else "the device that trains"
        note(f"perf/mfu: of {peak.flops / 1e12:.4g} TFLOP/s in {_precision(config)}, the peak of {each} ({peak.source})")
    return Throughput(
        devices=training + generating,
        training_devices=training,
        model=model,
        peak_flops=None if peak is None else peak.flops,
        frozen=policy.adapter_rank is not None,
    )


def read_dimensions(name: str) -> DecoderDimensions | None:
    """Return the dimensions of a model; None, with a log message, if its layers are unknown or it cannot be read."""
    try:
        return dimensions_of(read_model_config(name).to_dict())
    except UnknownDimensions as error:
        log.info("perf/mfu and perf/model_tflops_per_gpu are not logged: %s", error)
    except Exception as error:  # the driver of a cluster may lack the model's files
        log.info("perf/mfu and perf/model_tflops_per_gpu are not logged: %s cannot be read here: %s", name, error)
    return None


def find_peak(config: TrainingRunConfig, gpu_names: Sequence[str], *, on_cpu: bool) -> DevicePeak | None:
    """Return the peak of one training device: the user's value, or that of the table of GPUs."""
    if config.logger.peak_tflops is not None:
        return DevicePeak(config.logger.peak_tflops * 1e12, "logger.peak_tflops")
    if on_cpu:
        log.info("perf/mfu is not logged: the peak of processors is not known; set logger.peak_tflops")
        return None
    return _find_in_table(gpu_names[0] if gpu_names else "a GPU whose name is not known", _precision(config))


def _precision(config: TrainingRunConfig) -> str:
    return "fp8" if config.policy.fp8.enabled else config.policy.precision


def _find_in_table(gpu: str, precision: str) -> DevicePeak | None:
    device = find_device(gpu)
    if device is None:
        log.info("perf/mfu is not logged: the peak rate of %s is not in the device table", gpu)
        return None
    try:
        return DevicePeak(device.peak_flops(precision), f"{device.name}, from the table of devices")
    except ValueError:  # FP8 weights on a device without FP8 arithmetic
        return DevicePeak(device.peak_flops("bfloat16"), f"{device.name}, from the table of devices, in bfloat16")


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The parts of a run that are made before its models: what a listener of an extension, or of a user, is made from."""

    config: TrainingRunConfig
    algorithm: Algorithm
    source: SampledSource | RecordedSource  # its ``options`` are known once the run starts
    store: RolloutStore
    cluster: Cluster | None = None  # None: all is in this process


ListenerFactory = Callable[[RunSetup], RunListener | None]
"""An entry point of ``strop.listeners``, or what ``logger.listeners`` names; None: it has nothing to do in this run."""


def attach_listeners(setup: RunSetup) -> list[RunListener]:
    """Make the listeners of extensions and those that the configuration names. Raises UserCodeError, EnvironmentConfigError."""
    makers: dict[str, ListenerFactory] = {name: plugins.load("listeners", name) for name in sorted(plugins.declared("listeners"))}
    makers |= {path: import_attribute(path) for path in setup.config.logger.listeners}
    return [listener for name, make in makers.items() if (listener := _make(name, make, setup)) is not None]


def _make(name: str, make: ListenerFactory, setup: RunSetup) -> RunListener | None:
    try:
        listener = make(setup)
    except TypeError as error:
        raise UserCodeError(f"the listener {name} cannot be made from a RunSetup: {describe_error(error)}") from error
    if listener is not None and not (isinstance(listener, RunListener) and hasattr(listener, "name")):
        raise UserCodeError(
            f"the listener {name} gives {describe_value(listener)}; return a strop.trainer.listeners.RunListener with a name, or None"
        )
    return listener


async def make_listeners(setup: RunSetup, options: TrainOptions, attached: Iterable[RunListener], tracker: Tracker) -> Listeners:
    """Make the listeners of a run, in the order in which they see a step: those that are attached read the mismatch."""
    config, cluster = setup.config, setup.cluster
    machines = await watch_machines(config, cluster)
    on_cpu = resolve_device_name(config.policy.device) == "cpu" if cluster is None else cluster.on_cpu
    throughput = make_throughput(config, machines.gpu_names, tracker.note, on_cpu=on_cpu)
    return Listeners(
        [
            *([make_mismatch_guard(config)] if isinstance(config, RolloutRunConfig) else []),
            make_recorder(config, setup.algorithm, setup.store),
            *attached,
            ThroughputMeter(throughput=throughput, algorithm=setup.algorithm, options=options),
            MachineWatch(monitor=machines),
        ]
    )


def make_store(config: TrainingRunConfig) -> RolloutStore:
    """Create the store of rollouts. Recorded rollouts are already in the data, so they are stored only for per-token columns."""
    stored = isinstance(config, RolloutRunConfig) or config.logger.token_columns == "all"
    return RolloutStore(Path(config.logger.log_dir), config.logger.rollouts if stored else "none")


def make_mismatch_guard(config: RolloutRunConfig) -> MismatchGuard:
    policy = config.policy
    return MismatchGuard(policy.generation.mismatch, exact=fixes_order(policy) and not policy.generation.uses_engines)


def make_recorder(config: TrainingRunConfig, algorithm: Algorithm, store: RolloutStore) -> RolloutRecorder:
    logger = config.logger
    if not isinstance(config, RolloutRunConfig):
        columns = logger.rollouts != "none" and logger.token_columns == "all"
        return RolloutRecorder(store=store, algorithm=algorithm, token_columns=columns)
    return RolloutRecorder(
        store=store,
        algorithm=algorithm,
        decode=store.decode,
        stores=lambda column: column.is_stored(config),
        token_columns=logger.rollouts != "none" and logger.token_columns != "none",
        tracked_samples=logger.shown_samples,
        tracked_samples_period=logger.tracked_samples_period,
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
