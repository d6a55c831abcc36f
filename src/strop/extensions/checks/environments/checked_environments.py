"""The environments of a configuration, with their tasks, as ``strop env check`` looks at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from strop.config import EvalRunConfig, RolloutRunConfig
from strop.config.schema.run_config import DistillationRunConfig, GrpoRunConfig, PpoRunConfig
from strop.environments.base import Environment
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.runs.tasks import make_mixture
from strop.types import Task

CheckedConfig = RolloutRunConfig | EvalRunConfig
CHECKED_RUNS: Mapping[str, type[RolloutRunConfig] | type[EvalRunConfig]] = {
    "grpo": GrpoRunConfig,
    "ppo": PpoRunConfig,
    "distillation": DistillationRunConfig,
    "eval": EvalRunConfig,
}


@dataclass(frozen=True)
class JoinedTasks(Sequence[Task]):
    """Several sequences of tasks, one after another."""

    parts: tuple[Sequence[Task], ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


@dataclass(frozen=True)
class CheckedEnvironment:
    name: str  # its alias; with a number if several data entries use it
    environment: Environment[Any]
    tasks: Sequence[Task]
    validation: Sequence[Task] = ()
    rebuild: Callable[[], Sequence[Task]] | None = None  # makes ``tasks`` once more


def make_checked_environments(config: CheckedConfig, only: str | None = None) -> list[CheckedEnvironment]:
    """Return every environment of a configuration, once for each entry of its training data. Raises EnvironmentConfigError, DataError."""
    training = _make_parts(config)[0]
    validation = _make_parts(config)[1]
    checked: list[CheckedEnvironment] = []
    for position, component in enumerate(training):
        if only not in (None, component.name):
            continue
        of_name = [other for other in training if other.name == component.name]
        name = component.name if len(of_name) == 1 else f"{component.name} ({of_name.index(component) + 1})"
        held_out = JoinedTasks(tuple(other.tasks for other in validation if other.name == component.name))

        def rebuild(position: int = position) -> Sequence[Task]:
            return _make_parts(config)[0][position].tasks

        assert isinstance(component.environment, LocalEnvironment)
        checked.append(CheckedEnvironment(name, component.environment.environment, component.tasks, held_out, rebuild))
    return checked


def _make_parts(config: CheckedConfig) -> tuple[tuple[Component, ...], tuple[Component, ...]]:
    """Return the components of training and of validation; what an evaluation reads takes the place of training."""
    if isinstance(config, EvalRunConfig):
        config = config.with_graders()
        tasks = make_mixture(config.data.entries, config.env, "validation", seed=config.eval.seed, purpose="evaluation")
        return tasks.components, ()
    data, seed = config.data, config.rollout_training.seed
    entries = data.validation_entries
    train: Mixture = make_mixture(data.train, config.env, "train", seed=seed)
    return train.components, make_mixture(entries, config.env, "validation", seed=seed).components if entries else ()
