"""The cluster of a run, and its further lives after one of its ranks died."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from strop.cluster.base import Cluster, HostDied
from strop.cluster.group import GroupDied
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.devices import Devices, devices_of
from strop.config.schema import DistillationRunConfig
from strop.tracking.base import Tracker

log = logging.getLogger(__name__)

DEATHS = (GroupDied, HostDied)


@asynccontextmanager
async def cluster_of(config: TrainingRunConfig, tracker: Tracker) -> AsyncIterator[Cluster | None]:
    """The nodes that the run was configured to take; None for this process alone. Raises PlacementError, ConnectionError, ValueError."""
    devices = devices_of(config)
    if not devices.ray:
        yield None
        return
    try:
        from strop.cluster.ray import ClusterOptions, connect
    except ImportError as error:
        raise ValueError(
            f"this run takes {devices.learner} devices that train (cluster.gpus_per_node, cluster.num_nodes) and so Ray, which cannot be "
            f"imported here ({error}): pip install 'strop[ray]', or set cluster.backend=local and one device"
        ) from error
    folder = Path(config.logger.log_dir).resolve()
    cluster = await connect(
        ClusterOptions(
            nodes=devices.nodes,
            devices_per_node=devices.per_node,
            on_cpu={"cpu": True, "auto": None}.get(config.policy.device, False),
            segment=config.cluster.segment_size,
            address=config.cluster.address,
            output=folder / "workers",
            wait_seconds=config.cluster.wait_seconds,
            cpus_per_node=reserved_cpus(config),
        )
    )
    try:
        where = ", ".join(node.address for node in cluster.members)
        tracker.note(
            f"cluster: {cluster.nodes} nodes ({where}), {devices.per_node} devices on each; what processes write is in {folder / 'workers'}"
        )
        yield cluster
    finally:
        await cluster.close()


def reserved_cpus(config: TrainingRunConfig) -> float:
    """Of each node: what the processes on it ask for, at least one."""
    roles, devices = config.cluster.roles, devices_of(config)
    wanted = devices.per_node * roles.learner.num_cpus + (devices.engines or 1) * roles.generator.num_cpus
    if isinstance(config, RolloutRunConfig):
        wanted += len(config.env) * _on_one_node(config.cluster.environment_hosts, devices) * roles.environment.num_cpus
    if isinstance(config, DistillationRunConfig):
        hosts = sum(teacher.hosts for teacher in (config.teacher, *config.teachers.values()))
        wanted += _on_one_node(hosts, devices) * roles.teacher.num_cpus
    return max(1.0, wanted)


def _on_one_node(processes: int, devices: Devices) -> int:
    """At most, where they are dealt out over the nodes."""
    return -(-processes // devices.nodes)


async def with_restarts(config: TrainingRunConfig, tracker: Tracker, live: Callable[[], Awaitable[None]]) -> None:
    """Live; after the death of a rank live again, from the newest checkpoint. Raises the death that came too often.

    A life that got further than the ones before it, in saved steps, has all of its restarts again.
    """
    left = allowed = config.cluster.max_restarts
    furthest = saved_step(config)
    while True:
        try:
            return await live()
        except DEATHS as death:
            now = saved_step(config)
            if now > furthest:
                left, furthest = allowed, now
            if left == 0:
                raise type(death)(
                    f"{death}; the run was started anew {allowed} times without one more saved step (cluster.max_restarts), so the cause "
                    f"will not go away by itself: what the process wrote is in {Path(config.logger.log_dir) / 'workers'}"
                ) from death
            left -= 1
            again = f"from the checkpoint of step {now}" if now >= 0 else "from the beginning: there is no checkpoint yet"
            tracker.note(
                f"warning: {death}. The learner starts anew, {again}; {left} more restarts are allowed before it gets further"
            )
            log.debug("where it was noticed", exc_info=death)


def saved_step(config: TrainingRunConfig) -> int:
    """The step of the newest checkpoint that a restart would continue from; -1 without one."""
    saving = config.checkpointing
    if not (saving.enabled and saving.resume):
        return -1
    steps = (path.name.removeprefix("step_") for path in Path(saving.checkpoint_dir).glob("step_*"))
    return max((int(step) for step in steps if step.isdigit()), default=-1)
