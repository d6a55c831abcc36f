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
from strop.algorithms.gae import VALUES
from strop.algorithms.kl import REFERENCE
from strop.assembly.columns import Filled, joined
from strop.assembly.divisions import division_of
from strop.assembly.engines import Generation, GenerationNeeds, published, vllm_options
from strop.assembly.ranks import ExportOptions, LearnerRank, RankFacts, engine_precision
from strop.assembly.roles import PRECISIONS, Policy, Speech, make_engine
from strop.assembly.scorer_hosts import TeacherDescription, host_teachers
from strop.assembly.scorers import complete, stored_reference
from strop.assembly.tasks import descriptions
from strop.assembly.teachers import Student, combined, teachers_of, wanted_columns
from strop.cluster.base import Cluster, HostOptions, Remote
from strop.cluster.engines import RemoteEngine
from strop.cluster.environments import host_environments
from strop.cluster.group import WorkerGroup
from strop.cluster.placement import Division, Place
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.cluster import RoleConfig
from strop.config.schema import DistillationRunConfig, DpoRunConfig
from strop.environments.hosted import RemoteEnvironment
from strop.metrics import Metrics
from strop.models.loading import load_tokenizer
from strop.rollouts.template import ChatTemplate
from strop.sampling import Sampling
from strop.tracking.base import Tracker
from strop.training.base import BackwardResult, ColumnSource, Learner, LogprobColumn, ValueColumn, WeightSource
from strop.training.torch.parallel.share import assemble, assemble_outputs
from strop.types import Batch, Group
from strop.weights.base import ChannelAddress, TransportError
from strop.weights.export import Content, Marks, SentAdapters, Shipment

COLLECTIVE_SECONDS = 1800.0  # timeout of a rank that waits in a collective; the death of a rank is noticed at once


@dataclass(frozen=True)
class RemoteSpeech:
    """The tokenizer and chat template of a policy in other processes."""

    tokenizer: Any
    template: ChatTemplate
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class RemoteScorer:
    """A network on the ranks that scores batches."""

    name: str
    group: WorkerGroup
    cluster: Cluster

    async def score(self, batch: Batch) -> Outputs:
        shares = await self.group.all("score", self.name, self.cluster.share(batch))
        return assemble_outputs(shares, len(batch.target))


