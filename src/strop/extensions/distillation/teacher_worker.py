"""Teachers in separate processes. Each process scores a contiguous range of the groups of a batch, all at once.

    driver                                                  each process, with the whole teacher
    RemoteTeacher(column)  -- its groups, packed -->        TeacherWorker.fill(column, batch) -> columns of these tokens

Only tokens are sent; the groups stay with the driver. Scoring has no state, so a process that dies is replaced and the call is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorDied, ActorOptions, Cluster
from strop.distributed.workers.learner_worker import ColumnShard, GroupRange, merge_columns, split_groups
from strop.learner.base import ColumnSource
from strop.types import Batch, Group

BuildTeacher = Callable[[], Mapping[str, ColumnSource]]
"""Loads a teacher and returns its sources by column. Picklable."""


class TeacherWorker:
    """The actor that holds a whole teacher. Calls run one after another on one thread."""

    def __init__(self, build: BuildTeacher) -> None:
        """Raises what ``build`` raises."""
        self._sources = build()

    def fill(self, column: str, batch: Batch) -> dict[str, Tensor]:
        """Return columns by name, [N] or [N, K], on the CPU."""
        return dict(self._sources[column].columns(batch, ()))  # without groups: only a self-teacher reads them


@dataclass(frozen=True)
class RemoteTeacher:
    """A column filled by the processes of one teacher, each for its range of the groups."""

    column: str
    actors: Sequence[RestartableActor]

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Score the groups on all processes concurrently. Raises ActorDied."""
        count = len(self.actors)
        ranges = [split_groups(len(groups), number, count) for number in range(count)]
        tasks = [
            asyncio.ensure_future(self._fill(actor, group_range, batch))
            for actor, group_range in zip(self.actors, ranges, strict=True)
            if not group_range.is_empty
        ]
        try:
            return merge_columns(await asyncio.gather(*tasks), len(batch.target))
        finally:
            for task in tasks:  # if one fails, the others must not start new processes on a cluster that is closing
                task.cancel()

    async def _fill(self, actor: RestartableActor, group_range: GroupRange, batch: Batch) -> ColumnShard:
        """Score some groups. If the process has died, repeat the call once in a new one. Raises ActorDied if that dies too."""
        sub_batch = group_range.select(batch)
        try:
            columns = await actor.call("fill", self.column, sub_batch.batch)
        except ActorDied:
            columns = await actor.call("fill", self.column, sub_batch.batch)
        return ColumnShard(sub_batch.index, columns)


async def spawn_teachers(
    cluster: Cluster, builds: Mapping[str, BuildTeacher], columns: Collection[str], options: Mapping[str, Sequence[ActorOptions]]
) -> dict[str, dict[str, RemoteTeacher]]:
    """Start teachers concurrently. Return the sources of ``columns`` by teacher key and column. ``builds``: by teacher key. ``options``:
    of each process, by teacher key.

    Raises ActorDied, and what ``builds`` raise."""
    actors = {
        key: [RestartableActor(cluster, each, TeacherWorker, build) for each in options[key]] for key, build in builds.items()
    }
    await asyncio.gather(*(actor.start() for group in actors.values() for actor in group))
    return {key: {column: RemoteTeacher(column, group) for column in columns} for key, group in actors.items()}
