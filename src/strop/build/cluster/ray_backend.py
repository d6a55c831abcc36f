"""The driver's side of a run on a Ray cluster: learners, scorers and engines whose models are in other processes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.build.cluster.device_plan import make_device_plan
from strop.build.cluster.worker_builders import (
    build_rank_models,
    build_torch_engine,
    build_vllm_engine,
    load_rank_policy,
    make_rank_exporter,
)
from strop.build.engines import (
    GeneratorSpec,
    SyncedGenerator,
    make_pooled_generator,
    make_vllm_options,
    write_model_folder,
)
from strop.build.models import PRECISIONS, TokenizerBundle
from strop.build.tasks import describe_environments
from strop.build.teachers import StudentInfo, load_teacher, named_teachers
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig
from strop.distributed.actor_group import ActorGroup
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.distributed.cluster_config import RoleConfig
from strop.distributed.placement import DevicePlan, DeviceSlot
from strop.distributed.restartable_actor import RestartableActor
from strop.distributed.workers.environment_process import spawn_environments
from strop.distributed.workers.learner_worker import LearnerWorker, PolicyInfo
from strop.distributed.workers.remote_engine import RemoteEngine
from strop.distributed.workers.remote_learner import RankCaller, RemoteExporter, RemoteLearner
from strop.distributed.workers.teacher_worker import spawn_teachers
from strop.environments.remote import RemoteEnvironment
from strop.learner.client import (
    AsyncColumnSource,
    ColumnClient,
    LearnerClient,
    ScorerClient,
)
from strop.models.chat_template import ChatTemplate
from strop.models.loading import load_tokenizer
from strop.monitoring.trackers.base import Tracker
from strop.sampling import Sampling

COLLECTIVE_TIMEOUT = 1800.0  # seconds that a rank waits in a collective; the death of a rank is detected immediately


class RayBackend:
    """Builds models in the processes of a Ray cluster."""

    def __init__(
        self,
        config: TrainingRunConfig,
        cluster: Cluster,
        device_plan: DevicePlan,
        group: ActorGroup,
        policy_info: PolicyInfo,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.device_plan = device_plan
        self.group = group
        self.policy_info = policy_info
        self.packed = policy_info.packed
        tokenizer_config = config.policy.tokenizer
        tokenizer = load_tokenizer(tokenizer_config.name, chat_template=tokenizer_config.chat_template)
        self.bundle = TokenizerBundle(
            tokenizer, ChatTemplate(tokenizer, options=tokenizer_config.chat_template_kwargs), policy_info.stop_ids
        )

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, LearnerClient]:
        self._sampling = sampling
        build = partial(build_rank_models, self.config, algorithm, sampling, total_steps)
        names = (await self.group.call_all("build_models", build))[0]
        return {name: RemoteLearner(self._caller(name)) for name in names}

    def make_reference(self) -> ScorerClient:
        return ScorerClient(self._caller("reference"))

    def make_untrained_policy(self) -> tuple[ScorerClient, str]:
        return ScorerClient(self._caller("untrained")), self.policy_info.fingerprint

    async def make_teachers(
        self, config: DistillationRunConfig, columns: Collection[str]
    ) -> dict[str, Mapping[str, AsyncColumnSource]]:
        """Return the sources of the teachers, each on the ranks or in separate processes."""
        student = StudentInfo(self.policy_info.vocab_size, self.bundle.tokenizer)
        teachers = named_teachers(config)
        builds = {
            key: partial(load_teacher, key, config, student, columns, self._sampling)
            for key, teacher in teachers.items()
            if teacher.hosts
        }
        remote_teachers = await spawn_teachers(self.cluster, builds, columns, self._teacher_options(config))
        return {
            key: remote_teachers.get(key) or {column: ColumnClient(self._caller((key, column))) for column in columns}
            for key in teachers
        }

    def _teacher_options(self, config: DistillationRunConfig) -> dict[str, list[ActorOptions]]:
        """Return the actor options of each process by teacher key. Processes are spread over the nodes; one with a GPU goes to any node
        that has a GPU besides those of the run."""
        role, threads = config.cluster.roles.teacher, self._thread_env(config.policy.num_threads)
        options: dict[str, list[ActorOptions]] = {}
        counter = itertools.count()
        for key, teacher in named_teachers(config).items():
            gpus = 0.0 if self.policy_info.on_cpu or teacher.device == "cpu" else 1.0 if role.num_gpus is None else role.num_gpus
            names = [f"{key.replace('.', '-')}-{number}" for number in range(teacher.hosts)]
            options[key] = [
                make_actor_options(name, DeviceSlot(next(counter) % self.cluster.num_nodes, ()), role, threads, gpus=gpus)
                for name in names
            ]
        return options

    def _caller(self, name: str | tuple[str, str]) -> RankCaller:
        return RankCaller(name, self.group, self.cluster)

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        assert isinstance(self.config, RolloutRunConfig)
        options, slots = self.config.policy.generation, self.device_plan.generation
        uses_vllm = options.backend == "vllm"
        adapters = uses_vllm and options.weight_sync.adapters_alone and self.config.policy.dtensor_cfg.lora_cfg.enabled
        folder = (spec.output_folder / "model").resolve()
        await self.group.call_one(0, "call_with_policy", partial(write_model_folder, folder=folder))
        make_exporter = partial(
            make_rank_exporter,
            self.config.policy,
            dtype=PRECISIONS[get_engine_precision(self.config)],
            keep_snapshot=spec.max_staleness > 0,
            adapters=adapters,
            same_machine=all(slot.node == self.device_plan.training[0].node for slot in slots),
            folder=(spec.output_folder / "weights").resolve(),
            host=self.group.actors[0].address,
        )
        await self.group.call_all("open_export", make_exporter)
        make = self._make_vllm_engine if uses_vllm else self._make_torch_engine
        engines = [make(number, slot, folder, spec.output_folder.resolve(), adapters) for number, slot in enumerate(slots)]
        return make_pooled_generator(
            engines,
            RemoteExporter(self.group),
            self.bundle,
            options,
            spec,
            precision=options.vllm_cfg.precision if uses_vllm else self.config.policy.precision,
            length=options.vllm_cfg.max_model_len if uses_vllm else self.config.policy.max_total_sequence_length,
            adapters=adapters,
            allow_shrink=self.config.cluster.shrink_on_lost_node,
        )

    def _make_vllm_engine(self, number: int, slot: DeviceSlot, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        config = self.config.policy
        options = make_vllm_options(
            str(folder),
            config.generation,
            on_cpu=self.policy_info.on_cpu,
            max_lora_rank=config.dtensor_cfg.lora_cfg.dim if adapters else None,
            load_weights=False,
            output=outputs / f"engine_{number}.log",
            environment={
                **self._thread_env(config.generation.vllm_cfg.num_threads, generates=True),
                **config.generation.vllm_cfg.env_vars,
            },
        )
        arguments = (f"engine {number}", options, self.bundle.tokenizer, self.bundle.stop_ids)
        size = config.generation.vllm_cfg.tensor_parallel_size * config.generation.vllm_cfg.pipeline_parallel_size
        return self._make_engine(number, slot, size, build_vllm_engine, arguments)

    def _make_torch_engine(self, number: int, slot: DeviceSlot, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        arguments = (f"engine {number}", self.config.policy, folder, self.bundle.tokenizer, self.bundle.stop_ids, self.packed)
        return self._make_engine(number, slot, 1, build_torch_engine, arguments)

    def _make_engine(
        self, number: int, slot: DeviceSlot, receivers: int, make: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> RemoteEngine:
        threads = self._thread_env(self.config.policy.num_threads, generates=True)
        options = make_actor_options(f"engine-{number}", slot, self.config.cluster.roles.generator, threads, kind="async")
        return RemoteEngine(f"engine {number}", receivers, RestartableActor(self.cluster, options, make, *arguments))

    def _thread_env(self, threads: int | None, *, generates: bool = False) -> dict[str, str]:
        time_shared = is_time_shared(self.config, self.device_plan)
        return make_thread_env(threads, self.policy_info.on_cpu, self.device_plan, generates=generates, time_shared=time_shared)


def make_actor_options(
    name: str, slot: DeviceSlot, role: RoleConfig, threads: Mapping[str, str], *, gpus: float = 0.0, **changes: Any
) -> ActorOptions:
    """Make the options of an actor. ``gpus``: GPUs besides those of the run; Ray then chooses the node."""
    return ActorOptions(
        name=name,
        node=None if gpus else slot.node,
        devices=slot.devices,
        num_cpus=role.num_cpus,
        num_gpus=gpus,
        resources=role.resources,
        environment={**threads, **role.env_vars},
        packages=role.pip,
        python=role.python,
        **changes,
    )


def make_thread_env(
    threads: int | None, on_cpu: bool, plan: DevicePlan, *, generates: bool = False, time_shared: bool = False
) -> dict[str, str]:
    """Return the environment variables that set the CPU threads of a process: ``threads``, or on CPU an equal share of the cores.

    Assumes that every machine has as many cores as this one. ``time_shared``: ranks and engines never compute at the same time, so the
    processes of each kind share all cores."""
    if threads is None and not on_cpu:
        return {}
    same_role = plan.generation if generates else plan.training
    concurrent = same_role if time_shared else (*plan.training, *plan.generation)
    per_node = max(1, sum(slot.node == same_role[0].node for slot in concurrent))
    return {"OMP_NUM_THREADS": str(threads or max(1, (os.cpu_count() or 1) // per_node))}


def get_engine_precision(config: TrainingRunConfig) -> str:
    """Return the precision of an engine's weights: vLLM's own setting, or for the torch engine the learner's."""
    generation = config.policy.generation
    return generation.vllm_cfg.precision if generation.backend == "vllm" else config.policy.weights_dtype


