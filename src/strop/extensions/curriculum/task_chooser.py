"""The task of each position of the stream, chosen by curricula from results that are final.

    position i is chosen from the outcomes of positions <= i - slots, seen in the order of their positions

In a FIFO stream, at most ``slots`` - 1 groups are in flight when another one starts, so all these outcomes are known: the task at
each position depends on the seed and the results, never on when groups finish. In other orders an outcome may arrive later; the
next choice after that uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from random import Random
from typing import Any

from strop.data.sources.records import DataError
from strop.data.task_order import Interleaving, OrderedTasks
from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import EnvironmentHandle
from strop.extensions.curriculum.base import Choice, Curriculum, Draw, TaskOutcome
from strop.extensions.curriculum.curricula import make_curriculum
from strop.extensions.curriculum.curriculum_keys_config import CurriculumKeys
from strop.safety.exits import contain_exits
from strop.sampling import mix_seed
from strop.types import Group, Rollout
from strop.user_code import suggest_names

log = logging.getLogger(__name__)

KEPT = 4  # times ``slots``: how long choices are kept for restarts, and how long outcomes are awaited


@dataclass(frozen=True)
class ChosenTask:
    """The task of a position."""

    entry: int
    task: int
    metrics: Mapping[str, float]


class CurriculumChooser:
    """Chooses (entry, task) of each position: the entry by the interleaving, the task by the curriculum of the entry."""

    def __init__(
        self,
        name: str,
        curricula: Sequence[Curriculum],
        interleaving: Interleaving,
        *,
        seed: int,
        slots: int,
        groups_per_step: int,
        environments: Sequence[EnvironmentHandle[Any]] = (),
        scored_by: str | None = None,
    ) -> None:
        """``name`` is the curriculum's name in the configuration, ``slots`` are the slots of the stream, ``environments`` those of the
        entries, and ``scored_by`` is the reward that counts; None: the accuracy.
        """
        self.name = name
        self.scored_by, self._environments = scored_by, environments
        self._curricula, self._interleaving, self._seed = curricula, interleaving, seed
        self._slots, self._groups_per_step = slots, groups_per_step
        self._next: int | None = None  # the first position without a task; None: nothing was chosen yet
        self._placed: dict[int, ChosenTask] = {}  # of the newest positions
        self._open: dict[int, tuple[float, ...] | None] = {}  # scores that no curriculum has seen yet; None: still unknown

    def locate(self, position: int) -> tuple[int, int]:
        """Return (entry, task) at a position. Raises IndexError outside the epochs, and any error of a curriculum."""
        if position not in self._placed:
            follows = self._next is not None and self._next <= position < self._next + self._slots
            for each in range(self._next if follows and self._next is not None else position, position + 1):
                self._place(each)
        placed = self._placed[position]
        return placed.entry, placed.task

    def find(self, position: int) -> ChosenTask | None:
        """Return the task of a position; None if it has none, or was forgotten."""
        return self._placed.get(position)

    def observe(self, group: Group) -> None:
        """Record a group's outcome, and add the metrics of the choice to the rollouts' metrics."""
        placed = self.find(group.index)
        if placed is None:
            return
        counting = [rollout for rollout in group.rollouts if rollout.counts]
        for rollout in group.rollouts:
            rollout.metrics.update({f"curriculum/{name}": value for name, value in placed.metrics.items()})
        self.record(group.index, self._score(self._environments[placed.entry], counting))

    def _score(self, environment: EnvironmentHandle[Any], rollouts: Sequence[Rollout]) -> list[float]:
        """Return the score of each rollout; empty if the environment cannot score them."""
        try:
            with contain_exits():
                if self.scored_by is None:
                    return [0.0 if rollout.error else float(environment.accuracy(rollout)) for rollout in rollouts]
        except Exception as error:  # a user's environment may override it
            log.warning("the curriculum has no result of a group: %s.accuracy raised %r", environment.traits.title, error)
            return []
        return [
            rollout.rewards.get(self.scored_by, 0.0) for rollout in rollouts if rollout.error or self.scored_by in rollout.rewards
        ]

    def record(self, position: int, scores: Sequence[float]) -> None:
        """Record the scores of the group at a position, from its rollouts without errors."""
        if position in self._open:  # not for a group restarted after its outcome was seen
            self._open[position] = tuple(scores)

    def _place(self, position: int) -> None:
        entry, usual = self._interleaving.locate(position)
        self._observe(position - self._slots)
        draw = Draw(
            position=position,
            step=self._step(position),
            usual=usual,
            in_flight=frozenset(self._placed[each].task for each in self._open if self._placed[each].entry == entry),
            random=Random(mix_seed(self._seed, entry, position)),
        )
        choice = self._curricula[entry].choose(draw)
        size = self._interleaving.sizes[entry] or 0  # a stream has no curriculum
        if not isinstance(choice, Choice) or not isinstance(choice.task, Integral) or not 0 <= choice.task < size:
            raise DataError(
                f"the curriculum {self.name} chose {choice!r:.80}; return Choice(task) with a task from 0 to {size - 1}"
            )
        self._placed[position], self._open[position] = ChosenTask(entry, int(choice.task), dict(choice.metrics)), None
        self._next = max(position + 1, self._next or 0)
        for each in [each for each in self._placed if each < self._next - KEPT * self._slots]:
            self._forget(each)

    def _observe(self, last: int) -> None:
        """Pass the outcomes of positions up to ``last`` to the curricula."""
        for position in sorted(self._open):
            scores = self._open[position]
            if position <= last and scores is not None:
                self._show(position, scores)

    def _show(self, position: int, scores: tuple[float, ...]) -> None:
        placed = self._placed[position]
        del self._open[position]
        outcome = TaskOutcome(task=placed.task, position=position, step=self._step(position), scores=scores)
        self._curricula[placed.entry].observe(outcome)

    def _forget(self, position: int) -> None:
        """Forget a position; if its outcome is still unknown, it counts as failed."""
        if position in self._open:
            self._show(position, self._open[position] or ())
        del self._placed[position]

    def _step(self, position: int) -> int:
        return position // self._groups_per_step

    def state(self) -> Mapping[str, Any]:
        """Return the state as JSON values."""
        return {
            "name": self.name,
            "sizes": list(self._interleaving.sizes),
            "next": self._next,
            "placed": [[position, each.entry, each.task, dict(each.metrics)] for position, each in self._placed.items()],
            "open": [[position, None if scores is None else list(scores)] for position, scores in self._open.items()],
            "entries": [dict(curriculum.state()) for curriculum in self._curricula],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. The state of another curriculum is ignored with a warning. Raises DataError for the state of
        other data.
        """
        if state["name"] != self.name:
            log.warning(
                "data.curriculum.name is %s, and the checkpoint has the state of %s: the curriculum starts without results",
                self.name,
                state["name"],
            )
            return
        if state["sizes"] != list(self._interleaving.sizes):
            raise DataError(
                f"the curriculum of the checkpoint is over entries of {state['sizes']} tasks, and data.train has "
                f"{list(self._interleaving.sizes)}; continue with the data of that run, or start over with checkpointing.resume=never"
            )
        self._next = state["next"]
        self._placed = {position: ChosenTask(entry, task, metrics) for position, entry, task, metrics in state["placed"]}
        self._open = {position: None if scores is None else tuple(scores) for position, scores in state["open"]}
        for curriculum, saved in zip(self._curricula, state["entries"], strict=True):
            curriculum.load_state(saved)


def make_chooser(
    config: CurriculumKeys, mixture: OrderedTasks, rewards: Mapping[str, Collection[str]], *, slots: int, groups_per_step: int
) -> CurriculumChooser:
    """Make a curriculum for each component of a mixture. Raises EnvironmentConfigError, DataError."""
    for alias, names in rewards.items():
        if config.reward is not None and config.reward not in names:
            raise EnvironmentConfigError(
                f"data.curriculum.reward is {config.reward!r}, and env.{alias} has no such reward{suggest_names(config.reward, names)}"
            )
    return CurriculumChooser(
        config.name,
        [make_curriculum(config, each.tasks, each.name, mixture.seed) for each in mixture.components],
        mixture.interleaving,
        seed=mixture.seed,
        slots=slots,
        groups_per_step=groups_per_step,
        environments=[each.environment for each in mixture.components],
        scored_by=config.reward,
    )
