"""What a plan may choose for a run, and the overrides that configure a choice."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from strop.build.dry_run.planned_learner import read_learner_choice
from strop.build.dry_run.run_plan_inputs import count_references
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import PpoRunConfig
from strop.distributed.placement import count_engines
from strop.learner.model_config import ModelConfig
from strop.planning.layouts.layout_choice import ChoiceSpace, DeviceSplit, EngineChoice, LayoutChoice, LearnerChoice
from strop.planning.plan_inputs import PlanInputs

GENERATION = "policy.generation"
TORCH_KEYS = {
    "tensor": "tensor_parallel_size",
    "context": "context_parallel_size",
    "stages": "pipeline_parallel_size",
    "expert": "expert_parallel_size",
    "replicate": "dp_replicate_size",
    "sequence": "sequence_parallel",
    "checkpointed": "activation_checkpointing",
    "offloads_activations": "activation_offload",
    "offloads_weights": "cpu_offload",
}
MEGATRON_KEYS = {
    "tensor": "tensor_model_parallel_size",
    "context": "context_parallel_size",
    "stages": "pipeline_model_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "sequence": "sequence_parallel",
    "checkpointed": "activation_checkpointing",
}


def read_space(config: TrainingRunConfig, inputs: PlanInputs) -> ChoiceSpace:
    """Return what may be chosen for a run. Engines that run the learner's module, and stages of vLLM, stay as they are configured."""
    counts = count_devices(config)
    generation = config.policy.generation if isinstance(config, RolloutRunConfig) else None
    engine = None
    if counts.uses_ray and inputs.engine is not None and generation is not None and generation.uses_engines:
        staged = generation.uses_vllm and generation.vllm_cfg.pipeline_parallel_size > 1
        engine = None if staged else EngineChoice(size=inputs.engine.size, memory_share=inputs.engine.memory_share)
    return ChoiceSpace(
        nodes=counts.nodes if counts.uses_ray else 1,
        per_node=counts.per_node if counts.uses_ray else 1,
        megatron=config.policy.uses_megatron,
        given=LayoutChoice(split=_read_split(config), learner=read_learner_choice(config.policy), engine=engine),
        ranks=counts.uses_ray,
        references=count_references(config),
        spans_nodes=generation is not None and generation.uses_vllm,
        budget_is_measured=config.policy.batching.train_mb_tokens == "auto",
        critic_alike=_has_critic_alike(config),
    )


def _has_critic_alike(config: TrainingRunConfig) -> bool:
    """Whether a critic can have the policy's layout: a model of its own in the same kind of learner."""
    return (
        isinstance(config, PpoRunConfig)
        and not config.value.head_only
        and config.value.megatron_cfg.enabled == config.policy.megatron_cfg.enabled
    )


def _read_split(config: TrainingRunConfig) -> DeviceSplit:
    counts = count_devices(config)
    if counts.colocated or not counts.uses_ray:
        return DeviceSplit()
    if counts.engine_nodes is not None and counts.nodes > 1:
        return DeviceSplit(shared=False, nodes=counts.engine_nodes)
    return DeviceSplit(shared=False, per_node=counts.generating_per_node)


def list_overrides(
    choice: LayoutChoice, space: ChoiceSpace, config: TrainingRunConfig, layers: int, critic_layers: int | None = None
) -> tuple[str, ...]:
    """Return ``key=value`` for each setting of a choice that differs from the configuration.

    ``layers``: of the model. ``critic_layers``: of a critic, which is divided as the model is, if the run can.
    """
    critic: Iterator[str] = iter(())
    if isinstance(config, PpoRunConfig) and space.critic_alike and critic_layers is not None:
        critic = _of_learner(choice.learner, config.value, "value", critic_layers)
    return (
        *_of_split(choice, space, config),
        *_of_learner(choice.learner, config.policy, "policy", layers),
        *_of_reference(choice.learner, space),
        *critic,
        *_of_engine(choice, space, config),
    )


