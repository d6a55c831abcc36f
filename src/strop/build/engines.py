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

from strop.build.models import PRECISIONS, LoadedPolicy, TokenizerBundle, make_torch_engine
from strop.config.schema.policy_config import PolicyConfig
from strop.data.packing import pack
from strop.generation.base import Engine, Generator
from strop.generation.generation_config import GenerationConfig
from strop.generation.pool import EnginePool
from strop.generation.vllm.vllm_config import SpeculationConfig, VllmConfig
from strop.learner.base import require_token_outputs
from strop.learner.client import LearnerClient
from strop.metrics import Metric, Metrics
from strop.models.adapters import lora_layers
from strop.models.chat_template import ChatTemplate
from strop.problems import raise_problems
from strop.sampling import Sampling
from strop.types import Group, Rollout, Task, Turn, user
from strop.weight_sync.base import CanarySample, Sender, UpdatableEngine, WeightSync
from strop.weight_sync.exporter import Exporter, LocalAdapterSource, make_local_exporter
from strop.weight_sync.in_process import InProcessWeights
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.cuda_ipc import CudaIpcSender
from strop.weight_sync.transports.host_memory import MemorySender
from strop.weight_sync.transports.shared_folder import FolderSender
from strop.weight_sync.verification import Canary, VerificationSchedule
from strop.weight_sync.weight_sync_config import WeightSyncConfig

if TYPE_CHECKING:
    from strop.generation.vllm.engine_args import VllmOptions
    from strop.generation.vllm.vllm_engine import VllmEngine

log = logging.getLogger(__name__)

CANARY_TOKENS = 16  # sampled for each prompt of the canary
# Mean difference in nats, by precision; a tied head that was not updated differs by 0.1 to 10.
CANARY_TOLERANCE = {"float32": 0.002, "bfloat16": 0.1}
CANARY_TEXTS = (
    "A farmer has 17 sheep, 23 goats and 4 dogs. On Monday she sells 5 of the sheep and buys 9 goats. On Tuesday two of the dogs run away, "
    "and one comes back on Wednesday with a kitten. How many animals are on the farm then? Explain every step, then answer.",
    "Write a function in Python that takes a list of integers and returns the length of its longest strictly increasing run of neighbours. "
    "Say what it returns for [], for [3] and for [1, 2, 2, 3, 4], and why it takes a time that is linear in the length of the list.",
)


@dataclass(frozen=True, kw_only=True)
class SyncedGenerator:
    """A generator, and the weight sync that keeps its weights up to date with the learner's."""

    generator: Generator
    weights: WeightSync


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


def make_generator(policy: LoadedPolicy, config: PolicyConfig, spec: GeneratorSpec) -> SyncedGenerator:
    """Make the torch engine in this process, or vLLM engines in child processes. Raises ValueError for options that do not go together."""
    options = config.generation
    if options.backend != "vllm":
        engine = make_torch_engine(policy, options, config.max_total_sequence_length)
        return SyncedGenerator(generator=engine, weights=InProcessWeights([engine]))
    on_cpu = policy.network.device.type == "cpu"
    adapters = options.weight_sync.adapters_alone and bool(lora_layers(policy.network.model))
    folder = write_model_folder(policy, spec.output_folder / "model")
    engines = make_vllm_engines(
        str(folder),
        policy,
        options,
        on_cpu=on_cpu,
        threads=config.num_threads,
        max_lora_rank=config.dtensor_cfg.lora_cfg.dim if adapters else None,
        outputs=spec.output_folder,
    )
    exporter = make_local_exporter(
        spec.learner.weights,
        make_sender_factory(options, policy.network.device, spec.output_folder / "weights"),
        dtype=PRECISIONS[options.vllm_cfg.precision],
        keep_snapshot=spec.max_staleness > 0,
        adapters=LocalAdapterSource(policy.network.model) if adapters else None,
    )
    precision, length = options.vllm_cfg.precision, options.vllm_cfg.max_model_len
    return make_pooled_generator(engines, exporter, policy, options, spec, precision=precision, length=length, adapters=adapters)


def make_pooled_generator(
    engines: Sequence[Engine],
    exporter: Exporter,
    bundle: TokenizerBundle,
    options: GenerationConfig,
    spec: GeneratorSpec,
    *,
    precision: str,
    length: int,
    adapters: bool = False,
    allow_shrink: bool = False,
) -> SyncedGenerator:
    """Put engines that hold their own weights behind one generator, with a publisher of the learner's weights.

    ``precision``: of the engines' weights. ``length``: their longest sequence, in tokens. ``allow_shrink``: continue without engines that
    cannot be restarted."""
    pool = EnginePool(engines, max_restarts=options.vllm_cfg.max_restarts, allow_shrink=allow_shrink)
    weights = WeightPublisher(
        exporter,
        engines,
        PublishOptions(
            separate_devices=not options.colocated.enabled or spec.max_staleness > 0,
            in_flight=spec.in_flight,
            recompute=spec.recompute,
            async_training=spec.max_staleness > 0,
            adapters=adapters,
            proof=VerificationSchedule(options.weight_sync.proof, options.weight_sync.proof_every),
        ),
        canary=make_canary(bundle, options, spec, precision=precision, length=length),
        on_published=pool.set_version,
        drop_engine=pool.drop,
        note=spec.note,
    )
    pool.restart_engine = weights.restart_engine
    pool.on_close.append(weights.close)
    return SyncedGenerator(generator=pool, weights=MeteredWeightSync(weights, pool))


