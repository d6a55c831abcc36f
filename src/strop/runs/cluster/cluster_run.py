"""Start the Ray cluster of a run, check its nodes, and restart the run from its newest checkpoint when a rank dies."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from strop.checkpointing.saved_model import list_steps
from strop.config import TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.distributed.actor_group import ActorGroupDied
from strop.distributed.base import ActorDied, Cluster
from strop.monitoring.trackers.base import Tracker

log = logging.getLogger(__name__)

RECOVERABLE_ERRORS = (ActorGroupDied, ActorDied)


@asynccontextmanager
async def open_cluster(config: TrainingRunConfig, tracker: Tracker) -> AsyncIterator[Cluster | None]:
    """Connect to the nodes configured for the run; yield None for a run in this process only.

    Raises PlacementError, ConnectionError, ValueError."""
    devices = count_devices(config)
    if not devices.uses_ray:
        yield None
        return
    from strop.distributed.ray import connect

    folder = Path(config.logger.log_dir).resolve()
    cluster = await connect(
        config.cluster,
        on_cpu=runs_on_cpu(config),
        cpus_per_node=compute_reserved_cpus(config),
        output_folder=folder / "workers",
    )
    try:
        addresses = ", ".join(node.address for node in cluster.members)
        tracker.note(
            f"cluster: {cluster.num_nodes} nodes ({addresses}), {devices.per_node} devices on each; "
            f"output of processes in {folder / 'workers'}"
        )
        yield cluster
    finally:
        await cluster.close()


def runs_on_cpu(config: TrainingRunConfig) -> bool | None:
    """Return whether processes replace GPUs; None if that depends on the cluster."""
    return {"cpu": True, "auto": None}.get(config.policy.device, False)


def compute_reserved_cpus(config: TrainingRunConfig) -> float:
    """Return the number of CPUs to reserve on each node: the sum over its processes, at least 1."""
    roles, devices = config.cluster.roles, count_devices(config)
    cpus = devices.per_node * roles.learner.num_cpus + (devices.engines or 1) * roles.generator.num_cpus
    cpus += sum(role.num_cpus * -(-processes // devices.nodes) for role, processes in config.further_processes)
    return max(1.0, cpus)


class Restarts:
    """The attempts of a run: if a process dies, another attempt continues from the newest checkpoint, ``cluster.max_restarts``
    times.

    The count starts over whenever an attempt saves a later step than all previous ones.
    """

    def __init__(self, config: TrainingRunConfig, tracker: Tracker) -> None:
        self.due = True  # whether to start an attempt
        self._config, self._tracker = config, tracker
        self._remaining = config.cluster.max_restarts
        self._checkpoints = Path(config.checkpointing.checkpoint_dir).absolute()  # a reward may change the working directory
        self._furthest = -1 if config.checkpointing.resume == "never" else find_newest_step(config, self._checkpoints)

    @contextmanager
    def attempt(self) -> Iterator[TrainingRunConfig]:
        """Handle the death of a process inside the context, which yields the configuration to run. Re-raises it if no restart is
        left.
        """
        try:
            yield self._config
        except RECOVERABLE_ERRORS as error:
            self._restart(error)
        else:
            self.due = False

    def _restart(self, error: Exception) -> None:
        allowed, newest = self._config.cluster.max_restarts, find_newest_step(self._config, self._checkpoints)
        if newest > self._furthest:
            self._remaining, self._furthest = allowed, newest
        if self._remaining == 0:
            raise type(error)(
                f"{error}; the run was restarted {allowed} times without saving another step (cluster.max_restarts), so another "
                f"restart is unlikely to help: see the output of the process in {Path(self._config.logger.log_dir) / 'workers'}"
            ) from error
        self._remaining -= 1
        origin = f"from the checkpoint of step {newest}" if newest >= 0 else "from the beginning: there is no checkpoint yet"
        self._tracker.note(
            f"warning: {error}. The learner restarts {origin}; {self._remaining} more restarts are allowed before another step is saved"
        )
        log.debug("where the error was raised", exc_info=error)
        self._config = replace(self._config, checkpointing=replace(self._config.checkpointing, resume="auto"))


def find_newest_step(config: TrainingRunConfig, checkpoints: Path) -> int:
    """Return the step of the newest checkpoint in a folder, from which a restart would continue; -1 if there is none."""
    saving = config.checkpointing
    return max(list_steps(checkpoints), default=-1) if saving.enabled else -1
