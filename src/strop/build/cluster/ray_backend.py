"""The driver's side of a run on a Ray cluster: learners, scorers and engines whose models are in other processes."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.algorithms.base import Algorithm, LossFn, Outputs
from strop.algorithms.critic.gae import VALUES
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.build.cluster.column_shards import ColumnShard, merge_columns
from strop.build.cluster.device_plan import make_device_plan
from strop.build.cluster.learner_worker import ExportOptions, LearnerWorker, PolicyInfo, get_engine_precision
from strop.build.cluster.teacher_worker import TeacherSpec, spawn_teachers
from strop.build.engines import GeneratorSpec, SyncedGenerator, make_pooled_generator, make_vllm_options
from strop.build.models import PRECISIONS, LoadedPolicy, TokenizerBundle, make_torch_engine
from strop.build.scorers import check_columns, make_stored_reference
from strop.build.tasks import describe_environments
from strop.build.teachers import StudentInfo, combine_teachers, find_teacher_columns, named_teachers
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import DistillationRunConfig, DpoRunConfig
from strop.distributed.actor_group import ActorGroup
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.distributed.cluster_config import RoleConfig
from strop.distributed.environment_process import spawn_environments
from strop.distributed.placement import DevicePlan, DeviceSlot
from strop.distributed.remote_engine import RemoteEngine
from strop.environments.remote import RemoteEnvironment
from strop.learner.base import BackwardResult, ColumnSource, Learner, LogprobColumn, ValueColumn, WeightSource
from strop.learner.parallel.micro_batch import assemble_outputs, assemble_result
from strop.metrics import Metrics
from strop.models.chat_template import ChatTemplate
from strop.models.loading import load_tokenizer
from strop.monitoring.trackers.base import Tracker
from strop.sampling import Sampling
from strop.types import Batch, Group
from strop.weight_sync.base import ChannelAddress, TransportError
from strop.weight_sync.exporter import Fingerprints, SentAdapters, TransferContent, TransferPlan

COLLECTIVE_TIMEOUT = 1800.0  # seconds that a rank waits in a collective; the death of a rank is detected immediately


@dataclass(frozen=True)
class RemoteTokenizerBundle:
    """The tokenizer and chat template of a policy in other processes."""

    tokenizer: Any
    template: ChatTemplate
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class RemoteScorer:
    """A network on the ranks that scores batches."""

    name: str
    group: ActorGroup
    cluster: Cluster

    async def score(self, batch: Batch) -> Outputs:
        outputs = await self.group.call_all("score", self.name, self.cluster.put(batch))
        return assemble_outputs(outputs, len(batch.target))


@dataclass(frozen=True)
class RemoteLearner:
    """A learner with its network and optimizer on the ranks."""

    name: str
    group: ActorGroup
    cluster: Cluster

    async def score(self, batch: Batch) -> Outputs:
        return await RemoteScorer(self.name, self.group, self.cluster).score(batch)

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self._call_with_loss("forward_backward", batch, loss)

    async def evaluate_loss(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self._call_with_loss("evaluate_loss", batch, loss)

    async def _call_with_loss(self, method: str, batch: Batch, loss: LossFn) -> BackwardResult:
        outputs = await self.group.call_all(method, self.name, self.cluster.put(batch), loss)
        return assemble_result(outputs, len(batch.target))

    async def step(self) -> Metrics:
        metrics: Metrics = (await self.group.call_all("step", self.name))[0]
        return metrics

    def weights(self) -> WeightSource:
        raise RuntimeError(
            "a learner on several ranks does not give its weights to the driver; its exporter sends them to engines"
        )

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.group.call_all_sync("save", self.name, folder.resolve(), optimizer)

    def stage(self, *, optimizer: bool = True) -> StagedLearner:
        """Copy the state to the ranks' CPU memory, to be written concurrently with training."""
        self.group.call_all_sync("stage", self.name, optimizer)
        return StagedLearner(self.name, self.group)

    def load(self, folder: Path) -> None:
        self.group.call_all_sync("load_checkpoint", self.name, folder.resolve())


@dataclass(frozen=True)
class StagedLearner:
    """The staged state of a learner, in the CPU memory of its ranks."""

    name: str
    group: ActorGroup

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.group.call_all_sync("write_staged", self.name, folder.resolve(), optimizer, urgent=True)


@dataclass(frozen=True)
class RemoteColumnSource:
    """A column filled by a source on the ranks, each rank for its own groups."""

    source: str
    column: str
    group: ActorGroup
    cluster: Cluster

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        references = self.cluster.put(batch), self.cluster.put(list(groups))
        shards = await self.group.call_all("fill", self.source, self.column, *references)
        return merge_columns([shard for shard in shards if isinstance(shard, ColumnShard)], len(batch.target))


