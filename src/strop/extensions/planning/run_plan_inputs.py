"""Read what a plan is made from out of a run's configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import PpoRunConfig
from strop.distributed.placement import DevicePlan, plan_devices
from strop.extensions.distillation.distillation_config import DistillationRunConfig, TeacherConfig
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.planning.learner_memory import (
    BFLOAT16,
    FLOAT32,
    GPU_LOGIT_ROWS,
    LOGIT_ROWS,
    LearnerSetup,
    ModelSize,
    ParallelSizes,
    Sharding,
)
from strop.extensions.planning.plan_inputs import (
    BesideModel,
    CheckpointSetup,
    EngineSetup,
    NodeSetup,
    PlanInputs,
    PlannedDevice,
    without_output,
)
from strop.generation.generation_config import GenerationConfig
from strop.learner.learner_config import LearnerSection
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.runs.learner_backend import LearnerDims, choose_dims
from strop.runs.run_algorithm import make_run_algorithm
from strop.runs.summary import UNLIMITED_STEPS

OPTIMIZER_NUMBERS = {"SGD": 0, "Adafactor": 0, "AdamW8bit": 0.5, "Adam8bit": 0.5, "Lion": 1, "Muon": 1}
ADAPTER_SHARE = 0.01  # share of the weights trained by adapters


def read_learner(policy: ModelConfig, device: PlannedDevice, dims: LearnerDims | None) -> LearnerSetup:
    """Return the learner of a model, the policy or a critic."""
    own, moves, tokens = policy.dtensor_cfg, policy.uses_torch, _read_tokens(policy, device)
    learner = policy.learner
    checkpointed = (learner if isinstance(learner, MegatronConfig) else own).activation_checkpointing
    return LearnerSetup(
        tokens=tokens,
        longest=policy.max_total_sequence_length,
        on_cpu=device.on_cpu,
        compute_bytes=2 if policy.precision == "bfloat16" else 4,
        weight_bytes=2 if policy.weights_dtype == "bfloat16" or learner.weights_follow_precision else 4,
        gradient_bytes=BFLOAT16 if _keeps_short_gradients(learner) else FLOAT32,
        optimizer_numbers=_count_optimizer_numbers(policy),
        trained_share=1.0 if policy.adapter_rank is None else ADAPTER_SHARE,
        checkpointed_share=float(checkpointed),
        offloads_activations=moves and own.activation_offload,
        offloads_weights=moves and own.cpu_offload,
        logit_rows=policy.logprob_chunk_size or (LOGIT_ROWS if device.on_cpu else GPU_LOGIT_ROWS),
        micro_batches=2,
        sharding=Sharding() if dims is None else read_sharding(learner, dims.world_size),
    )


def _keeps_short_gradients(learner: LearnerSection) -> bool:
    return isinstance(learner, MegatronConfig) and not learner.distributed_data_parallel_config.grad_reduce_in_fp32


def read_sharding(learner: LearnerSection, world: int) -> Sharding:
    """Return how a learner divides a model over ``world`` ranks. Raises ValueError for one that plans know nothing of."""
    if isinstance(learner, MegatronConfig):
        return _read_megatron_sizes(learner).shard(world, megatron=True)
    if isinstance(learner, DtensorConfig):
        return _read_torch_sizes(learner).shard(world, megatron=False)
    raise ValueError(f"the memory of {learner.title} is not known: nothing is planned for this learner")


def _read_tokens(policy: ModelConfig, device: PlannedDevice) -> int:
    """Return the tokens of a micro-batch; of a measured one, the least that it may have."""
    budget = policy.train_tokens
    measured = policy.batching.train_mb_tokens is None and policy.train_micro_batch_size is None and not device.on_cpu
    if budget == "auto" or measured:
        return (policy.train_micro_batch_size or 1) * policy.max_total_sequence_length
    return budget


def _read_megatron_sizes(sizes: MegatronConfig) -> ParallelSizes:
    return ParallelSizes(
        tensor=sizes.tensor_model_parallel_size,
        context=sizes.context_parallel_size,
        stages=sizes.pipeline_model_parallel_size,
        expert=sizes.expert_model_parallel_size,
        expert_tensor=sizes.expert_tensor_parallel_size,
        sequence=sizes.sequence_parallel and sizes.tensor_model_parallel_size > 1,
    )


def _read_torch_sizes(own: DtensorConfig) -> ParallelSizes:
    return ParallelSizes(
        tensor=own.tensor_parallel_size,
        context=own.context_parallel_size,
        stages=own.pipeline_parallel_size,
        expert=own.expert_parallel_size,
        replicate=own.dp_replicate_size,
        sequence=own.sequence_parallel and own.tensor_parallel_size > 1,
    )


def _count_optimizer_numbers(policy: ModelConfig) -> float:
    name = policy.optimizer.name.rpartition(".")[2]
    if name == "SGD" and policy.optimizer.kwargs.get("momentum"):
        return 1
    return OPTIMIZER_NUMBERS.get(name, 2)


def offloads_reference(policy: ModelConfig) -> bool:
    """Whether a frozen copy is kept in CPU memory between uses."""
    reference = getattr(policy, "reference", None)
    return reference is not None and bool(reference.offload)


SELF = "self"  # a teacher that is the policy


def list_beside(config: TrainingRunConfig) -> dict[str, str]:
    """Return the models next to the policy: the name of each model by what it is for."""
    if isinstance(config, PpoRunConfig):
        return {} if config.value.head_only else {"critic": config.value.model_name}
    if isinstance(config, DistillationRunConfig):
        return {key: teacher.model_name for key, teacher in config.all_teachers.items()}
    return {}


def assume_sizes(config: TrainingRunConfig, sizes: Mapping[str, ModelSize]) -> Iterator[str]:
    """Say which models are taken to be as large as the policy, because theirs is unknown."""
    for key, name in list_beside(config).items():
        if name not in (SELF, config.policy.model_name, *sizes):
            yield f"the {key} is as large as the policy: the config.json of {name} is not here"


def read_beside(
    config: TrainingRunConfig, model: ModelSize, sizes: Mapping[str, ModelSize], device: PlannedDevice, world: int | None
) -> Iterator[BesideModel]:
    """Yield models next to a policy of size ``model``; ``sizes``: of models with other names. ``world``: the learner's ranks, if any."""
    if isinstance(config, PpoRunConfig) and not config.value.head_only:
        dims = None if world is None else choose_dims(config.value, world)
        setup = read_learner(config.value, device, dims)
        size = without_output(sizes.get(config.value.model_name, model))
        yield BesideModel(name="critic", model=size, setup=setup, learns=True)
    if isinstance(config, DistillationRunConfig):
        for key, teacher in config.all_teachers.items():
            shared = teacher.model_name == SELF and teacher.self_weights == "current"  # it has no weights of its own
            yield BesideModel(
                name=key,
                model=sizes.get(teacher.model_name, model),
                setup=_read_teacher(config, teacher, device, None if teacher.hosts else world),
                offloaded=teacher.offload or teacher.dtensor_cfg.cpu_offload,
                hosts=teacher.hosts,
                shares_weights=shared,
            )


