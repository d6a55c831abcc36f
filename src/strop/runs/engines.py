"""Build the generator of a run and its weight sync: the torch engine on the learner's module, or engines in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from strop.config import RolloutRunConfig
from strop.config.schema.policy_config import PolicyConfig
from strop.environments.policy_client import PastSelvesRule
from strop.generation.base import Engine
from strop.generation.engine_launch import EngineLaunch, LaunchedAdapters
from strop.generation.launched_engines import find_engine, make_local_engines
from strop.generation.pool import SyncedGenerator, make_synced_pool
from strop.generation.quantized_rollouts import make_emulation, make_weight_rounding
from strop.generation.torch.torch_engine import TorchEngine, make_torch_engine
from strop.generation.torch.torch_past_selves import TorchPastSelves
from strop.learner.base import require_token_outputs
from strop.learner.client import LearnerClient
from strop.learner.learner_config import fixes_order
from strop.models.adapters import lora_layers, merged_roundings
from strop.models.network import Network
from strop.models.network_parts import FOLDER, DraftHead
from strop.runs.models import PRECISIONS, LoadedPolicy, TokenizerBundle, write_model_folder
from strop.sampling import Sampling
from strop.types import Batch
from strop.weight_sync.base import LearnerMemory
from strop.weight_sync.exporter import Exporter, LocalAdapterSource, make_local_exporter
from strop.weight_sync.in_process import InProcessWeights, TimedMemory
from strop.weight_sync.publisher import PublishOptions
from strop.weight_sync.transports.choose import EngineLocations, choose_senders, make_sender_factory
from strop.weight_sync.verification import make_canary


@dataclass(frozen=True, kw_only=True)
class GeneratorSpec:
    """What a run requires of its generator."""

    sampling: Sampling
    learner: LearnerClient  # of the policy, whose weights are published
    max_staleness: int
    in_flight: bool
    recompute: bool
    share_prefixes: bool
    seed: int
    note: Callable[[str], None]
    output_folder: Path  # folder for the files and logs of engines


def make_generator(
    policy: LoadedPolicy,
    config: PolicyConfig,
    spec: GeneratorSpec,
    memory: LearnerMemory | None = None,
    roles: Mapping[str, Network] = MappingProxyType({}),
) -> SyncedGenerator:
    """Create the torch engine in this process, or engines in child processes. Raises ValueError for incompatible options.

    ``memory``: the learner's, offloaded while an engine samples on the same device. ``roles``: the networks of further policies, by name,
    each with a torch engine of its own."""
    generation, network = config.generation, policy.network
    if not generation.uses_engines:
        engine, *others = (make_embedded_engine(each, policy, config) for each in (network, *roles.values()))
        timed = None if memory is None else TimedMemory(memory)
        weights = InProcessWeights([engine, *others], timed, engine)
        return SyncedGenerator(generator=engine, weights=weights, policies=dict(zip(roles, others, strict=True)))
    on_cpu = network.device.type == "cpu"
    adapters = generation.sends_adapters and bool(lora_layers(network.model))
    drafts = generation.uses_vllm and generation.vllm_cfg.speculation.method == "eagle3"
    head = network.draft if drafts else None  # used by an engine for drafts
    layers = lora_layers(network.model)
    launch = make_launch(
        config,
        model=write_model_folder(policy, spec.output_folder / "model", config),
        on_cpu=on_cpu,
        adapters=LaunchedAdapters(len(layers[0].down), tuple(layer.name for layer in layers)) if adapters else None,
        reads_images=policy.template.vision is not None,
        draft="" if head is None else str(head.save(spec.output_folder / FOLDER)),
    )
    engines = make_local_engines(
        launch,
        policy.tokenizer,
        learner=network.device,
        stop_ids=policy.stop_ids,
        threads=config.num_threads,
        output_folder=spec.output_folder,
        vision=policy.template.vision,
    )
    locations = EngineLocations(count=len(engines), colocated=generation.colocated.enabled)
    choose_senders(generation.weight_sync, network.device, locations, [locations.host])  # refuses several senders in one process
    exporter = make_local_exporter(
        spec.learner.weights if head is None else partial(_with_draft, spec.learner, head),
        make_sender_factory(generation.weight_sync, network.device, locations, spec.output_folder / "weights"),
        dtype=PRECISIONS[generation.engine_options.dtype],
        quantization=make_weight_rounding(generation, config.precision),
        keep_snapshot=spec.max_staleness > 0,
        adapters=LocalAdapterSource(network.model) if adapters else None,
        device=network.device,
        roundings=merged_roundings(network.model),
    )
    return pool_engines(engines, exporter, policy, config, spec, adapters=adapters, memory=memory)


def make_embedded_engine(network: Network, policy: LoadedPolicy, config: PolicyConfig) -> TorchEngine:
    """Create a torch engine on the policy's network, or on a copy of it."""
    generation = config.generation
    return make_torch_engine(
        network,
        policy.tokenizer,
        generation.torch_cfg,
        length=config.max_total_sequence_length,
        stop_ids=policy.stop_ids,
        quantization=make_emulation(generation, rounds_weights=True),
    )


