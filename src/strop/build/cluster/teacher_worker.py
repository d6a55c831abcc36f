"""Teachers in separate processes. Each process scores a contiguous range of the groups of a batch, all at once.

    driver                                                  each process, with the whole teacher
    RemoteTeacher(column)  -- its groups, packed -->        TeacherWorker.fill(column, batch) -> columns of these tokens

Only tokens are sent; the groups stay with the driver. Scoring has no state, so a process that dies is replaced and the call is repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.build.cluster.column_shards import ColumnShard, GroupRange, merge_columns, split_groups
from strop.build.teachers import StudentInfo, load_teacher
from strop.config.schema.run_config import DistillationRunConfig
from strop.distributed.base import ActorDied, ActorOptions, Cluster, RemoteActor
from strop.learner.base import ColumnSource
from strop.sampling import Sampling
from strop.types import Batch, Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TeacherSpec:
    """What a process needs to build a teacher. Picklable."""

    key: str  # such as teacher, or teachers.NAME
    config: DistillationRunConfig
    student: StudentInfo
    columns: frozenset[str]  # that it fills
    sampling: Sampling  # the student's


class TeacherWorker:
    """The actor that holds a whole teacher. Calls run one after another on one thread."""

    def __init__(self, spec: TeacherSpec) -> None:
        """Raises ModelNotFound, and ValueError if the teacher's vocabulary is not the student's."""
        make_source = load_teacher(spec.key, spec.config, spec.student, spec.columns, spec.sampling)
        self._sources = {column: make_source(column) for column in spec.columns}

    def fill(self, column: str, batch: Batch) -> dict[str, Tensor]:
        """Return columns by name, [N] or [N, K], on the CPU."""
        return dict(asyncio.run(self._sources[column].columns(batch, ())))  # without groups: only a self-teacher reads them


class TeacherProcess:
    """One teacher process, replaced by a new one when it dies."""

    def __init__(self, cluster: Cluster, options: ActorOptions, spec: TeacherSpec) -> None:
        self.options = options
        self.restarts = 0
        self._cluster = cluster
        self._spec = spec
        self._starting = asyncio.Lock()
        self._remote: RemoteActor | None = None

    async def start(self) -> RemoteActor:
        """Start the process if it does not run. Raises ActorDied, and what ``TeacherWorker`` raises."""
        async with self._starting:
            if self._remote is None:
                self._remote = await self._cluster.spawn(self.options, TeacherWorker, self._spec)
            return self._remote

    async def fill(self, column: str, batch: Batch) -> Mapping[str, Tensor]:
        """Fill a column. If the process has died, repeat the call once in a new one. Raises ActorDied if that dies too."""
        remote = await self.start()
        try:
            return await self._call_fill(remote, column, batch)
        except ActorDied as error:
            if self._remote is remote:  # this caller is the first to notice
                self._remote = None
                self.restarts += 1
                log.warning("%s; another process takes its place", error)
        return await self._call_fill(await self.start(), column, batch)

    async def _call_fill(self, remote: RemoteActor, column: str, batch: Batch) -> Mapping[str, Tensor]:
        columns: Mapping[str, Tensor] = await remote.call("fill", column, batch)
        return columns


@dataclass(frozen=True)
class RemoteTeacher:
    """A column filled by the processes of one teacher, each for its range of the groups."""

    column: str
    processes: Sequence[TeacherProcess]

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Score the groups on all processes concurrently. Raises ActorDied."""
        count = len(self.processes)
        ranges = [split_groups(len(groups), number, count) for number in range(count)]
        tasks = [
            asyncio.ensure_future(self._fill(process, group_range, batch))
            for process, group_range in zip(self.processes, ranges, strict=True)
            if not group_range.is_empty
        ]
        try:
            return merge_columns(await asyncio.gather(*tasks), len(batch.target))
        finally:
            for task in tasks:  # if one fails, the others must not start new processes on a cluster that is closing
                task.cancel()

    async def _fill(self, process: TeacherProcess, group_range: GroupRange, batch: Batch) -> ColumnShard:
        sub_batch = group_range.select(batch)
        return ColumnShard(sub_batch.index, await process.fill(self.column, sub_batch.batch))


async def spawn_teachers(
    cluster: Cluster, specs: Collection[TeacherSpec], options: Mapping[str, Sequence[ActorOptions]]
) -> dict[str, dict[str, ColumnSource]]:
    """Start teachers concurrently. Return their column sources by teacher key and column. ``options``: of each process, by teacher key.

    Raises ActorDied, and what ``TeacherWorker`` raises."""
    processes = {spec.key: [TeacherProcess(cluster, each, spec) for each in options[spec.key]] for spec in specs}
    await asyncio.gather(*(process.start() for group in processes.values() for process in group))
    return {spec.key: {column: RemoteTeacher(column, processes[spec.key]) for column in spec.columns} for spec in specs}
