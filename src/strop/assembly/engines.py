"""Build the generator of a run and its weight sync: the torch engine on the learner's module, or vLLM engines in their own processes."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strop.algorithms.grpo import GRPO
from strop.assembly.roles import PRECISIONS, Policy, Speech, make_engine
from strop.config.generation import GenerationConfig, SpeculationConfig, VllmConfig, WeightSyncConfig
from strop.config.policy import PolicyConfig
from strop.data.packing import pack
from strop.generation.base import Engine, Generator
from strop.generation.replicas import Replicas
from strop.metrics import Metric, Metrics
from strop.models.adapters import low_rank_layers
from strop.rollouts.template import ChatTemplate
from strop.sampling import Sampling
from strop.training.base import Learner, token_outputs
from strop.types import Group, Rollout, Task, Turn, user
from strop.weights.adapters import LowRankSource
from strop.weights.base import Answer, Sender, WeightHolder, WeightSync
from strop.weights.broadcast import BroadcastSender
from strop.weights.cuda_ipc import CudaIpcSender
from strop.weights.export import Exporter, local_exporter
from strop.weights.folder import FolderSender
from strop.weights.memory import MemorySender
from strop.weights.proof import Canary, ProofSchedule
from strop.weights.publish import PublishedWeights, PublishOptions
from strop.weights.shared import SharedWeights

if TYPE_CHECKING:
    from strop.generation.vllm.arguments import EngineOptions
    from strop.generation.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

CANARY_TOKENS = 16  # sampled for each prompt of the canary
CANARY_TOLERANCE = {
    "float32": 0.002,
    "bfloat16": 0.1,
}  # mean difference in nats; a tied head that was not updated differs by 0.1 to 10
CANARY_TEXTS = (
    "A farmer has 17 sheep, 23 goats and 4 dogs. On Monday she sells 5 of the sheep and buys 9 goats. On Tuesday two of the dogs run away, "
    "and one comes back on Wednesday with a kitten. How many animals are on the farm then? Explain every step, then answer.",
    "Write a function in Python that takes a list of integers and returns the length of its longest strictly increasing run of neighbours. "
    "Say what it returns for [], for [3] and for [1, 2, 2, 3, 4], and why it takes a time that is linear in the length of the list.",
)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generator, and the weight sync that keeps its weights up to date with the learner's."""

    generator: Generator
    weights: WeightSync


@dataclass(frozen=True, kw_only=True)
class GenerationNeeds:
    """What a run requires of its generator."""

    sampling: Sampling
    learner: Learner  # of the policy, whose weights are published
    max_staleness: int
    in_flight: bool
    recompute: bool
    share_prefixes: bool
    seed: int
    note: Callable[[str], None]
    outputs: Path  # folder for the files and logs of engines


def make_generation(policy: Policy, config: PolicyConfig, needs: GenerationNeeds) -> Generation:
    """Make the torch engine in this process, or vLLM engines in child processes. Raises ValueError for options that do not go together."""
    options = config.generation
    if options.backend != "vllm":
        engine = make_engine(policy, options, config.max_total_sequence_length)
        return Generation(generator=engine, weights=SharedWeights([engine]))
    on_cpu = policy.network.device.type == "cpu"
    if needs.max_staleness > 0 and options.colocated.enabled and not on_cpu:
        raise ValueError(
            "policy.generation.colocated.enabled is true and training is asynchronous: an engine on the learner's GPU must sleep while the "
            "learner trains. Set it to false, with a GPU for each engine, or train synchronously"
        )
    adapters = options.weight_sync.adapters_alone and bool(low_rank_layers(policy.network.model))
    folder = describe_model(policy, needs.outputs / "model")
    engines = make_vllm_engines(
        str(folder),
        policy,
        options,
        on_cpu=on_cpu,
        threads=config.num_threads,
        adapter_rank=config.dtensor_cfg.lora_cfg.dim if adapters else None,
        outputs=needs.outputs,
    )
    exporter = local_exporter(
        needs.learner.weights,
        sender_maker(options, policy.network.device, needs.outputs / "weights"),
        dtype=PRECISIONS[options.vllm_cfg.precision],
        keep_copy=needs.max_staleness > 0,
        adapters=LowRankSource(policy.network.model) if adapters else None,
    )
    precision, length = options.vllm_cfg.precision, options.vllm_cfg.max_model_len
    return published(engines, exporter, policy, options, needs, precision=precision, length=length, adapters=adapters)


