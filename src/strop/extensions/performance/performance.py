"""Log what the machines of a run do, as ``system/...``, and how well it uses them, as ``perf/...``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from strop.config import TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.extensions.performance.devices import (
    DecoderDimensions,
    PassCounts,
    UnknownDimensions,
    dimensions_of,
    find_device,
    forward_flops,
    training_flops,
    windows_of,
)
from strop.extensions.performance.machine_monitor import MachineMonitor, SharedCores, SystemMonitor
from strop.extensions.performance.performance_config import PerformanceConfig
from strop.models.loading import read_model_config
from strop.monitoring.trackers.base import Tracker
from strop.runs.local_device import resolve_device_name
from strop.runs.monitors.run_listeners import RunSetup
from strop.trainer.listeners import RunListener, StepView
from strop.types import Batch

log = logging.getLogger(__name__)


@dataclass
class PerformanceMeter(RunListener):
    """Logs the machines' activity since the last step, tokens per second per device, and hardware utilisation."""

    name = "performance"
    setup: RunSetup
    _machines: SystemMonitor = field(default_factory=lambda: SystemMonitor(None), init=False)
    _throughput: Throughput | None = field(default=None, init=False)
    _shared: SharedCores | None = field(default=None, init=False)  # of a run on this machine's processors

    async def on_start(self, step: int, tracker: Tracker) -> None:
        config, cluster = self.setup.config, self.setup.cluster
        self._machines = await watch_machines(config, cluster)
        on_cpu = resolve_device_name(config.policy.device) == "cpu" if cluster is None else cluster.on_cpu
        if cluster is None and on_cpu and PerformanceConfig.of(config.logger).monitor_gpus:
            self._shared = SharedCores()
        self._throughput = make_throughput(config, self._machines.gpu_names, tracker.note, on_cpu=on_cpu)

    async def on_log(self, step: StepView) -> Mapping[str, float]:
        assert self._throughput is not None
        if self._shared is not None:
            self._shared.check()
        rates = self._throughput.metrics(step.batch, self.describe_passes(step), step.metrics)
        return {**rates, **self._machines.metrics()}

    async def on_end(self) -> None:
        self._machines.stop()

    def describe_passes(self, step: StepView) -> TrainingPasses:
        """Describe the update's passes over the batch, which include a forward pass before several optimizer steps."""
        options, algorithm = self.setup.source.options, self.setup.algorithm
        trained = "policy" in algorithm.losses(step.step - 1)
        return TrainingPasses(
            epochs=options.update_epochs if trained else 0,
            scored_before=not trained or options.steps_per_batch * options.update_epochs > 1,
            zero_gradient=algorithm.zero_gradient(step.batch, "policy"),
        )


def make_performance(setup: RunSetup) -> RunListener:
    """The entry point of ``strop.listeners``."""
    return PerformanceMeter(setup)


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
    peak = PerformanceConfig.of(config.logger).peak_tflops
    if peak is not None:
        return DevicePeak(peak * 1e12, "logger.peak_tflops")
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


async def watch_machines(config: TrainingRunConfig, cluster: Cluster | None) -> SystemMonitor:
    """Start the monitors according to ``logger.monitor_gpus``. A node that cannot be monitored causes a warning; the run goes on.

    Without a cluster node 0 is this machine; with one, every node is monitored from a separate process, because the driver may be
    elsewhere.
    """
    keys = PerformanceConfig.of(config.logger)
    section = keys.gpu_monitoring
    if not keys.monitor_gpus:
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


@dataclass(frozen=True, kw_only=True)
class TrainingPasses:
    """The passes of an update over its batch."""

    epochs: int = 1  # forward and backward passes over it
    scored_before: bool = False  # an additional earlier pass without gradient
    zero_gradient: Tensor | None = None  # [S] bool: rollouts without a backward pass

    def gradient_share(self, batch: Batch) -> float:
        """Return the share of the predicted tokens that have a gradient."""
        if self.zero_gradient is None or not len(batch.sequence):
            return 1.0
        return 1.0 - float(self.zero_gradient[batch.sequence].double().mean())


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The quantities that rates are divided by. Only the policy's arithmetic counts, so the time of a critic lowers the MFU."""

    devices: int  # of the run: for training and generation
    training_devices: int
    model: DecoderDimensions | None = None  # None: its layers are unknown
    peak_flops: float | None = None  # of one device, FLOPs per second; None: unknown
    frozen: bool = False  # the weights have no gradients (LoRA)

    def metrics(self, batch: Batch, passes: TrainingPasses, timing: Mapping[str, float]) -> dict[str, float]:
        """Return ``perf/...`` of a step, from its batch and its ``timing/`` and ``performance/`` metrics."""
        found = {"perf/tokens_per_sec_per_gpu": timing["performance/tokens_per_sec"] / self.devices}
        seconds = timing.get("timing/train/policy_training", 0.0)
        if self.model is None or seconds <= 0:
            return found
        rate = self.count_flops(batch, passes) / seconds / self.training_devices
        found["perf/model_tflops_per_gpu"] = rate / 1e12
        if self.peak_flops is not None:
            found["perf/mfu"] = rate / self.peak_flops
        return found

    def count_flops(self, batch: Batch, passes: TrainingPasses) -> float:
        """Count the FLOPs of an update: tokens without a gradient only have a forward pass, and shared prompts are read once."""
        assert self.model is not None
        counts = count_batch(batch, self.model)
        forward = forward_flops(self.model, counts)
        trained = training_flops(self.model, counts, frozen=self.frozen)
        share = passes.gradient_share(batch)
        return passes.epochs * (share * trained + (1 - share) * forward) + (forward if passes.scored_before else 0.0)


def count_batch(batch: Batch, model: DecoderDimensions) -> PassCounts:
    """Count what a pass over a packed batch reads. A token attends to itself and all tokens before it on its path: position + 1."""
    seen = batch.positions + 1
    pairs = {window: int((seen if window is None else seen.clamp(max=window)).sum()) for window in windows_of(model)}
    return PassCounts(read=len(batch.tokens), predicted=len(batch.target), pairs=pairs)
