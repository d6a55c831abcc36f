"""The order of a run's training tasks, if it is not the shuffled one: a section of ``data`` that an extension attaches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from strop.base_config import BaseConfig, iter_sections

if TYPE_CHECKING:
    from strop.data.interleaving import Interleaving
    from strop.types import Group


class OrderedTasks(Protocol):
    """A mixture of tasks, as a chooser needs it (``strop.environments.mixture.Mixture``)."""

    @property
    def components(self) -> Sequence[Any]: ...

    @property
    def seed(self) -> int: ...

    @property
    def interleaving(self) -> Interleaving: ...


class TaskChooser(Protocol):
    """Chooses the task of each position of a mixture's stream."""

    def locate(self, position: int) -> tuple[int, int]:
        """Return (component, task) at a position. Raises IndexError outside the epochs."""
        ...

    def observe(self, group: Group) -> None:
        """Record the outcome of a group, and add metrics of the choice to its rollouts."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return the state to save in a checkpoint, as JSON values."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        ...


class TaskOrder(BaseConfig):
    """A section of ``data`` (``strop.sections``) that may replace the shuffled order of the training tasks."""

    @property
    def enabled(self) -> bool:
        return False

    def describe(self) -> str:
        """Describe how the tasks are drawn, for the start of a run."""
        return ""

    def make_chooser(
        self, mixture: OrderedTasks, rewards: Mapping[str, Collection[str]], *, slots: int, groups_per_step: int
    ) -> TaskChooser:
        """Make the chooser for a mixture. ``rewards``: the names of each environment's rewards, by alias; ``slots``: those of
        the stream. Raises EnvironmentConfigError, DataError.
        """
        raise NotImplementedError


def find_task_orders(data: BaseConfig) -> Iterator[TaskOrder]:
    """Yield the enabled orders in the section ``data``."""
    return (section for _, section in iter_sections(data) if isinstance(section, TaskOrder) and section.enabled)