def published(
    engines: Sequence[Engine],
    exporter: Exporter,
    speech: Speech,
    options: GenerationConfig,
    needs: GenerationNeeds,
    *,
    precision: str,
    length: int,
    adapters: bool = False,
    shrinks: bool = False,
) -> Generation:
    """Put engines that hold their own weights behind one generator, with a publisher of the learner's weights.

    ``precision``: of the engines' weights. ``length``: their longest sequence, in tokens. ``allow_shrink``: continue without engines that
    cannot be restarted."""
    replicas = Replicas(engines, max_restarts=options.vllm_cfg.max_restarts, shrinks=shrinks)
    weights = PublishedWeights(
        exporter,
        engines,
        PublishOptions(
            apart=not options.colocated.enabled or needs.max_staleness > 0,
            in_flight=needs.in_flight,
            recompute=needs.recompute,
            learner_goes_on=needs.max_staleness > 0,
            adapters=adapters,
            proof=ProofSchedule(options.weight_sync.proof, options.weight_sync.proof_every),
        ),
        canary=make_canary(speech, options, needs, precision=precision, length=length),
        published=replicas.published,
        drop=replicas.drop,
        note=needs.note,
    )
    replicas.revive = weights.revive
    replicas.on_close.append(weights.close)
    return Generation(generator=replicas, weights=CountingWeights(weights, replicas))


async def make_serving_engine(policy: Policy, config: GenerationConfig, length: int, *, threads: int | None) -> Generator:
    """Make a generator that samples from ``policy`` with its current weights. Raises ValueError for options that do not go together."""
    if config.backend != "vllm":
        embedded = make_engine(policy, config, length)
        embedded.resume(0)
        return embedded
    folder = describe_model(policy, Path(tempfile.mkdtemp(prefix="strop-model-")), weights=True)
    on_cpu = policy.network.device.type == "cpu"
    engines = make_vllm_engines(str(folder), policy, config, on_cpu=on_cpu, threads=threads, load_weights=True)
    replicas = Replicas(
        engines,
        max_restarts=config.vllm_cfg.max_restarts,
        on_close=[lambda: shutil.rmtree(folder, ignore_errors=True)],
    )

    from strop.generation.vllm.engine import VllmEngine

    async def revive(engine: WeightHolder) -> None:
        assert isinstance(engine, VllmEngine)
        await engine.start()
        await engine.use_own_weights(0)

    replicas.revive = revive
    for engine in engines:
        await revive(engine)
    replicas.published(0)
    return replicas


class CountingWeights:
    """A ``WeightSync`` that adds the engines' metrics since the last publish."""

    def __init__(self, weights: PublishedWeights, replicas: Replicas) -> None:
        self.weights, self.replicas = weights, replicas

    async def lend_to_learner(self) -> None:
        await self.weights.lend_to_learner()

    async def publish(self, version: int) -> Metrics:
        published = await self.weights.publish(version)
        return {**published, **{name: Metric(value) for name, value in self.replicas.metrics().items()}}


