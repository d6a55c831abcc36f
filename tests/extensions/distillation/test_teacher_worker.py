"""Teachers in processes of their own, on a cluster whose processes are objects of this one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.config import load_config
from strop.distributed.base import ActorDied, ActorOptions, spread_over_nodes
from strop.distributed.cluster_config import RoleConfig
from strop.extensions.distillation.distillation import TEACHER_LOGPROBS, Distillation, TopKDistillation
from strop.extensions.distillation.distillation_config import DistillationRunConfig
from strop.extensions.distillation.distilled_source import TeacherWorker, combine_teachers, load_local_teachers, spawn_teachers
from strop.extensions.distillation.teachers import describe_student, find_teacher_columns, load_teacher
from strop.learner.base import require_token_outputs
from strop.learner.client import AsyncColumnSource
from strop.learner.torch.scorer import NetworkScorer
from strop.problems import ConfigError
from strop.runs.backend import LocalBackend
from strop.runs.models import LoadedPolicy, load_policy
from strop.sampling import Sampling
from strop.types import Group
from support.rollouts import pack_for, simple_groups

SAMPLING = Sampling(temperature=0.7)
RAY = "cluster.backend=ray"


class FakeRemote:
    """An object of this process that can be taken away."""

    def __init__(self, name: str, made: Any) -> None:
        self.name = name
        self.made = made
        self.calls: list[int] = []  # groups in each
        self.dead = False

    def call(self, method: str, *arguments: Any, urgent: bool = False, **named: Any) -> Awaitable[Any]:
        return self._answer(method, *arguments)

    async def _answer(self, method: str, column: str, batch: Any) -> Any:
        if self.dead:
            raise ActorDied(f"{self.name} is gone")
        self.calls.append(len(batch.group.unique()))
        return await asyncio.to_thread(getattr(self.made, method), column, batch)  # as in a process: no loop runs there


class FakeCluster:
    """Makes objects here. ``stillborn``: how many of those made from now on are dead."""

    num_nodes = 2

    def __init__(self) -> None:
        self.remotes: list[FakeRemote] = []
        self.options: list[ActorOptions] = []
        self.stillborn = 0

    async def spawn(self, options: ActorOptions, make: Callable[..., Any], *arguments: Any) -> FakeRemote:
        remote = FakeRemote(options.name, make(*arguments))
        remote.dead, self.stillborn = self.stillborn > 0, max(0, self.stillborn - 1)
        self.remotes.append(remote)
        self.options.append(options)
        return remote


def config_of(model: Path, *overrides: str, name: str = "distillation") -> DistillationRunConfig:
    base = [f"policy.model_name={model}", "policy.precision=float32", "policy.device=cpu", "distillation.val_period=0"]
    base += ["data.train.env_name=arithmetic", "env.arithmetic={}", f"teacher.model_name={model}", f"algorithm.name={name}"]
    found = load_config(None, [*base, "distillation.topk_logits_k=5", *overrides], root=DistillationRunConfig).config
    assert isinstance(found, DistillationRunConfig)
    return found


@pytest.fixture(scope="module")
def policy(tiny_model_folder: Path) -> LoadedPolicy:
    return load_policy(config_of(tiny_model_folder).policy)


def groups_of_size(count: int) -> list[Group]:
    return simple_groups(*((3 + place, (4, 2 + place)) for place in range(count)))


def algorithm_of(config: DistillationRunConfig) -> Algorithm:
    return Distillation() if config.algorithm.name == "distillation" else TopKDistillation()


def filled_here(config: DistillationRunConfig, policy: LoadedPolicy, groups: list[Group]) -> Mapping[str, Tensor]:
    algorithm = algorithm_of(config)
    backend = LocalBackend(config, policy)
    asyncio.run(backend.build_learners(algorithm, SAMPLING, None))
    (column,) = wanted = find_teacher_columns(config, algorithm)
    teachers = load_local_teachers(config, backend, wanted)
    source = combine_teachers({key: sources[column] for key, sources in teachers.items()}, config)
    return asyncio.run(source.columns(pack_for(groups, algorithm), groups))


async def hosted(config: DistillationRunConfig, policy: LoadedPolicy, cluster: Any) -> AsyncColumnSource:
    wanted = find_teacher_columns(config, algorithm_of(config))
    builds = {key: partial(load_teacher, key, config, describe_student(policy), wanted, SAMPLING) for key in config.all_teachers}
    options = {
        key: [ActorOptions(name=f"{key}-{number}") for number in range(teacher.hosts)]
        for key, teacher in config.all_teachers.items()
    }
    (column,) = wanted
    made = await spawn_teachers(cluster, builds, wanted, options)
    return combine_teachers({key: sources[column] for key, sources in made.items()}, config)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)


@pytest.mark.parametrize("name", ["distillation", "topk_distillation"])
@pytest.mark.parametrize(("hosts", "groups", "calls"), [(1, 3, [[3]]), (2, 3, [[1], [2]]), (3, 2, [[], [1], [1]])])
def test_processes_fill_what_one_process_fills_each_for_its_share(
    name: str, hosts: int, groups: int, calls: list[list[int]], tiny_model_folder: Path, policy: LoadedPolicy
) -> None:
    config, cluster = config_of(tiny_model_folder, RAY, f"teacher.hosts={hosts}", name=name), FakeCluster()
    some = groups_of_size(groups)

    async def run() -> Mapping[str, Tensor]:
        source = await hosted(config, policy, cluster)
        return await source.columns(pack_for(some, algorithm_of(config)), some)

    assert same(asyncio.run(run()), filled_here(config, policy, some))
    assert [remote.calls for remote in cluster.remotes] == calls


def test_several_hosted_teachers_are_mixed_as_in_one_process(tiny_model_folder: Path, policy: LoadedPolicy) -> None:
    more = [f"teachers.second.model_name={tiny_model_folder}", "teachers.second.hosts=2", "teachers.second.weight=3"]
    config, cluster = config_of(tiny_model_folder, RAY, "teacher.hosts=1", *more), FakeCluster()
    some = groups_of_size(3)

    async def run() -> Mapping[str, Tensor]:
        source = await hosted(config, policy, cluster)
        return await source.columns(pack_for(some, Distillation()), some)

    assert same(asyncio.run(run()), filled_here(config, policy, some))
    assert sorted(remote.name for remote in cluster.remotes) == ["teacher-0", "teachers.second-0", "teachers.second-1"]


@pytest.mark.parametrize("stillborn", [0, 1])
def test_a_process_that_died_is_replaced_and_asked_again_once(
    stillborn: int, tiny_model_folder: Path, policy: LoadedPolicy
) -> None:
    config, cluster = config_of(tiny_model_folder, RAY, "teacher.hosts=2"), FakeCluster()
    some = groups_of_size(4)

    async def run() -> Mapping[str, Tensor]:
        source = await hosted(config, policy, cluster)
        cluster.remotes[1].dead = True
        cluster.stillborn = stillborn
        return await source.columns(pack_for(some, Distillation()), some)

    if stillborn:
        with pytest.raises(ActorDied, match="teacher-1 is gone"):
            asyncio.run(run())
        return
    assert same(asyncio.run(run()), filled_here(config, policy, some))
    assert [(remote.name, remote.calls) for remote in cluster.remotes] == [
        ("teacher-0", [2]),
        ("teacher-1", []),
        ("teacher-1", [2]),
    ]


def test_a_hosted_teacher_with_other_tokens_is_refused_when_it_is_made(
    tiny_model_folder: Path, policy: LoadedPolicy, tmp_path: Path
) -> None:
    from loop.tiny import build_tiny

    config = config_of(tiny_model_folder, RAY, "teacher.hosts=1", f"teacher.model_name={build_tiny(tmp_path / 'other')}")
    with pytest.raises(ValueError, match="choose a teacher of the student's family"):
        asyncio.run(hosted(config, policy, FakeCluster()))


def test_a_host_answers_with_the_columns_it_was_made_for(tiny_model_folder: Path, policy: LoadedPolicy) -> None:
    config = config_of(tiny_model_folder, RAY, "teacher.hosts=1")
    columns = frozenset({TEACHER_LOGPROBS})
    host = TeacherWorker(partial(load_teacher, "teacher", config, describe_student(policy), columns, SAMPLING))
    batch = pack_for(groups_of_size(2), Distillation())
    found = host.fill(TEACHER_LOGPROBS, batch)
    assert set(found) == {TEACHER_LOGPROBS} and found[TEACHER_LOGPROBS].shape == batch.target.shape


# --- what is asked for -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.hosts=1"], "teacher.hosts: found 1, but teacher processes are Ray actors.*cluster.backend=ray"),
        (["teachers.second.model_name=x", "teachers.second.hosts=2"], "teachers.second.hosts: found 2"),
        ([RAY, "teacher.hosts=1", "teacher.model_name=self", "teacher.demonstration=x"], "teacher.hosts: .*model_name is self"),
        ([RAY, "cluster.roles.learner.num_gpus=1"], "cluster.roles.learner.num_gpus: found 1"),
    ],
)
def test_hosts_that_cannot_be_are_refused(overrides: list[str], message: str, tiny_model_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tiny_model_folder, *overrides)
    assert re.search(message, str(caught.value).replace("\n", " ")), str(caught.value)


def test_processes_take_turns_on_the_nodes_and_those_with_gpus_are_on_whichever_node_has_them() -> None:
    def nodes(gpus: float, first: int = 0) -> list[int | None]:
        names = [f"teacher-{number}" for number in range(3)]
        options = spread_over_nodes(names, 2, RoleConfig(num_cpus=2), {}, num_gpus=gpus, first=first)
        assert all(each.role.num_cpus == 2 and each.num_gpus == gpus for each in options)
        return [each.node for each in options]

    assert nodes(0.0) == [0, 1, 0] and nodes(0.0, first=3) == [1, 0, 1]
    assert nodes(0.5) == [None, None, None]


def test_a_teacher_that_is_the_model_itself_says_what_the_policy_says(policy: LoadedPolicy, tiny_model_folder: Path) -> None:
    config, groups = config_of(tiny_model_folder), simple_groups((3, (4, 2)), (5, (3, 3)))
    own = NetworkScorer(policy.network, SAMPLING, 512).score(pack_for(groups, Distillation()))
    filled = filled_here(config, policy, groups)[TEACHER_LOGPROBS]
    assert torch.allclose(filled, require_token_outputs(own).logprobs, atol=1e-5)
