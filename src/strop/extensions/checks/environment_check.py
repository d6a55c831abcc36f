"""The environments of a configuration, with their tasks, as ``strop env check`` looks at them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, overload

from strop.config import EvalRunConfig, RolloutRunConfig
from strop.config.schema.run_config import generation_section
from strop.environments.base import Environment
from strop.environments.handle import LocalEnvironment
from strop.environments.mixture import Component, Mixture
from strop.environments.resources import configure_resources, read_sections
from strop.extensions.checks.reward_checks import CHARACTERS_PER_TOKEN, RewardChecker, ScoringLimits
from strop.extensions.checks.task_checks import (
    EPISODE_CHECKS,
    EnvironmentReport,
    check_same,
    check_splits,
    read_prompts,
    read_tasks,
    spread,
)
from strop.runs.tasks import make_mixture
from strop.types import Task

CheckedConfig = RolloutRunConfig | EvalRunConfig


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


@dataclass(frozen=True)
class EnvironmentCheckOptions:
    """What to look at, and what counts as a fault."""

    tasks: int = 32
    bound: float = 0.5
    only: str | None = None
    skip: Collection[str] = ()


def check_environments(config: CheckedConfig, options: EnvironmentCheckOptions) -> list[EnvironmentReport]:
    """Check the environments of a configuration. Raises EnvironmentConfigError, DataError if they or their tasks cannot be made."""
    configure_resources(read_sections(config))  # before an environment asks for one
    checked = make_checked_environments(config, options.only)
    return [check_environment(each, options, _read_limits(config, options)) for each in checked]


def check_environment(each: CheckedEnvironment, options: EnvironmentCheckOptions, limits: ScoringLimits) -> EnvironmentReport:
    report = EnvironmentReport(each.name, type(each.environment).__name__, len(each.tasks), len(each.validation), 0)
    report.not_checked = dict.fromkeys(options.skip, "skipped")
    read = read_tasks(each.environment, each.tasks, spread(len(each.tasks), options.tasks), report)
    report.looked_at = len(read)
    if read:
        check_same(each.environment, each.tasks, each.rebuild or (lambda: each.tasks), read, report)
        compared = read_prompts(each.environment, each.tasks, report)
        check_splits(compared, read_prompts(each.environment, each.validation, report), report)
    if not each.validation:
        report.not_checked.setdefault("splits", "there are no validation tasks")
    if each.environment.episode_runner:
        report.leave_out(EPISODE_CHECKS, "an agent drives the episodes, and there is no model that could answer it")
    elif read:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asyncio.run(RewardChecker(each.environment, read, limits, report).check())
    report.findings = [finding for finding in report.findings if finding.check not in options.skip]
    return report


def _read_limits(config: CheckedConfig, options: EnvironmentCheckOptions) -> ScoringLimits:
    """Return what the configuration allows: turns, and characters of an answer."""
    section = config.eval if isinstance(config, EvalRunConfig) else config.rollout_training
    new_tokens = generation_section(config)[1].max_new_tokens or 1024
    return ScoringLimits(max_turns=section.max_rollout_turns or 1, longest=CHARACTERS_PER_TOKEN * new_tokens, bound=options.bound)