async def make_serving_engine(policy: LoadedPolicy, config: GenerationConfig, length: int, *, threads: int | None) -> Generator:
    """Make a generator that samples from ``policy`` with its current weights. Raises ValueError for options that do not go together."""
    if config.backend != "vllm":
        torch_engine = make_torch_engine(policy, config, length)
        torch_engine.resume(0)
        return torch_engine
    folder = write_model_folder(policy, Path(tempfile.mkdtemp(prefix="strop-model-")), weights=True)
    on_cpu = policy.network.device.type == "cpu"
    engines = make_vllm_engines(str(folder), policy, config, on_cpu=on_cpu, threads=threads, load_weights=True)
    pool = EnginePool(
        engines,
        max_restarts=config.vllm_cfg.max_restarts,
        on_close=[lambda: shutil.rmtree(folder, ignore_errors=True)],
    )

    from strop.generation.vllm.vllm_engine import VllmEngine

    async def restart(engine: UpdatableEngine) -> None:
        assert isinstance(engine, VllmEngine)
        await engine.start()
        await engine.use_own_weights(0)

    pool.restart_engine = restart
    for engine in engines:
        await restart(engine)
    pool.set_version(0)
    return pool


class MeteredWeightSync:
    """A ``WeightSync`` that adds the engines' metrics since the last publish."""

    def __init__(self, weights: WeightPublisher, pool: EnginePool) -> None:
        self.weights, self.pool = weights, pool

    async def yield_device(self) -> None:
        await self.weights.yield_device()

    async def publish(self, version: int) -> Metrics:
        metrics = await self.weights.publish(version)
        return {**metrics, **{name: Metric(value) for name, value in self.pool.collect_metrics().items()}}


def write_model_folder(policy: LoadedPolicy, folder: Path, *, weights: bool = False) -> Path:
    """Write the folder that vLLM builds the model from: configuration and tokenizer. ``weights``: also the weights, for an engine that
    receives none from a learner."""
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
    policy: LoadedPolicy,
    config: GenerationConfig,
    *,
    on_cpu: bool,
    threads: int | None,
    max_lora_rank: int | None = None,
    load_weights: bool = False,
    outputs: Path | None = None,
) -> list[VllmEngine]:
    """Make the configured number of vLLM engines, without starting them. Each one logs to its own file in ``outputs``.

    Raises ValueError if vLLM is not installed."""
    try:
        from strop.generation.vllm.vllm_engine import VllmEngine
    except ImportError as error:
        raise ValueError(
            f"policy.generation.backend is vllm, and vLLM cannot be imported here ({error}): install it (`pip install vllm`, or `make "
            "setup-vllm` on a machine without a GPU), or set policy.generation.backend=torch"
        ) from error
    return [
        VllmEngine(
            f"engine {number}",
            make_vllm_options(
                folder,
                config,
                on_cpu=on_cpu,
                max_lora_rank=max_lora_rank,
                load_weights=load_weights,
                output=None if outputs is None else outputs / f"engine_{number}.log",
                environment=make_engine_env(
                    config.vllm_cfg, number, on_cpu, threads, separate_devices=not config.colocated.enabled
                ),
            ),
            policy.tokenizer,
            stop_ids=policy.stop_ids,
        )
        for number in range(config.vllm_cfg.num_local_engines)
    ]


def make_vllm_options(
    folder: str,
    config: GenerationConfig,
    *,
    on_cpu: bool,
    max_lora_rank: int | None,
    load_weights: bool,
    output: Path | None,
    environment: Mapping[str, str],
) -> VllmOptions:
    """Make the options that one vLLM engine is started with."""
    from strop.generation.vllm.engine_args import VllmOptions

    options = config.vllm_cfg
    return VllmOptions(
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
        max_lora_rank=max_lora_rank,
        speculative_config=make_speculative_config(options.speculation),
        sleep_level=min(options.sleep_level, 1) if max_lora_rank is not None else options.sleep_level,
        startup_seconds=options.startup_seconds,
        extra_args=config.vllm_kwargs,
        output_file=output,
        environment=environment,
    )


def make_speculative_config(config: SpeculationConfig) -> Mapping[str, Any] | None:
    """Return vLLM's ``speculative_config``; None without speculative decoding."""
    if config.method is None:
        return None
    options: dict[str, Any] = {"method": config.method, "num_speculative_tokens": config.num_speculative_tokens}
    if config.method == "ngram":
        return {**options, "prompt_lookup_min": config.prompt_lookup_min, "prompt_lookup_max": config.prompt_lookup_max}
    return {**options, "model": config.model_name}


