"""The data of a distillation run: rollouts of the student, and the columns that its teachers fill, here or in separate processes.

    driver                                                  each process, with the whole teacher
    RemoteTeacher(column)  -- its groups, packed -->        TeacherWorker.fill(column, batch) -> columns of these tokens

Only tokens are sent; the groups stay with the driver. Scoring has no state, so a process that dies is replaced and the call is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.distributed.actor_group import RestartableActor
from strop.distributed.base import ActorDied, ActorOptions, Cluster, spread_over_nodes
from strop.distributed.workers.learner_worker import ColumnShard, GroupRange, RankColumns, merge_columns, split_groups
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.extensions.distillation.teacher import MixedTeachers, RoutedTeachers
from strop.extensions.distillation.teacher_role_config import TeacherRoleConfig
from strop.extensions.distillation.teachers import (
    StudentInfo,
    describe_student,
    find_scorer,
    find_teacher_columns,
    load_rank_teachers,
    load_teacher,
    make_self_teacher,
)
from strop.learner.base import ColumnSource
from strop.learner.client import AsyncColumnSource, ColumnClient
from strop.learner.torch.scorer import NetworkScorer
from strop.runs.backend import Backend, LocalBackend
from strop.runs.cluster.ray_backend import RayBackend
from strop.runs.models import LoadedPolicy
from strop.runs.rollout_run import SampledSource
from strop.sampling import Sampling
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


@dataclass(kw_only=True)
class DistilledSource(SampledSource):
    """Groups of the student's rollouts."""

    config: DistillationRunConfig

    @classmethod
    def make_rank_columns(
        cls,
        config: DistillationRunConfig,
        policy: LoadedPolicy,
        algorithm: Algorithm,
        sampling: Sampling,
        device: str,
        world: int,
    ) -> Mapping[tuple[str, str], tuple[RankColumns, NetworkScorer]]:
        return load_rank_teachers(config, policy, algorithm, sampling, device, world)

    async def make_columns(self, backend: Backend) -> Mapping[str, AsyncColumnSource]:
        """Load the teachers. Raises ModelNotFound, ValueError."""
        config, columns = self.config, find_teacher_columns(self.config, self.algorithm)
        self.tracker.progress(f"loading the teachers: {', '.join(each.model_name for each in config.all_teachers.values())}")
        teachers: Mapping[str, Mapping[str, AsyncColumnSource]]
        if isinstance(backend, RayBackend):
            teachers = await spawn_ray_teachers(config, backend, columns)
        else:
            assert isinstance(backend, LocalBackend)
            teachers = load_local_teachers(config, backend, columns)
        return {column: combine_teachers({key: each[column] for key, each in teachers.items()}, config) for column in columns}


def load_local_teachers(
    config: DistillationRunConfig, backend: LocalBackend, columns: Collection[str]
) -> dict[str, dict[str, AsyncColumnSource]]:
    """Load the teachers in this process. Return their sources by teacher key and column."""
    policy, sampling = backend.policy, backend.sampling
    teachers = {
        key: make_self_teacher(teacher, config, policy, columns, sampling, backend.learners["policy"])
        if teacher.model_name == "self"
        else load_teacher(key, config, describe_student(policy), columns, sampling)
        for key, teacher in config.all_teachers.items()
    }
    backend.scoring += [find_scorer(source).network for sources in teachers.values() for source in sources.values()]
    return {
        key: {column: ColumnClient(backend.make_caller(source)) for column, source in sources.items()}
        for key, sources in teachers.items()
    }


async def spawn_ray_teachers(
    config: DistillationRunConfig, backend: RayBackend, columns: Collection[str]
) -> dict[str, Mapping[str, AsyncColumnSource]]:
    """Return the sources of the teachers, each on the ranks or in separate processes, by teacher key and column."""
    student = StudentInfo(backend.policy_info.vocab_size, backend.bundle.tokenizer)
    builds = {
        key: partial(load_teacher, key, config, student, columns, backend.sampling)
        for key, teacher in config.all_teachers.items()
        if teacher.hosts
    }
    remote = await spawn_teachers(backend.cluster, builds, columns, place_teachers(config, backend))
    return {
        key: remote.get(key) or {column: ColumnClient(backend.caller((key, column))) for column in columns}
        for key in config.all_teachers
    }


def place_teachers(config: DistillationRunConfig, backend: RayBackend) -> dict[str, list[ActorOptions]]:
    """Return the actor options of each process by teacher key."""
    role, threads = TeacherRoleConfig.of(config.cluster.roles), backend.thread_env(config.policy.num_threads)
    options: dict[str, list[ActorOptions]] = {}
    for key, teacher in config.all_teachers.items():
        on_cpu = backend.policy_info.on_cpu or teacher.device == "cpu"
        gpus = 0.0 if on_cpu else 1.0 if role.num_gpus is None else role.num_gpus
        names = [f"{key.replace('.', '-')}-{number}" for number in range(teacher.hosts)]
        first = sum(map(len, options.values()))
        options[key] = spread_over_nodes(names, backend.cluster.num_nodes, role, threads, num_gpus=gpus, first=first)
    return options


def combine_teachers(by_teacher: Mapping[str, AsyncColumnSource], config: DistillationRunConfig) -> AsyncColumnSource:
    """Combine the sources of teachers, by key, into one: route by environment, and mix teachers without environments."""
    sources = {key: (teacher, by_teacher[key]) for key, teacher in config.all_teachers.items()}
    routed = {name: source for teacher, source in sources.values() for name in teacher.environments or ()}
    general = [(teacher.weight, source) for teacher, source in sources.values() if teacher.environments is None]
    fallback: AsyncColumnSource | None = None
    if general:
        weights = [weight for weight, _ in general]
        fallback = general[0][1] if len(general) == 1 else MixedTeachers([source for _, source in general], weights)
    if not routed:
        assert fallback is not None
        return fallback
    return RoutedTeachers(routed, fallback)
