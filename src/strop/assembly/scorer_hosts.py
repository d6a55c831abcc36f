"""Teachers in processes of their own, which take the groups of a batch in contiguous shares, all at once.

    driver                                                  each process, with the whole teacher
    HostedTeacher(column)  -- its groups, packed -->        TeacherHost.fill(column, batch) -> columns of these places

Groups stay with the driver: a teacher reads tokens. Scoring leaves nothing behind, so a process that dies is replaced at the next call
and asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.assembly.columns import Filled, GroupShare, group_share, joined
from strop.assembly.teachers import Student, load_teacher
from strop.cluster.base import Cluster, HostDied, HostOptions, Remote
from strop.config.schema import DistillationRunConfig
from strop.sampling import Sampling
from strop.training.base import ColumnSource
from strop.types import Batch, Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TeacherDescription:
    """What a teacher is made from, in whichever process. Pickles."""

    key: str  # such as teacher, or teachers.NAME
    config: DistillationRunConfig
    student: Student
    columns: frozenset[str]  # what it will be asked for
    sampling: Sampling  # the student's


class TeacherHost:
    """A whole teacher. Called by one thread, one call after another."""

    def __init__(self, description: TeacherDescription) -> None:
        """Raises ModelNotFound, ValueError for a teacher that does not read the student's tokens."""
        found = description
        fills = load_teacher(found.key, found.config, found.student, found.columns, found.sampling)
        self._sources = {column: fills(column) for column in found.columns}

    def fill(self, column: str, batch: Batch) -> dict[str, Tensor]:
        """[N] or [N, K] by name, on the CPU."""
        return dict(asyncio.run(_columns(self._sources[column], batch)))


async def _columns(source: ColumnSource, batch: Batch) -> Mapping[str, Tensor]:
    return await source.columns(batch, ())  # a teacher that is not the policy reads the batch alone


class TeacherProcess:
    """The place of one process: whoever lives in it answers."""

    def __init__(self, cluster: Cluster, options: HostOptions, description: TeacherDescription) -> None:
        self.options = options
        self.restarts = 0
        self._cluster = cluster
        self._description = description
        self._starting = asyncio.Lock()
        self._remote: Remote | None = None

    async def start(self) -> Remote:
        """Raises HostDied, and what ``TeacherHost`` raises."""
        async with self._starting:
            if self._remote is None:
                self._remote = await self._cluster.host(self.options, TeacherHost, self._description)
            return self._remote

    async def fill(self, column: str, batch: Batch) -> Mapping[str, Tensor]:
        """Asked once more where the process is gone. Raises HostDied where its replacement dies too."""
        remote = await self.start()
        try:
            return await self._ask(remote, column, batch)
        except HostDied as error:
            if self._remote is remote:  # the first of its callers to notice
                self._remote = None
                self.restarts += 1
                log.warning("%s; another process takes its place", error)
        return await self._ask(await self.start(), column, batch)

    async def _ask(self, remote: Remote, column: str, batch: Batch) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = await remote.call("fill", column, batch)
        return found


@dataclass(frozen=True)
class HostedTeacher:
    """A column that the processes of one teacher fill, each for its share of the groups."""

    column: str
    processes: Sequence[TeacherProcess]

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        """Raises HostDied."""
        count = len(self.processes)
        shares = [group_share(len(groups), place, count) for place in range(count)]
        asked = [
            asyncio.ensure_future(self._fill(process, share, batch))
            for process, share in zip(self.processes, shares, strict=True)
            if not share.empty
        ]
        try:
            return joined(await asyncio.gather(*asked), len(batch.target))
        finally:
            for one in asked:  # where one failed, the others would start processes anew on a cluster that ends
                one.cancel()

    async def _fill(self, process: TeacherProcess, share: GroupShare, batch: Batch) -> Filled:
        part = share.of(batch)
        return Filled(part.index, await process.fill(self.column, part.batch))


async def host_teachers(
    cluster: Cluster, descriptions: Collection[TeacherDescription], options: Mapping[str, Sequence[HostOptions]]
) -> dict[str, dict[str, ColumnSource]]:
    """Who fills each column, by the teacher's key; ``options`` are those of each process. All are loaded at once.

    Raises HostDied, and what ``TeacherHost`` raises."""
    places = {each.key: [TeacherProcess(cluster, one, each) for one in options[each.key]] for each in descriptions}
    await asyncio.gather(*(process.start() for processes in places.values() for process in processes))
    return {each.key: {column: HostedTeacher(column, places[each.key]) for column in each.columns} for each in descriptions}