def make_engine_env(
    config: VllmConfig, number: int, on_cpu: bool, threads: int | None, *, separate_devices: bool
) -> dict[str, str]:
    """Return the environment variables of engine ``number``: its CPU threads, or its GPUs. ``separate_devices``: GPU 0 is the
    learner's."""
    if on_cpu:
        return {"OMP_NUM_THREADS": str(config.num_threads or threads or torch.get_num_threads()), **config.env_vars}
    size = config.tensor_parallel_size * config.pipeline_parallel_size
    first = (1 if separate_devices else 0) + number * size
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(first + offset) for offset in range(size)), **config.env_vars}


def make_sender_factory(
    config: GenerationConfig, device: torch.device, default_folder: Path, *, host: str = "127.0.0.1", same_machine: bool = True
) -> Callable[[int], Sender]:
    """Return a factory of senders for the configured transport. ``same_machine``: learner and engines are on one machine. ``host``: the
    address of the sender's machine. Raises ValueError for a transport that does not connect them."""
    raise_problems(config.transport_errors("policy.generation", device.type, same_machine=same_machine))
    sync: WeightSyncConfig = config.weight_sync
    size: dict[str, Any] = {} if sync.bucket_mb is None else {"bucket_size": int(sync.bucket_mb * 2**20)}
    timeout = sync.timeout_seconds
    transport: str = sync.transport
    if transport == "auto":
        separate = not config.colocated.enabled
        many_engines = not separate and config.vllm_cfg.num_local_engines > 1  # only the first can access the learner's GPU
        local = "memory" if device.type == "cpu" or many_engines else "broadcast" if separate else "cuda_ipc"
        transport = local if same_machine else "broadcast"
    match transport:
        case "memory":
            return lambda receivers: MemorySender(receivers, timeout=timeout, **size)
        case "cuda_ipc":
            return lambda receivers: CudaIpcSender(receivers, device=device, timeout=timeout, **size)
        case "broadcast":
            backend: Any = "nccl" if device.type == "cuda" and not config.colocated.enabled else "gloo"
            backend_device = device if backend == "nccl" else torch.device("cpu")
            return lambda receivers: BroadcastSender(
                receivers, backend=backend, device=backend_device, host=host, timeout=timeout, **size
            )
        case _:
            folder = Path(sync.folder) if sync.folder else default_folder
            return lambda receivers: FolderSender(folder, receivers, timeout=timeout)


def make_canary(bundle: TokenizerBundle, config: GenerationConfig, spec: GeneratorSpec, *, precision: str, length: int) -> Canary:
    """Make the canary that compares an engine's log-probabilities with the learner's after a publish."""
    sampling = spec.sampling
    max_prompt = max(1, length - CANARY_TOKENS)
    canary_sampling = Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        record_sampling_mask=sampling.record_sampling_mask,
        max_new_tokens=CANARY_TOKENS,
    )
    return Canary(
        prompts=make_canary_prompts(bundle.template, max_prompt),
        sampling=canary_sampling,
        score=make_canary_scorer(spec.learner, share_prefixes=spec.share_prefixes),
        tolerance=config.weight_sync.canary_tolerance or CANARY_TOLERANCE[precision],
        seed=spec.seed,
    )


def make_canary_prompts(template: ChatTemplate, max_length: int) -> tuple[tuple[int, ...], ...]:
    """Return prompts of at most ``max_length`` tokens each, long enough to fill blocks of a prefix cache if that allows it."""
    return tuple(tuple(template.encode_prompt([user(text)])[-max_length:]) for text in CANARY_TEXTS)


def make_canary_scorer(
    learner: LearnerClient, *, share_prefixes: bool
) -> Callable[[Sequence[Sequence[int]], Sequence[CanarySample]], Awaitable[list[Tensor]]]:
    """Return a function that scores canary samples with the learner, through the same path as a training batch."""

    async def score(prompts: Sequence[Sequence[int]], samples: Sequence[CanarySample]) -> list[Tensor]:
        groups = [_to_group(index, *pair) for index, pair in enumerate(zip(prompts, samples, strict=True))]
        batch = pack(groups, share_prefixes=share_prefixes)
        logprobs = require_token_outputs(await learner.score(batch)).logprobs.float().cpu()
        return [logprobs[batch.sequence == index] for index in range(len(groups))]

    return score


def _to_group(index: int, prompt: Iterable[int], sample: CanarySample) -> Group:
    turn = Turn(
        author="policy",
        tokens=sample.tokens,
        text="",
        logprobs=sample.logprobs,
        versions=torch.zeros(len(sample.tokens), dtype=torch.int32),
        kept=sample.kept,
    )
    rollout = Rollout(
        task=Task(id=f"canary {index}"), sample=0, seed=0, messages=(), prompt=torch.tensor(list(prompt)), turns=(turn,)
    )
    return Group(index=-1 - index, environment="canary", version=0, rollouts=(rollout,))