class RemoteExporter:
    """The learner's side of a publish. Rank 0 sends; the other ranks take part in gathering the weights."""

    def __init__(self, group: ActorGroup) -> None:
        self.group = group

    async def prepare(self, content: TransferContent) -> TransferPlan:
        plan: TransferPlan = (await self.group.call_all("prepare_export", content))[0]
        return plan

    async def open(self, receivers: int) -> ChannelAddress:
        address: ChannelAddress = await self.group.call_one(0, "open_sender", receivers)
        return address

    async def send(self, *, read_back: bool) -> Fingerprints:
        result = (await self.group.call_all("send", read_back))[0]
        if isinstance(result, TransportError):
            raise result
        fingerprints: Fingerprints = result
        return fingerprints

    async def export_adapters(self, *, resend: bool) -> SentAdapters:
        adapters: SentAdapters = (await self.group.call_all("export_adapters", resend))[0]
        return adapters

    async def close(self) -> None:
        await self.group.call_one(0, "close_export", urgent=True)


class RayBackend:
    """Builds models in the processes of a Ray cluster."""

    blocks_event_loop = False
    shares_module = False

    def __init__(
        self,
        config: TrainingRunConfig,
        cluster: Cluster,
        device_plan: DevicePlan,
        group: ActorGroup,
        policy_info: PolicyInfo,
        tracker: Tracker,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.device_plan = device_plan
        self.group = group
        self.policy_info = policy_info
        self.tracker = tracker
        self.packed = policy_info.packed
        tokenizer_config = config.policy.tokenizer
        tokenizer = load_tokenizer(tokenizer_config.name, chat_template=tokenizer_config.chat_template)
        self.bundle: TokenizerBundle = RemoteTokenizerBundle(
            tokenizer, ChatTemplate(tokenizer, options=tokenizer_config.chat_template_kwargs), policy_info.stop_ids
        )

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, Learner]:
        self._algorithm, self._sampling = algorithm, sampling
        names = (await self.group.call_all("shard_models", algorithm, sampling, total_steps))[0]
        self._learners: dict[str, Learner] = {name: RemoteLearner(name, self.group, self.cluster) for name in names}
        return self._learners

    async def build_scorers(self) -> dict[str, ColumnSource]:
        required = self._algorithm.requires
        sources: dict[str, ColumnSource] = {}
        if REFERENCE_LOGPROBS in required:
            sources[REFERENCE_LOGPROBS] = LogprobColumn(REFERENCE_LOGPROBS, self._remote_scorer("reference"))
        if VALUES in required and "value" in self._learners:
            sources[VALUES] = ValueColumn(VALUES, self._learners["value"])
        if isinstance(self.config, DistillationRunConfig):
            sources.update(await self._build_teachers(self.config))
        return check_columns(sources, self._algorithm, self.config)

    async def _build_teachers(self, config: DistillationRunConfig) -> dict[str, ColumnSource]:
        """Build the sources of the teachers, each on the ranks or in separate processes."""
        columns, teachers = find_teacher_columns(config, self._algorithm), named_teachers(config)
        student = StudentInfo(self.policy_info.vocab_size, self.bundle.tokenizer)
        specs = [
            TeacherSpec(key=key, config=config, student=student, columns=columns, sampling=self._sampling)
            for key, teacher in teachers.items()
            if teacher.hosts
        ]
        remote_teachers = await spawn_teachers(self.cluster, specs, self._teacher_options(config))

        def source(key: str, column: str) -> ColumnSource:
            return (
                remote_teachers[key][column]
                if key in remote_teachers
                else RemoteColumnSource(key, column, self.group, self.cluster)
            )

        return {column: combine_teachers({key: source(key, column) for key in teachers}, config) for column in columns}

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

    async def build_recorded_scorers(self, groups: Callable[[], Sequence[Group]]) -> dict[str, ColumnSource]:
        config = self.config
        assert isinstance(config, RecordedRunConfig)
        sources: dict[str, ColumnSource] = {}
        if REFERENCE_LOGPROBS in self._algorithm.requires:
            once = isinstance(config, DpoRunConfig) and config.dpo.precompute_reference
            sources[REFERENCE_LOGPROBS] = (
                await make_stored_reference(
                    config,
                    self._remote_scorer("untrained"),
                    self._algorithm,
                    groups,
                    self.tracker,
                    fingerprint=self.policy_info.fingerprint,
                    share_prefixes=config.policy.sequence_packing.prefix_sharing and self.packed,
                )
                if once
                else LogprobColumn(REFERENCE_LOGPROBS, self._remote_scorer("reference"))
            )
        return check_columns(sources, self._algorithm, config)

    def _remote_scorer(self, name: str) -> RemoteScorer:
        return RemoteScorer(name, self.group, self.cluster)

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        assert isinstance(self.config, RolloutRunConfig)
        options, slots = self.config.policy.generation, self.device_plan.generation
        uses_vllm = options.backend == "vllm"
        adapters = uses_vllm and options.weight_sync.adapters_alone and self.config.policy.dtensor_cfg.lora_cfg.enabled
        folder = (spec.output_folder / "model").resolve()
        await self.group.call_one(0, "write_model_folder", folder)
        export_options = ExportOptions(
            dtype=PRECISIONS[get_engine_precision(self.config)],
            keep_snapshot=spec.max_staleness > 0,
            adapters=adapters,
            same_machine=all(slot.node == self.device_plan.training[0].node for slot in slots),
            folder=(spec.output_folder / "weights").resolve(),
        )
        await self.group.call_all("open_export", export_options, self.policy_info.address)
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
        return self._make_engine(number, slot, size, _build_vllm_engine, arguments)

    def _make_torch_engine(self, number: int, slot: DeviceSlot, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        arguments = (f"engine {number}", self.config, folder, self.bundle.tokenizer, self.bundle.stop_ids, self.packed)
        return self._make_engine(number, slot, 1, _build_torch_engine, arguments)

    def _make_engine(
        self, number: int, slot: DeviceSlot, receivers: int, make: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> RemoteEngine:
        threads = self._thread_env(self.config.policy.num_threads, generates=True)
        options = make_actor_options(f"engine-{number}", slot, self.config.cluster.roles.generator, threads, kind="async")

        async def spawn() -> RemoteActor:
            return await self.cluster.spawn(options, make, *arguments)

        return RemoteEngine(f"engine {number}", receivers, spawn)

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


def is_time_shared(config: TrainingRunConfig, plan: DevicePlan) -> bool:
    """Return whether learner and engines take turns on the same devices."""
    return plan.colocated and isinstance(config, RolloutRunConfig) and config.rollout_training.max_staleness == 0


async def make_ray_backend(config: TrainingRunConfig, cluster: Cluster, tracker: Tracker) -> RayBackend:
    """Start the ranks and load the policy on them. Raises ModelNotFound, ValueError, ActorGroupDied."""
    device_plan = make_device_plan(config, on_cpu=cluster.on_cpu)
    on_cpu = cluster.on_cpu
    role, world = config.cluster.roles.learner, len(device_plan.training)
    threads = make_thread_env(config.policy.num_threads, on_cpu, device_plan, time_shared=is_time_shared(config, device_plan))
    actors = await asyncio.gather(
        *(
            cluster.spawn(make_actor_options(f"learner-{rank}", slot, role, threads), LearnerWorker, config, rank, world)
            for rank, slot in enumerate(device_plan.training)
        )
    )
    group = ActorGroup("learner", actors)
    address = actors[0].address
    port = await group.call_one(0, "open_store", address)
    await group.call_all("init_process_group", address, port, COLLECTIVE_TIMEOUT)
    policy_info = (await group.call_all("load_policy", address))[0]
    tracker.note(f"learner: ranks 0 to {world - 1} are the processes {_format_pids(actors)}")
    if policy_info.fallback is not None:
        tracker.note(f"warning: the policy reads padded rows: {policy_info.fallback}")
    return RayBackend(config, cluster, device_plan, group, policy_info, tracker)


def make_remote_environments(config: RolloutRunConfig, cluster: Cluster) -> dict[str, RemoteEnvironment]:
    """Start the environments in separate processes, spread over the nodes. Return them by alias; empty if
    ``cluster.environment_hosts`` is 0."""
    count, role = config.cluster.environment_hosts, config.cluster.roles.environment
    if not count:
        return {}
    descriptions = describe_environments(config.data.train, config.data.validation, config.env, seed=config.rollout_training.seed)
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


def _build_vllm_engine(name: str, options: Any, tokenizer: Any, stop_ids: Sequence[int]) -> Any:
    """Build a vLLM engine. Runs in the engine's process."""
    from strop.generation.vllm.vllm_engine import VllmEngine

    return VllmEngine(name, options, tokenizer, stop_ids=stop_ids)


def _build_torch_engine(
    name: str, config: TrainingRunConfig, folder: Path, tokenizer: Any, stop_ids: tuple[int, ...], packed: bool
) -> Any:
    """Build a torch engine on an empty model, whose weights the learner will send. Runs in the engine's process."""
    from strop.build.models import prepare_device
    from strop.generation.torch.standalone import StandaloneTorchEngine
    from strop.models.loading import cast_weights, model_from_config
    from strop.models.network import Network, disable_dropout

    policy = config.policy

    def make() -> Any:
        device = prepare_device(policy.device, None)
        model = model_from_config(folder).to(device)
        disable_dropout(model)
        network = Network(model, precision=PRECISIONS[policy.precision], packed=packed)
        cast_weights(model, PRECISIONS[policy.weights_dtype])
        loaded = LoadedPolicy(network, tokenizer, ChatTemplate(tokenizer), stop_ids)
        return make_torch_engine(loaded, policy.generation, policy.max_total_sequence_length)

    return StandaloneTorchEngine(name, make, PRECISIONS[policy.weights_dtype])