def is_time_shared(config: TrainingRunConfig, plan: DevicePlan) -> bool:
    """Return whether learner and engines take turns on the same devices."""
    return plan.colocated and isinstance(config, RolloutRunConfig) and config.rollout_training.max_staleness == 0


async def make_ray_backend(config: TrainingRunConfig, cluster: Cluster, tracker: Tracker) -> RayBackend:
    """Start the ranks and load the policy on them. Raises ModelNotFound, ValueError, ActorGroupDied."""
    device_plan = make_device_plan(config, on_cpu=cluster.on_cpu)
    on_cpu = cluster.on_cpu
    role, world, device = config.cluster.roles.learner, len(device_plan.training), config.policy.device
    threads = make_thread_env(config.policy.num_threads, on_cpu, device_plan, time_shared=is_time_shared(config, device_plan))
    actors = await asyncio.gather(
        *(
            cluster.spawn(make_actor_options(f"learner-{rank}", slot, role, threads), LearnerWorker, device, rank, world)
            for rank, slot in enumerate(device_plan.training)
        )
    )
    group = ActorGroup("learner", actors)
    address = actors[0].address
    port = await group.call_one(0, "open_store", address)
    await group.call_all("init_process_group", address, port, COLLECTIVE_TIMEOUT)
    policy_info = (await group.call_all("load_policy", partial(load_rank_policy, config)))[0]
    tracker.note(f"learner: ranks 0 to {world - 1} are the processes {_format_pids(actors)}")
    if policy_info.fallback is not None:
        tracker.note(f"warning: the policy reads padded rows: {policy_info.fallback}")
    return RayBackend(config, cluster, device_plan, group, policy_info)


def make_remote_environments(config: RolloutRunConfig, cluster: Cluster) -> dict[str, RemoteEnvironment]:
    """Start the environments in separate processes, spread over the nodes. Return them by alias; empty if
    ``cluster.environment_hosts`` is 0."""
    count, role = config.cluster.environment_hosts, config.cluster.roles.environment
    if not count:
        return {}
    descriptions = describe_environments(config)
    threads = {"OMP_NUM_THREADS": "1"}
    gpus = 0.0 if cluster.on_cpu else role.num_gpus or 0.0
    options = {
        alias: tuple(
            make_actor_options(
                f"environment-{alias}-{number}",
                DeviceSlot(number % cluster.num_nodes, ()),
                role,
                threads,
                gpus=gpus,
                kind="async",
            )
            for number in range(count)
        )
        for alias in descriptions
    }
    return spawn_environments(cluster, descriptions, options)


def _format_pids(actors: Sequence[RemoteActor]) -> str:
    return ", ".join(str(actor.pid) for actor in actors[:8]) + (", ..." if len(actors) > 8 else "")
