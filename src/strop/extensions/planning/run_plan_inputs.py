"""Read what a plan is made from out of a run's configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.config import RecordedRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.schema.recorded_config import MOST_EXAMPLES
from strop.distributed.placement import DevicePlan, plan_devices
from strop.extensions.planning.beside_inputs import assume_sizes, read_beside
from strop.extensions.planning.engine_memory import EngineSetup
from strop.extensions.planning.model_size import ModelSize
from strop.extensions.planning.plan_inputs import CheckpointSetup, NodeSetup, PlanInputs, PlannedDevice
from strop.extensions.planning.planned_learner import offloads_reference, read_learner
from strop.generation.generation_config import GenerationConfig
from strop.learner.model_config import ModelConfig
from strop.runs.algorithm.run_algorithm import make_run_algorithm
from strop.runs.learner_backend import choose_dims
from strop.runs.summary import UNLIMITED_STEPS

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
    assert isinstance(config, RecordedRunConfig)
    return (config.policy.train_global_batch_size or MOST_EXAMPLES) * (1 if config.section == "sft" else 2)