@dataclass(frozen=True)
class RemoteLearner:
    """A learner with its network and optimizer on the ranks."""

    name: str
    group: WorkerGroup
    cluster: Cluster

    async def score(self, batch: Batch) -> Outputs:
        return await RemoteScorer(self.name, self.group, self.cluster).score(batch)

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self._run("forward_backward", batch, loss)

    async def measure(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self._run("measure", batch, loss)

    async def _run(self, method: str, batch: Batch, loss: LossFn) -> BackwardResult:
        shares = await self.group.all(method, self.name, self.cluster.share(batch), loss)
        return assemble(shares, len(batch.target))

    async def step(self) -> Metrics:
        metrics: Metrics = (await self.group.all("step", self.name))[0]
        return metrics

    def weights(self) -> WeightSource:
        raise RuntimeError(
            "a learner on several ranks does not give its weights to the driver; its exporter sends them to engines"
        )

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.group.now("save", self.name, folder.resolve(), optimizer)

    def stage(self, *, optimizer: bool = True) -> StagedLearner:
        """Copy the state to the ranks' CPU memory, to be written concurrently with training."""
        self.group.now("stage", self.name, optimizer)
        return StagedLearner(self.name, self.group)

    def load(self, folder: Path) -> None:
        self.group.now("load_checkpoint", self.name, folder.resolve())


@dataclass(frozen=True)
class StagedLearner:
    """The staged state of a learner, in the CPU memory of its ranks."""

    name: str
    group: WorkerGroup

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.group.now("write", self.name, folder.resolve(), optimizer, urgent=True)


@dataclass(frozen=True)
class RemoteColumns:
    """A column filled by a source on the ranks, each rank for its own groups."""

    source: str
    column: str
    group: WorkerGroup
    cluster: Cluster

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        shared = self.cluster.share(batch), self.cluster.share(list(groups))
        answers = await self.group.all("fill", self.source, self.column, *shared)
        return joined([answer for answer in answers if isinstance(answer, Filled)], len(batch.target))


class RemoteExporter:
    """The learner's side of a publish. Rank 0 sends; the other ranks take part in gathering the weights."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group

    async def prepare(self, content: Content) -> Shipment:
        shipment: Shipment = (await self.group.all("prepare_export", content))[0]
        return shipment

    async def open(self, receivers: int) -> ChannelAddress:
        address: ChannelAddress = await self.group.one(0, "open_sender", receivers)
        return address

    async def send(self, *, held: bool) -> Marks:
        sent = (await self.group.all("send", held))[0]
        if isinstance(sent, TransportError):
            raise sent
        marks: Marks = sent
        return marks

    async def adapters(self, *, again: bool) -> SentAdapters:
        adapters: SentAdapters = (await self.group.all("export_adapters", again))[0]
        return adapters

    async def close(self) -> None:
        await self.group.one(0, "close_export", urgent=True)


class ClusterHome:
    """Builds models in the processes of a Ray cluster."""

    blocks = False
    shares_module = False

    def __init__(
        self,
        config: TrainingRunConfig,
        cluster: Cluster,
        division: Division,
        group: WorkerGroup,
        facts: RankFacts,
        tracker: Tracker,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.division = division
        self.group = group
        self.facts = facts
        self.tracker = tracker
        self.packed = facts.packed
        names = config.policy.tokenizer
        tokenizer = load_tokenizer(names.name, chat_template=names.chat_template)
        self.speech: Speech = RemoteSpeech(tokenizer, ChatTemplate(tokenizer, options=names.chat_template_kwargs), facts.stop_ids)

    async def learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, Learner]:
        self._algorithm, self._sampling = algorithm, sampling
        names = (await self.group.all("divide", algorithm, sampling, total_steps))[0]
        self._learners: dict[str, Learner] = {name: RemoteLearner(name, self.group, self.cluster) for name in names}
        return self._learners

    async def scorers(self) -> dict[str, ColumnSource]:
        wanted = self._algorithm.requires
        found: dict[str, ColumnSource] = {}
        if REFERENCE in wanted:
            found[REFERENCE] = LogprobColumn(REFERENCE, self._scorer("reference"))
        if VALUES in wanted and "value" in self._learners:
            found[VALUES] = ValueColumn(VALUES, self._learners["value"])
        if isinstance(self.config, DistillationRunConfig):
            found.update(await self._teachers(self.config))
        return complete(found, self._algorithm, self.config)

    async def _teachers(self, config: DistillationRunConfig) -> dict[str, ColumnSource]:
        """Build the sources of the teachers, each on the ranks or in processes of its own."""
        wanted, teachers = wanted_columns(config, self._algorithm), teachers_of(config)
        student = Student(self.facts.vocabulary, self.speech.tokenizer)
        described = [
            TeacherDescription(key=key, config=config, student=student, columns=wanted, sampling=self._sampling)
            for key, teacher in teachers.items()
            if teacher.hosts
        ]
        hosted = await host_teachers(self.cluster, described, self._teacher_options(config))

        def source(key: str, column: str) -> ColumnSource:
            return hosted[key][column] if key in hosted else RemoteColumns(key, column, self.group, self.cluster)

        return {column: combined({key: source(key, column) for key in teachers}, config) for column in wanted}

    def _teacher_options(self, config: DistillationRunConfig) -> dict[str, list[HostOptions]]:
        """Return the actor options of each process by teacher key. Processes are spread over the nodes; one with a GPU goes to any node
        that has a GPU besides those of the run."""
        role, threads = config.cluster.roles.teacher, self._threads(config.policy.num_threads)
        found: dict[str, list[HostOptions]] = {}
        dealt = itertools.count()
        for key, teacher in teachers_of(config).items():
            gpus = 0.0 if self.facts.on_cpu or teacher.device == "cpu" else 1.0 if role.num_gpus is None else role.num_gpus
            names = [f"{key.replace('.', '-')}-{number}" for number in range(teacher.hosts)]
            found[key] = [
                host_options(name, Place(next(dealt) % self.cluster.nodes, ()), role, threads, gpus=gpus) for name in names
            ]
        return found

    async def recorded_scorers(self, groups: Callable[[], Sequence[Group]]) -> dict[str, ColumnSource]:
        config = self.config
        assert isinstance(config, RecordedRunConfig)
        found: dict[str, ColumnSource] = {}
        if REFERENCE in self._algorithm.requires:
            once = isinstance(config, DpoRunConfig) and config.dpo.precompute_reference
            found[REFERENCE] = (
                await stored_reference(
                    config,
                    self._scorer("untrained"),
                    self._algorithm,
                    groups,
                    self.tracker,
                    fingerprint=self.facts.fingerprint,
                    share_prefixes=config.policy.sequence_packing.prefix_sharing and self.packed,
                )
                if once
                else LogprobColumn(REFERENCE, self._scorer("reference"))
            )
        return complete(found, self._algorithm, config)

    def _scorer(self, name: str) -> RemoteScorer:
        return RemoteScorer(name, self.group, self.cluster)

    async def generation(self, needs: GenerationNeeds) -> Generation:
        assert isinstance(self.config, RolloutRunConfig)
        options, places = self.config.policy.generation, self.division.generation
        own_vllm = options.backend == "vllm"
        adapters = own_vllm and options.weight_sync.adapters_alone and self.config.policy.dtensor_cfg.lora_cfg.enabled
        folder = (needs.outputs / "model").resolve()
        await self.group.one(0, "describe", folder)
        exporting = ExportOptions(
            dtype=PRECISIONS[engine_precision(self.config)],
            keep_copy=needs.max_staleness > 0,
            adapters=adapters,
            near=all(place.node == self.division.training[0].node for place in places),
            folder=(needs.outputs / "weights").resolve(),
        )
        await self.group.all("open_export", exporting, self.facts.address)
        make = self._vllm_engine if own_vllm else self._torch_engine
        engines = [make(number, place, folder, needs.outputs.resolve(), adapters) for number, place in enumerate(places)]
        return published(
            engines,
            RemoteExporter(self.group),
            self.speech,
            options,
            needs,
            precision=options.vllm_cfg.precision if own_vllm else self.config.policy.precision,
            length=options.vllm_cfg.max_model_len if own_vllm else self.config.policy.max_total_sequence_length,
            adapters=adapters,
            shrinks=self.config.cluster.shrink_on_lost_node,
        )

    def _vllm_engine(self, number: int, place: Place, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        config = self.config.policy
        options = vllm_options(
            str(folder),
            config.generation,
            on_cpu=self.facts.on_cpu,
            adapter_rank=config.dtensor_cfg.lora_cfg.dim if adapters else None,
            load_weights=False,
            output=outputs / f"engine_{number}.log",
            environment={
                **self._threads(config.generation.vllm_cfg.num_threads, generates=True),
                **config.generation.vllm_cfg.env_vars,
            },
        )
        arguments = (f"engine {number}", options, self.speech.tokenizer, self.speech.stop_ids)
        size = config.generation.vllm_cfg.tensor_parallel_size * config.generation.vllm_cfg.pipeline_parallel_size
        return self._engine(number, place, size, _vllm, arguments)

    def _torch_engine(self, number: int, place: Place, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        arguments = (f"engine {number}", self.config, folder, self.speech.tokenizer, self.speech.stop_ids, self.packed)
        return self._engine(number, place, 1, _torch, arguments)

    def _engine(
        self, number: int, place: Place, receivers: int, make: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> RemoteEngine:
        threads = self._threads(self.config.policy.num_threads, generates=True)
        options = host_options(f"engine-{number}", place, self.config.cluster.roles.generator, threads, kind="async")

        async def host() -> Remote:
            return await self.cluster.host(options, make, *arguments)

        return RemoteEngine(f"engine {number}", receivers, host)

    def _threads(self, wanted: int | None, *, generates: bool = False) -> dict[str, str]:
        turns = take_turns(self.config, self.division)
        return threads_of(wanted, self.facts.on_cpu, self.division, generates=generates, turns=turns)


def host_options(
    name: str, place: Place, role: RoleConfig, threads: Mapping[str, str], *, gpus: float = 0.0, **changes: Any
) -> HostOptions:
    """Make the options of an actor. ``gpus``: GPUs besides those of the run; Ray then chooses the node."""
    return HostOptions(
        name=name,
        node=None if gpus else place.node,
        devices=place.devices,
        num_cpus=role.num_cpus,
        num_gpus=gpus,
        resources=role.resources,
        environment={**threads, **role.env_vars},
        packages=role.pip,
        python=role.python,
        **changes,
    )


def threads_of(
    wanted: int | None, on_cpu: bool, division: Division, *, generates: bool = False, turns: bool = False
) -> dict[str, str]:
    """Return the environment variables that set the CPU threads of a process: ``wanted``, or on CPU an equal share of the cores.

    Assumes that every machine has as many cores as this one. ``time_shared``: ranks and engines never compute at the same time, so the
    processes of each kind share all cores."""
    if wanted is None and not on_cpu:
        return {}
    own = division.generation if generates else division.training
    at_once = own if turns else (*division.training, *division.generation)
    on_one = max(1, sum(place.node == own[0].node for place in at_once))
    return {"OMP_NUM_THREADS": str(wanted or max(1, (os.cpu_count() or 1) // on_one))}


def take_turns(config: TrainingRunConfig, division: Division) -> bool:
    """Return whether learner and engines take turns on the same devices."""
    return division.shared and isinstance(config, RolloutRunConfig) and config.rollouts.max_staleness == 0


async def make_cluster_home(config: TrainingRunConfig, cluster: Cluster, tracker: Tracker) -> ClusterHome:
    """Start the ranks and load the policy on them. Raises ModelNotFound, ValueError, GroupDied."""
    division = division_of(config, on_cpu=cluster.on_cpu)
    on_cpu = cluster.on_cpu
    role, world = config.cluster.roles.learner, len(division.training)
    threads = threads_of(config.policy.num_threads, on_cpu, division, turns=take_turns(config, division))
    hosts = await asyncio.gather(
        *(
            cluster.host(host_options(f"learner-{rank}", place, role, threads), LearnerRank, config, rank, world)
            for rank, place in enumerate(division.training)
        )
    )
    group = WorkerGroup("learner", hosts)
    address = hosts[0].address
    port = await group.one(0, "open_store", address)
    await group.all("join", address, port, COLLECTIVE_SECONDS)
    facts = (await group.all("load", address))[0]
    tracker.note(f"learner: ranks 0 to {world - 1} are the processes {_processes(hosts)}")
    if facts.fallback is not None:
        tracker.note(f"warning: the policy reads padded rows: {facts.fallback}")
    return ClusterHome(config, cluster, division, group, facts, tracker)


def hosted_environments(config: RolloutRunConfig, cluster: Cluster) -> dict[str, RemoteEnvironment]:
    """Start the environments in processes of their own, spread over the nodes. Return them by alias; empty if
    ``cluster.environment_hosts`` is 0."""
    count, role = config.cluster.environment_hosts, config.cluster.roles.environment
    if not count:
        return {}
    described = descriptions(config.data.train, config.data.validation, config.env, seed=config.rollouts.seed)
    threads = {"OMP_NUM_THREADS": "1"}
    gpus = 0.0 if cluster.on_cpu else role.num_gpus or 0.0
    options = {
        alias: tuple(
            host_options(
                f"environment-{alias}-{number}", Place(number % cluster.nodes, ()), role, threads, gpus=gpus, kind="async"
            )
            for number in range(count)
        )
        for alias in described
    }
    return host_environments(cluster, described, options)


def _processes(hosts: Sequence[Remote]) -> str:
    return ", ".join(str(host.process) for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")


def _vllm(name: str, options: Any, tokenizer: Any, stop_ids: Sequence[int]) -> Any:
    """Build a vLLM engine. Runs in the engine's process."""
    from strop.generation.vllm.engine import VllmEngine

    return VllmEngine(name, options, tokenizer, stop_ids=stop_ids)


def _torch(name: str, config: TrainingRunConfig, folder: Path, tokenizer: Any, stop_ids: tuple[int, ...], packed: bool) -> Any:
    """Build a torch engine on an empty model, whose weights the learner will send. Runs in the engine's process."""
    from strop.assembly.roles import prepare_device
    from strop.generation.torch.apart import ApartEngine
    from strop.models.loading import empty_model
    from strop.models.network import Network, disable_dropout
    from strop.training.torch.master import round_weights

    policy = config.policy

    def make() -> Any:
        device = prepare_device(policy.device, None)
        model = empty_model(folder).to(device)
        disable_dropout(model)
        network = Network(model, precision=PRECISIONS[policy.precision], packed=packed)
        round_weights(model, PRECISIONS[policy.weights_dtype])
        speech = Policy(network, tokenizer, ChatTemplate(tokenizer), stop_ids)
        return make_engine(speech, policy.generation, policy.max_total_sequence_length)

    return ApartEngine(name, make, PRECISIONS[policy.weights_dtype])
