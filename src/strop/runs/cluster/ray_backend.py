"""The driver's side of a run on a Ray cluster: learners, scorers and engines with models in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.algorithms.base import Algorithm
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.distributed.actor_group import ActorGroup, RestartableActor
from strop.distributed.base import ActorOptions, Cluster, RemoteActor
from strop.distributed.placement import DevicePlan, DeviceSlot, make_thread_env, plan_devices
from strop.distributed.workers.environment_process import spawn_environments
from strop.distributed.workers.learner_worker import LearnerWorker, PolicyInfo, RankTarget
from strop.distributed.workers.remote_engine import RemoteEngine
from strop.distributed.workers.remote_learner import RankCaller, RemoteExporter, RemoteLearner, RemoteMemory
from strop.environments.remote import RemoteEnvironment
from strop.generation.engine_launch import EngineLaunch, LaunchedAdapters, NodeRanks
from strop.generation.launched_engines import make_launched_engine
from strop.generation.pool import SyncedGenerator
from strop.learner.client import LearnerClient, ScorerClient
from strop.models.loading import load_tokenizer, read_model_config
from strop.monitoring.trackers.base import Tracker
from strop.runs.cluster.engine_builders import build_torch_engine, make_rank_exporter
from strop.runs.engines import GeneratorSpec, make_launch, offloads_learner, pool_engines
from strop.runs.learner_backend import load_backend
from strop.runs.models import TokenizerBundle, make_template
from strop.runs.tasks import describe_environments
from strop.sampling import Sampling
from strop.weight_sync.transports.choose import EngineLocations, choose_senders

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
        template = make_template(config.policy, tokenizer, read_model_config(config.policy.model_name))
        self.bundle = TokenizerBundle(tokenizer, template, policy_info.stop_ids)

    async def build_learners(self, algorithm: Algorithm, sampling: Sampling, total_steps: int | None) -> dict[str, LearnerClient]:
        self.sampling = sampling
        backend = load_backend(self.config.policy.learner)
        build = partial(backend.build_models, self.config, algorithm, sampling, total_steps)
        names = (await self.group.call_all("build_models", build))[0]
        self._share_requests = await self.group.call_all("share_requests")
        return {name: RemoteLearner(self.caller(name)) for name in names}

    def make_reference(self) -> ScorerClient:
        return ScorerClient(self.caller("reference"))

    def make_untrained_policy(self) -> tuple[ScorerClient, str]:
        return ScorerClient(self.caller("untrained")), self.policy_info.fingerprint

    def caller(self, name: RankTarget) -> RankCaller:
        """Return what calls a learner, scorer or source of columns on all ranks."""
        of_ranks = [requests[name] for requests in self._share_requests]
        by_method = {method: [requests[method] for requests in of_ranks] for method in of_ranks[0]}
        return RankCaller(name, self.group, self.cluster, by_method)

    async def build_generator(self, spec: GeneratorSpec) -> SyncedGenerator:
        assert isinstance(self.config, RolloutRunConfig)
        options, slots = self.config.policy.generation, self.device_plan.generation
        adapters = options.sends_adapters and self.config.policy.adapter_rank is not None
        folder = await self._write_model_folders(spec.output_folder.resolve())
        senders = await self._open_export(spec, adapters)
        make = self._launch_engine if options.uses_engines else self._make_torch_engine
        engines = [make(number, slot, folder, spec.output_folder.resolve(), adapters) for number, slot in enumerate(slots)]
        offloads = offloads_learner(self.config, on_cpu=self.policy_info.on_cpu, shares_module=False)
        return pool_engines(
            engines,
            RemoteExporter(self.group, senders),
            self.bundle,
            self.config.policy,
            spec,
            adapters=adapters,
            allow_shrink=self.config.cluster.shrink_on_lost_node,
            memory=RemoteMemory(self.group) if offloads else None,
        )

    async def _write_model_folders(self, outputs: Path) -> Path:
        """Write the folders from which engines build the policy and their draft head. Return the policy's."""
        folder = outputs / "model"
        write = load_backend(self.config.policy.learner).write_model_folder
        await self.group.call_one(0, "call_with_policy", partial(write, config=self.config, folder=folder))
        return folder

    async def _open_export(self, spec: GeneratorSpec, adapters: bool) -> Sequence[int]:
        """Open the exporter on every rank. Return the ranks that send weights."""
        options, hosts = self.config.policy.generation, [actor.address for actor in self.group.actors]
        locations = EngineLocations(
            count=len(self.device_plan.generation),
            colocated=options.colocated.enabled,
            same_machine=self.device_plan.on_one_machine,
            host=hosts[0],
        )
        device = torch.device("cpu" if self.policy_info.on_cpu else "cuda")
        senders = choose_senders(options.weight_sync, device, locations, hosts)
        if len(senders) > 1:
            spec.note(f"weights: ranks {', '.join(map(str, senders))} of {len(hosts)} send them, each its part of the tensors")
        make_exporter = partial(
            make_rank_exporter,
            self.config.policy,
            keep_snapshot=spec.max_staleness > 0,
            adapters=adapters,
            engines=locations,
            folder=(spec.output_folder / "weights").resolve(),
            senders={rank: hosts[rank] for rank in senders},
        )
        await self.group.call_all("open_export", make_exporter)
        return senders

    def _launch_engine(self, number: int, slot: DeviceSlot, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        config = self.config.policy
        rank = config.adapter_rank if adapters else None
        launch = make_launch(
            config,
            model=folder,
            on_cpu=self.policy_info.on_cpu,
            adapters=None if rank is None else LaunchedAdapters(rank, self.policy_info.adapter_layers),
            reads_images=self.bundle.template.vision is not None,
            draft=str(folder.parent / "draft") if config.sends_draft else "",
            environment=self.thread_env(config.generation.engine_options.num_threads, generates=True),
            output_file=outputs / f"engine_{number}.log",
            nodes=tuple(self._locate_ranks(part) for part in slot.parts) if slot.further else (),
            ray_address=self.cluster.address if slot.further else "",
        )
        return self._make_launched_engine(number, slot, launch)

    def _make_launched_engine(self, number: int, slot: DeviceSlot, launch: EngineLaunch) -> RemoteEngine:
        bundle = self.bundle
        make = partial(
            make_launched_engine,
            f"engine {number}",
            launch,
            bundle.tokenizer,
            stop_ids=bundle.stop_ids,
            vision=bundle.template.vision,
        )
        return self._make_engine(number, slot, launch.receivers, make)

    def _locate_ranks(self, part: DeviceSlot) -> NodeRanks:
        node, gpus = self.cluster.locate(part.node, part.devices)
        return NodeRanks(node, len(part.devices), gpus)

    def _make_torch_engine(self, number: int, slot: DeviceSlot, folder: Path, outputs: Path, adapters: bool) -> RemoteEngine:
        bundle = self.bundle
        make = partial(
            build_torch_engine,
            f"engine {number}",
            self.config.policy,
            folder,
            bundle.tokenizer,
            bundle.stop_ids,
            self.packed,
            bundle.template.vision,
        )
        return self._make_engine(number, slot, 1, make)

    def _make_engine(self, number: int, slot: DeviceSlot, receivers: int, make: Callable[[], Any]) -> RemoteEngine:
        threads = self.thread_env(self.config.policy.num_threads, generates=True)
        options = ActorOptions(
            name=f"engine-{number}",
            role=self.config.cluster.roles.generator,
            node=slot.node,
            further_nodes=tuple(part.node for part in slot.further),
            devices=slot.devices,
            kind="async",
            environment=threads,
        )
        return RemoteEngine(f"engine {number}", receivers, RestartableActor(self.cluster, options, make))

    def thread_env(self, threads: int | None, *, generates: bool = False) -> dict[str, str]:
        time_shared = is_time_shared(self.config, self.device_plan)
        on_cpu = self.policy_info.on_cpu
        return make_thread_env(threads, self.device_plan, on_cpu=on_cpu, generates=generates, time_shared=time_shared)


def is_time_shared(config: TrainingRunConfig, plan: DevicePlan) -> bool:
    """Return whether learner and engines alternate on the same devices."""
    return plan.colocated and isinstance(config, RolloutRunConfig) and config.rollout_training.max_staleness == 0


async def make_ray_backend(config: TrainingRunConfig, cluster: Cluster, tracker: Tracker) -> RayBackend:
    """Start the ranks and load the policy on them. Raises ModelNotFound, ValueError, ActorGroupDied."""
    device_plan = plan_devices(count_devices(config), on_cpu=cluster.on_cpu)
    role, world, device = config.cluster.roles.learner, len(device_plan.training), config.policy.device
    threads = make_thread_env(
        config.policy.num_threads, device_plan, on_cpu=cluster.on_cpu, time_shared=is_time_shared(config, device_plan)
    )
    options = [
        ActorOptions(name=f"learner-{rank}", role=role, node=slot.node, devices=slot.devices, environment=threads)
        for rank, slot in enumerate(device_plan.training)
    ]
    actors = await asyncio.gather(*(cluster.spawn(each, LearnerWorker, device, rank, world) for rank, each in enumerate(options)))
    group = ActorGroup("learner", actors)
    address = actors[0].address
    port = await group.call_one(0, "open_store", address)
    await group.call_all("init_process_group", address, port, COLLECTIVE_TIMEOUT)
    policy_info = (await group.call_all("load_policy", partial(load_backend(config.policy.learner).load_policy, config)))[0]
    tracker.note(f"learner: ranks 0 to {world - 1} are the processes {_format_pids(actors)}")
    if policy_info.fallback is not None:
        tracker.note(f"warning: the policy reads padded rows: {policy_info.fallback}")
    return RayBackend(config, cluster, device_plan, group, policy_info)


def make_remote_environments(config: RolloutRunConfig, cluster: Cluster) -> dict[str, RemoteEnvironment]:
    """Start the environments in separate processes. Return them by alias; empty if ``cluster.environment_hosts`` is 0."""
    count = config.cluster.environment_hosts
    if not count:
        return {}
    descriptions = describe_environments(config)
    return spawn_environments(cluster, descriptions, count, config.cluster.roles.environment)


def _format_pids(actors: Sequence[RemoteActor]) -> str:
    return ", ".join(str(actor.pid) for actor in actors[:8]) + (", ..." if len(actors) > 8 else "")