def make_launch(config: PolicyConfig, *, model: Path, on_cpu: bool, **settings: Any) -> EngineLaunch:
    """Return what an engine of the policy in the folder ``model`` is launched with. ``settings``: further fields of the launch."""
    return find_engine(config.generation).launch_class(
        config=config.generation,
        model=str(model),
        on_cpu=on_cpu,
        return_routes=config.router_replay.enabled,
        batch_invariant=fixes_order(config) or (config.deterministic and not on_cpu),
        **settings,
    )


def _with_draft(learner: LearnerClient, head: DraftHead) -> Iterator[tuple[str, Tensor]]:
    """Yield the published weights: the policy's, and those of its draft head."""
    yield from learner.weights()
    yield from head.published_weights()


def make_past_selves(policy: LoadedPolicy, config: PolicyConfig, rule: PastSelvesRule) -> TorchPastSelves:
    """Create an engine in this process for earlier selves of the policy. Call it before the run's generator is created."""

    make_engine = partial(make_embedded_engine, policy=policy, config=config)
    return TorchPastSelves(policy.network, make_engine, every=rule.snapshot_every, size=rule.pool_size)


def pool_engines(
    engines: Sequence[Engine],
    exporter: Exporter,
    bundle: TokenizerBundle,
    config: PolicyConfig,
    spec: GeneratorSpec,
    *,
    adapters: bool,
    allow_shrink: bool = False,
    memory: LearnerMemory | None = None,
) -> SyncedGenerator:
    """Combine engines with their own weights into one generator, with a publisher of the learner's weights and a canary.

    ``adapters``: only adapters are published. ``allow_shrink``: continue without engines that cannot be restarted."""
    generation = config.generation
    uses_engines = generation.uses_engines

    async def compute_logprobs(batch: Batch) -> Tensor:
        return require_token_outputs(await spec.learner.score(batch)).logprobs

    canary = make_canary(
        bundle.template,
        generation.weight_sync,
        spec.sampling,
        compute_logprobs,
        precision=generation.engine_options.dtype if uses_engines else config.precision,
        weight_format=generation.weight_format,
        max_length=generation.engine_options.max_model_len if uses_engines else config.max_total_sequence_length,
        share_prefixes=spec.share_prefixes,
        seed=spec.seed,
    )
    options = PublishOptions(
        separate_devices=not generation.colocated.enabled or spec.max_staleness > 0,
        in_flight=spec.in_flight,
        recompute=spec.recompute,
        async_training=spec.max_staleness > 0,
        adapters=adapters,
    )
    return make_synced_pool(
        engines, exporter, generation, options, canary, note=spec.note, allow_shrink=allow_shrink, learner_memory=memory
    )


def offloads_learner(config: RolloutRunConfig, *, on_cpu: bool, shares_module: bool) -> bool:
    """Return whether the learner is offloaded while engines sample (``policy.offload``).

    ``shares_module``: the engine runs the learner's module, so its weights stay and only the training state can be offloaded."""
    if config.policy.offload == "auto" and (on_cpu or shares_module):
        return False
    alternates = config.policy.generation.colocated.enabled and config.rollout_training.max_staleness == 0
    return bool(config.policy.offload) and (alternates or shares_module)
