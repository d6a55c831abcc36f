"""Monitors of the machines of a run: one in this process, and a process on every other node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from strop.config import TrainingRunConfig
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.monitoring.machine.machine_monitor import MachineMonitor
from strop.monitoring.machine.system_monitor import SystemMonitor

logger = logging.getLogger(__name__)


async def watch_machines(config: TrainingRunConfig, cluster: Cluster | None) -> SystemMonitor:
    """Start the monitors, as ``logger.monitor_gpus`` says. A node that cannot be watched is warned about; the run goes on.

    Without a cluster node 0 is this machine; with one every node is watched from a process of its own, whose driver may be elsewhere.
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
        logger.warning("node %d is not monitored (logger.monitor_gpus): %s: %s", node, type(error).__name__, error)
        return None


def _ask(actor: RemoteActor) -> Callable[[], dict[str, float]]:
    def drain() -> dict[str, float]:
        report: dict[str, float] = actor.start_call("drain")()
        return report

    return drain