def _read_teacher(config: TrainingRunConfig, teacher: TeacherConfig, device: PlannedDevice, world: int | None) -> LearnerSetup:
    own = config.policy if teacher.model_name == SELF else teacher
    sharding = Sharding()
    if world is not None:
        sharding = read_sharding(teacher.learner, world)
    tokens = teacher.logprob_mb_tokens or config.policy.score_tokens
    return LearnerSetup(
        tokens=tokens,
        longest=min(tokens, config.policy.max_total_sequence_length),
        on_cpu=device.on_cpu,
        compute_bytes=BFLOAT16 if own.precision == "bfloat16" else FLOAT32,
        weight_bytes=BFLOAT16 if own.weights_dtype == "bfloat16" else FLOAT32,
        trained_share=0.0,
        logit_rows=config.policy.logprob_chunk_size or LOGIT_ROWS,
        sharding=sharding,
    )


MOST_SEQUENCES = 256  # that an engine decodes at a time, where nothing is said


def read_inputs(
    config: TrainingRunConfig,
    model: ModelSize,
    device: PlannedDevice,
    sizes: Mapping[str, ModelSize] = MappingProxyType({}),
) -> PlanInputs:
    """Read a run. ``sizes``: of models alongside the policy that are not ``model``, by name.

    Raises PlacementError, ValueError for a layout that does not fit the devices."""
    counts = count_devices(config)
    placed = plan_devices(counts, on_cpu=False)
    training = max(1, len(placed.training))
    engines = len(placed.generation)
    rollouts = isinstance(config, RolloutRunConfig)
    generation = config.policy.generation if isinstance(config, RolloutRunConfig) else None
    shared = placed.colocated or not counts.uses_ray
    dims = choose_dims(config.policy, training) if counts.uses_ray else None
    learner = read_learner(config.policy, device, dims)
    references = count_references(config)
    kept = 0 if offloads_reference(config.policy) else references
    engine = None if generation is None else _read_engine(generation, config.policy, device, uses_ray=counts.uses_ray)
    size = 1 if engine is None else engine.size
    in_process = generation.engine_options.num_local_engines if generation is not None and generation.uses_engines else 1
    generating = size * (max(1, engines) if counts.uses_ray else in_process)
    ahead = "" if not rollouts else ", colocated" if shared else ", side by side"
    return PlanInputs(
        model=model,
        device=device,
        learner=learner,
        engine=engine,
        rollouts=_count_rollouts(config),
        training_devices=training,
        generation_devices=generating,
        shared=shared,
        layout_text=f"{dims or 'one process'}{ahead}",
        leaves=config.policy.offload is not False,
        references=kept,
        node=_read_node(config, placed, references, kept, device),
        beside=tuple(read_beside(config, model, sizes, device, training if counts.uses_ray else None)),
        checkpoints=_read_checkpoints(config),
        learner_key=f"policy.{config.policy.learner_key}",
        batch_key=f"policy.{config.policy.batching_key}.train_mb_tokens",
        assumptions=tuple(assume_sizes(config, sizes)),
    )


