"""The tasks that a run trains and validates on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strop.config import RolloutRunConfig
from strop.distributed.base import Cluster
from strop.environments.handle import EnvironmentHandle
from strop.environments.mixture import Mixture
from strop.monitoring.trackers.base import Tracker
from strop.problems import raise_problems
from strop.runs.cluster.ray_backend import make_remote_environments
from strop.runs.contents.model_check import note_empty_answers
from strop.runs.dry_run.examined_templates import find_conversation_problems
from strop.runs.tasks import make_training_tasks, make_validation_tasks
from strop.sandbox.sandbox_pool import try_sandbox


@dataclass(frozen=True)
class RunTasks:
    train: Mixture
    validation: Mixture | None

    @property
    def environments(self) -> list[EnvironmentHandle[Any]]:
        """The environments of both, an environment as often as it is named."""
        mixtures = [self.train] if self.validation is None else [self.train, self.validation]
        return [component.environment for mixture in mixtures for component in mixture.components]


async def read_tasks(config: RolloutRunConfig, cluster: Cluster | None, tracker: Tracker) -> RunTasks:
    """Make the environments of a run and read its tasks; try the sandbox if one needs it. Raises ConfigError, EnvironmentConfigError."""
    remote = {} if cluster is None else make_remote_environments(config, cluster)
    tracker.progress("reading tasks")
    tasks = RunTasks(make_training_tasks(config, remote), make_validation_tasks(config, remote))
    held_out = "" if tasks.validation is None else f", {len(tasks.validation)} to validate on"
    tracker.note(f"{describe_count(tasks.train.epoch_size, 'tasks')} to train on{held_out}{describe_order(config)}")
    note_empty_answers(tasks.train, tracker.note)
    if any(each.traits.needs_sandbox for each in tasks.environments):
        tracker.progress("trying the sandbox")
        tracker.note(await try_sandbox())
    raise_problems(find_conversation_problems(config, tasks.environments))
    return tasks


def describe_count(count: int | None, what: str) -> str:
    return f"{what} of a stream" if count is None else f"{count} {what}"


def describe_order(config: RolloutRunConfig) -> str:
    """Say what a curriculum changes; empty without one."""
    name, limit = config.data.curriculum.name, config.training.max_num_epochs
    if not config.data.curriculum.enabled:
        return ""
    epochs = "" if limit is None else f", {limit} (max_num_epochs) in all"
    return f"; the curriculum {name} draws them with replacement, and an epoch is as many draws as there are tasks{epochs}"
