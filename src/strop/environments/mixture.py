"""Mix the tasks of several environments. The task at position i of the stream depends only on i (strop.data.task_order), or is
chosen by a TaskChooser, such as that of a curriculum (strop.data.task_order).

The number of streamed tasks is unknown. A mixture with streamed tasks ends when the first of them reaches the end of its last
epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, Protocol, cast

from strop.data.data_state import Resumable
from strop.data.sources.streamed import count_items, has_item, is_streamed
from strop.data.task_order import Interleaving, TaskChooser, TaskOrder
from strop.environments.base import EnvironmentConfigError, PromptedTask
from strop.environments.handle import EnvironmentHandle
from strop.types import Group, Messages, Task

log = logging.getLogger(__name__)

CHOOSER = "curriculum"  # its key in the state


class TaskSource(Protocol):
    """The source of a run's stream of tasks."""

    def __len__(self) -> int:
        """Return the number of tasks of one epoch."""
        ...

    def at(self, index: int) -> tuple[str, EnvironmentHandle[Any], Task]:
        """Return the environment's name, the environment and the task at ``index``. Raises IndexError after the last epoch."""
        ...


@dataclass(frozen=True)
class Component:
    name: str
    environment: EnvironmentHandle[Any]
    tasks: Sequence[Task]
    weight: float | None = None  # share of the stream; None for all components: proportional to their numbers of tasks
    set_name: str = ""  # of the data set


@dataclass(frozen=True)
class Mixture:
    """Interleave the components by weight. One epoch has as many tasks as all components together."""

    components: tuple[Component, ...]
    seed: int = 0
    shuffle: bool = True
    max_epochs: int | None = None  # None: no limit
    chooser: TaskChooser | None = field(default=None, compare=False)
    _reading: Lock = field(
        default_factory=Lock, init=False, repr=False, compare=False
    )  # data sets of users need not be thread-safe

    def __post_init__(self) -> None:
        weights = [component.weight for component in self.components]
        if not self.components:
            raise EnvironmentConfigError("there is no environment to take tasks from; name one in the data section (env_name)")
        for component in self.components:
            if count_items(component.tasks) == 0:
                raise EnvironmentConfigError(f"the environment {component.name} has no tasks")
        if None in weights and any(weight is not None for weight in weights):
            raise EnvironmentConfigError(f"some environments have a weight and some do not ({weights}); give each one or none")
        if any(weight is not None and not 0 < weight < float("inf") for weight in weights):
            raise EnvironmentConfigError(f"the weights of the environments are {weights}; each must be positive")

    def __len__(self) -> int:
        return sum(len(component.tasks) for component in self.components)

    @property
    def epoch_size(self) -> int | None:
        """The number of tasks of an epoch; None if some are streamed."""
        return self.interleaving.epoch_size

    @property
    def size(self) -> int | None:
        """The number of tasks of all epochs; None without a limit, or if some are streamed."""
        return self.interleaving.size

    def has(self, index: int) -> bool:
        """Return whether there is a task at ``index``."""
        if self.max_epochs is None or self.size is not None:
            return self.size is None or index < self.size
        component_index, task_index = self.interleaving.locate(index)
        return has_item(self.components[component_index].tasks, task_index, self.max_epochs)

    def at(self, index: int) -> tuple[str, EnvironmentHandle[Any], Task]:
        component_index, task_index = (self.chooser or self.interleaving).locate(index)
        component = self.components[component_index]
        with self._reading:
            return component.name, component.environment, component.tasks[task_index]

    def peek_messages(self, index: int) -> Messages | None:
        """Return the prompt of a task that the run has not reached yet, from any thread.

        None if that would change a state or might give another prompt (with a chooser or an environment's own code), or if
        there is no such task.
        """
        if self.chooser is not None or not self.has(index):
            return None
        component_index, task_index = self.interleaving.locate(index)
        component = self.components[component_index]
        if not component.environment.traits.prompts_are_of_rows:
            return None
        with self._reading:
            tasks = component.tasks
            task = tasks.peek(task_index) if is_streamed(tasks) else tasks[task_index]
        return task.messages if isinstance(task, PromptedTask) else None

    def name_set(self, index: int) -> str:
        """Return the name of the data set that the task at ``index`` comes from."""
        return self.components[self.interleaving.locate(index)[0]].set_name

    @property
    def resumable(self) -> bool:
        """Whether tasks depend on more than their position in the stream, so that a checkpoint must hold a state."""
        return self.chooser is not None or any(hasattr(component.tasks, "load_state") for component in self.components)

    def state(self) -> Mapping[str, Any]:
        """Return the states of the components that have one, by their number, and that of the chooser."""
        chooser = {} if self.chooser is None else {CHOOSER: self.chooser.state()}
        return {**{str(number): tasks.state() for number, tasks in self._resumable_tasks()}, **chooser}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for number, tasks in self._resumable_tasks():
            if str(number) in state:
                tasks.load_state(state[str(number)])
        if self.chooser is not None and CHOOSER in state:
            self.chooser.load_state(state[CHOOSER])
        elif self.chooser is not None:
            log.warning("the checkpoint has no state of a curriculum: it starts without results")

    def with_order(
        self, order: TaskOrder, rewards: Mapping[str, Collection[str]], *, slots: int, groups_per_step: int
    ) -> Mixture:
        """Return the mixture in another order (``TaskOrder.make_chooser``). Raises EnvironmentConfigError, DataError."""
        return replace(self, chooser=order.make_chooser(self, rewards, slots=slots, groups_per_step=groups_per_step))

    def observe(self, group: Group) -> None:
        """Report a group's outcome to the chooser of tasks."""
        if self.chooser is not None:
            self.chooser.observe(group)

    def _resumable_tasks(self) -> Iterator[tuple[int, Resumable]]:
        for number, component in enumerate(self.components):
            if hasattr(component.tasks, "load_state"):
                yield number, cast(Resumable, component.tasks)

    @cached_property
    def interleaving(self) -> Interleaving:
        """The usual order."""
        return Interleaving(
            sizes=tuple(count_items(component.tasks) for component in self.components),
            weights=tuple(component.weight for component in self.components),
            seed=self.seed,
            shuffle=self.shuffle,
            max_epochs=self.max_epochs,
        )