def describe_model(policy: Policy, folder: Path, *, weights: bool = False) -> Path:
    """Write the folder that vLLM builds the model from: configuration and tokenizer. ``weights``: also the weights, for an engine that is
    sent none."""
    folder.mkdir(parents=True, exist_ok=True)
    model = policy.network.model
    if weights:
        model.save_pretrained(folder)
    else:
        config = type(model.config).from_dict(model.config.to_dict())
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def make_vllm_engines(
    folder: str,
    policy: Policy,
    config: GenerationConfig,
    *,
    on_cpu: bool,
    threads: int | None,
    adapter_rank: int | None = None,
    load_weights: bool = False,
    outputs: Path | None = None,
) -> list[VllmEngine]:
    """Make the configured number of vLLM engines, without starting them. Each one logs to its own file in ``outputs``.

    Raises ValueError if vLLM is not installed."""
    try:
        from strop.generation.vllm.engine import VllmEngine
    except ImportError as error:
        raise ValueError(
            f"policy.generation.backend is vllm, and vLLM cannot be imported here ({error}): install it (`pip install vllm`, or `make "
            "setup-vllm` on a machine without a GPU), or set policy.generation.backend=torch"
        ) from error
    return [
        VllmEngine(
            f"engine {number}",
            vllm_options(
                folder,
                config,
                on_cpu=on_cpu,
                adapter_rank=adapter_rank,
                load_weights=load_weights,
                output=None if outputs is None else outputs / f"engine_{number}.log",
                environment=environment(config.vllm_cfg, number, on_cpu, threads, apart=not config.colocated.enabled),
            ),
            policy.tokenizer,
            stop_ids=policy.stop_ids,
        )
        for number in range(config.vllm_cfg.engines)
    ]


def vllm_options(
    folder: str,
    config: GenerationConfig,
    *,
    on_cpu: bool,
    adapter_rank: int | None,
    load_weights: bool,
    output: Path | None,
    environment: Mapping[str, str],
) -> EngineOptions:
    """Make the options that one vLLM engine is started with."""
    from strop.generation.vllm.arguments import EngineOptions

    options = config.vllm_cfg
    return EngineOptions(
        model=folder,
        dtype=options.precision,
        max_model_len=options.max_model_len,
        on_cpu=on_cpu,
        load_weights=load_weights,
        tensor_parallel_size=options.tensor_parallel_size,
        pipeline_parallel_size=options.pipeline_parallel_size,
        expert_parallel=options.expert_parallel_size > 1,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_gb=options.kv_cache_memory_gb,
        kv_cache_dtype=options.kv_cache_dtype,
        max_num_seqs=options.max_num_seqs,
        prefix_caching=options.enable_prefix_caching,
        enforce_eager=options.enforce_eager,
        max_logprobs=max(20, config.top_k or 0) if config.keep_sampling_mask else 20,
        adapter_rank=adapter_rank,
        speculative=speculative(options.speculation),
        sleep_level=min(options.sleep_level, 1) if adapter_rank is not None else options.sleep_level,
        startup_seconds=options.startup_seconds,
        further=config.vllm_kwargs,
        output=output,
        environment=environment,
    )


def speculative(config: SpeculationConfig) -> Mapping[str, Any] | None:
    """Return vLLM's ``speculative_config``; None without speculative decoding."""
    if config.method is None:
        return None
    found: dict[str, Any] = {"method": config.method, "num_speculative_tokens": config.num_speculative_tokens}
    if config.method == "ngram":
        return {**found, "prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    return {**found, "model": config.model_name}


def environment(config: VllmConfig, number: int, on_cpu: bool, threads: int | None, *, apart: bool) -> dict[str, str]:
    """Return the environment variables of engine ``number``: its CPU threads, or its GPUs. ``separate_devices``: GPU 0 is the
    learner's."""
    if on_cpu:
        return {"OMP_NUM_THREADS": str(config.num_threads or threads or torch.get_num_threads()), **config.env_vars}
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    first = (1 if apart else 0) + number * size
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + place) for place in range(size)), **config.env_vars}