def _read_checkpoints(config: TrainingRunConfig) -> CheckpointSetup | None:
    """Read how many checkpoints there are at a time: the best, the newest and a draft; all that a run saves where all are kept."""
    saving, steps = config.checkpointing, config.training.last_step
    if not saving.saving_enabled:
        return None
    saved = None if steps >= UNLIMITED_STEPS else -(-steps // saving.save_period)
    kept = None if saving.keep_top_k is None else saving.keep_top_k + 2
    most = min((each for each in (saved, kept) if each is not None), default=None)
    return CheckpointSetup(count=most, saves_optimizer=saving.save_optimizer)


def _read_node(
    config: TrainingRunConfig, placed: DevicePlan, references: int, kept: int, device: PlannedDevice
) -> NodeSetup | None:
    """Read what the node with the most ranks keeps in CPU memory; None on a CPU."""
    if device.on_cpu:
        return None
    ranks = Counter(slot.node for slot in placed.training)
    engines = Counter(part.node for slot in placed.generation for part in slot.parts for _ in part.devices)
    sleeps = config.policy.generation.uses_vllm and placed.colocated if isinstance(config, RolloutRunConfig) else False
    adapters = config.policy.adapter_rank is not None
    saving = config.checkpointing
    return NodeSetup(
        ranks=max(ranks.values(), default=1),
        engine_devices=max(engines.values(), default=1),
        stages_checkpoints=saving.enabled and saving.async_save and len(placed.training) > 1,
        saves_optimizer=saving.save_optimizer,
        keeps_published=isinstance(config, RolloutRunConfig) and config.rollout_training.max_staleness > 0 and not adapters,
        engines_keep_weights=sleeps and (config.policy.generation.vllm_cfg.sleep_level == 1 or adapters),
        references=references - kept,
        loaded_references=references,
        loads_whole=config.policy.uses_torch,
    )


def _read_engine(generation: GenerationConfig, policy: ModelConfig, device: PlannedDevice, *, uses_ray: bool) -> EngineSetup:
    longest = policy.max_total_sequence_length
    if not generation.uses_engines:
        each = 2 if policy.precision == "bfloat16" else 4
        return EngineSetup(
            name="torch",
            on_cpu=device.on_cpu,
            weight_bytes=each,
            cache_bytes=each,
            shares_weights=not uses_ray,
            cache_limit=generation.torch_cfg.cache_memory_gb(None if device.on_cpu else device.memory_gib) * 2**30,
            most_sequences=generation.torch_cfg.max_num_seqs,
            longest=longest,
        )
    options = generation.engine_options
    vllm = generation.vllm_cfg if generation.uses_vllm else None
    fp8 = vllm is not None and vllm.precision == "fp8"
    return EngineSetup(
        name=generation.engine_name,
        size=options.engine_size,
        size_key=f"policy.generation.{generation.engine_key}.{options.size_key}",
        on_cpu=device.on_cpu,
        weight_bytes=1 if fp8 else 4 if options.dtype == "float32" else 2,
        cache_bytes=1 if vllm is not None and vllm.fp8_cache else 2,
        memory_share=None if device.on_cpu else options.memory_share or 0.85,
        most_sequences=(None if vllm is None else vllm.max_num_seqs) or MOST_SEQUENCES,
        longest=longest,
    )


def count_references(config: TrainingRunConfig) -> int:
    """Return how many frozen copies of the policy there are alongside it: one of a run that scores with a reference."""
    if REFERENCE_LOGPROBS not in make_run_algorithm(config).requires or config.policy.adapter_rank is not None:
        return 0  # with adapters it is the policy without them
    return 1


def _count_rollouts(config: TrainingRunConfig) -> int:
    """Return the rollouts or examples that a step trains on."""
    if isinstance(config, RolloutRunConfig):
        return config.rollout_training.rollouts_per_step
    return (config.groups_per_step or config.most_groups) * (1 if config.section == "sft" else 2)