def _of_split(choice: LayoutChoice, space: ChoiceSpace, config: TrainingRunConfig) -> Iterator[str]:
    split, given = choice.split, space.given.split
    if split == given:
        return
    if split.shared != given.shared:
        yield f"{GENERATION}.colocated.enabled={str(split.shared).lower()}"
    if split.nodes is not None:
        yield f"{GENERATION}.colocated.resources.num_nodes={split.nodes}"
        yield f"{GENERATION}.colocated.resources.gpus_per_node={space.per_node}"
    elif split.per_node is not None:
        yield f"{GENERATION}.colocated.resources.gpus_per_node={split.per_node}"
        if isinstance(config, RolloutRunConfig) and config.policy.generation.colocated.resources.num_nodes is not None:
            yield f"{GENERATION}.colocated.resources.num_nodes=null"


def _of_learner(choice: LearnerChoice, model: ModelConfig, key: str, layers: int) -> Iterator[str]:
    """Yield what makes the learner of a model, whose section is ``key`` and which has so many layers, that of a choice."""
    given = read_learner_choice(model)
    section, keys = ("megatron_cfg", MEGATRON_KEYS) if model.megatron_cfg.enabled else ("dtensor_cfg", TORCH_KEYS)
    for name, own in keys.items():
        if (value := getattr(choice, name)) != getattr(given, name):
            yield f"{key}.{section}.{own}={_format(value, is_share=name == 'checkpointed')}"
    if model.megatron_cfg.enabled and choice.stages != given.stages:
        yield from _of_uneven_stages(choice.stages, model, key, layers)
    if choice.tokens != given.tokens:
        yield f"{key}.{model.batching_key}.train_mb_tokens={choice.tokens}"


def _of_reference(choice: LearnerChoice, space: ChoiceSpace) -> Iterator[str]:
    if choice.offloads_reference != space.given.learner.offloads_reference:
        yield f"policy.reference.offload={str(choice.offloads_reference).lower()}"


def _of_uneven_stages(stages: int, model: ModelConfig, key: str, layers: int) -> Iterator[str]:
    """Yield how many layers the first and the last stage have: those that stages of equal size between them leave."""
    sizes = model.megatron_cfg
    first: int | None = None
    last: int | None = None
    if layers % stages and stages > 2:
        left = layers - ceil(layers / stages) * (stages - 2)
        if left < 2:
            left = layers - layers // stages * (stages - 2)
        first, last = ceil(left / 2), left // 2
    for end, wanted, own in (
        ("first", first, sizes.num_layers_in_first_pipeline_stage),
        ("last", last, sizes.num_layers_in_last_pipeline_stage),
    ):
        if wanted != own:
            yield f"{key}.megatron_cfg.num_layers_in_{end}_pipeline_stage={'null' if wanted is None else wanted}"
    if sizes.virtual_pipeline_model_parallel_size is not None:
        yield f"{key}.megatron_cfg.virtual_pipeline_model_parallel_size=null"


def _of_engine(choice: LayoutChoice, space: ChoiceSpace, config: TrainingRunConfig) -> Iterator[str]:
    engine, given = choice.engine, space.given.engine
    if engine is None or given is None or not isinstance(config, RolloutRunConfig):
        return
    generation = config.policy.generation
    section = f"{GENERATION}.{generation.engine_key}"
    if engine.size != given.size:
        yield f"{section}.{'tp_size' if generation.uses_sglang else 'tensor_parallel_size'}={engine.size}"
    if engine.memory_share != given.memory_share:
        yield f"{section}.{'mem_fraction_static' if generation.uses_sglang else 'gpu_memory_utilization'}={engine.memory_share}"
    if count_engines(generation) is not None and (engine.size != given.size or choice.split != space.given.split):
        yield f"{section}.num_engines=null"


def _format(value: float | bool, *, is_share: bool) -> str:
    if is_share and value in (0, 1):
        return str(bool(value)).lower()
    return str(value).lower() if isinstance(value, bool) else str(value)