def sender_maker(
    config: GenerationConfig, device: torch.device, own_folder: Path, *, host: str = "127.0.0.1", near: bool = True
) -> Callable[[int], Sender]:
    """Return a factory of senders for the configured transport. ``same_machine``: learner and engines are on one machine. ``host``: the
    address of the sender's machine."""
    sync: WeightSyncConfig = config.weight_sync
    size: dict[str, Any] = {} if sync.bucket_mb is None else {"bucket_size": int(sync.bucket_mb * 2**20)}
    limit = sync.timeout_seconds
    transport: str = sync.transport
    if transport == "auto":
        apart = not config.colocated.enabled
        several = not apart and config.vllm_cfg.engines > 1  # the second engine cannot access the learner's GPU
        close = "memory" if device.type == "cpu" or several else "broadcast" if apart else "cuda_ipc"
        transport = close if near else "broadcast"
    match transport:
        case "memory":
            return lambda receivers: MemorySender(receivers, timeout=limit, **size)
        case "cuda_ipc":
            return lambda receivers: CudaIpcSender(receivers, device=device, timeout=limit, **size)
        case "broadcast":
            if device.type == "cuda" and config.colocated.enabled and near:
                raise ValueError(
                    "policy.generation.weight_sync.transport is broadcast, and NCCL does not connect two processes on one GPU: set it to "
                    "auto, or policy.generation.colocated.enabled=false"
                )
            backend: Any = "nccl" if device.type == "cuda" and not config.colocated.enabled else "gloo"
            at = device if backend == "nccl" else torch.device("cpu")
            return lambda receivers: BroadcastSender(receivers, backend=backend, device=at, host=host, timeout=limit, **size)
        case _:
            folder = Path(sync.folder) if sync.folder else own_folder
            return lambda receivers: FolderSender(folder, receivers, timeout=limit)


def make_canary(speech: Speech, config: GenerationConfig, needs: GenerationNeeds, *, precision: str, length: int) -> Canary:
    """Make the canary that compares an engine's log-probabilities with the learner's after a publish."""
    sampling = needs.sampling
    room = max(1, length - CANARY_TOKENS)
    asked = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        record_kept=sampling.record_kept,
        max_new_tokens=CANARY_TOKENS,
    )
    return Canary(
        prompts=canary_prompts(speech.template, room),
        sampling=asked,
        score=canary_score(needs.learner, share_prefixes=needs.share_prefixes),
        tolerance=config.weight_sync.canary_tolerance or CANARY_TOLERANCE[precision],
        seed=needs.seed,
    )


def canary_prompts(template: ChatTemplate, room: int) -> tuple[tuple[int, ...], ...]:
    """Return prompts of at most ``room`` tokens each, long enough to fill blocks of a prefix cache if ``room`` allows it."""
    return tuple(tuple(template.prompt([user(text)])[-room:]) for text in CANARY_TEXTS)


def canary_score(
    learner: Learner, *, share_prefixes: bool
) -> Callable[[Sequence[Sequence[int]], Sequence[Answer]], Awaitable[list[Tensor]]]:
    """Return a function that scores canary samples with the learner, through the same path as a training batch."""

    async def score(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> list[Tensor]:
        groups = [_as_group(place, *pair) for place, pair in enumerate(zip(prompts, answers, strict=True))]
        batch = pack(groups, GRPO(), share_prefixes=share_prefixes)
        logprobs = token_outputs(await learner.score(batch)).logprobs.float().cpu()
        return [logprobs[batch.sequence == place] for place in range(len(groups))]

    return score


def _as_group(place: int, prompt: Iterable[int], answer: Answer) -> Group:
    turn = Turn(
        author="policy",
        tokens=answer.tokens,
        text="",
        logprobs=answer.logprobs,
        versions=torch.zeros(len(answer.tokens), dtype=torch.int32),
        kept=answer.kept,
    )
    rollout = Rollout(
        task=Task(id=f"canary {place}"), sample=0, seed=0, messages=(), prompt=torch.tensor(list(prompt)), turns=(turn,)
    )
    return Group(index=-1 - place, environment="canary", version=0, rollouts=(rollout,))
