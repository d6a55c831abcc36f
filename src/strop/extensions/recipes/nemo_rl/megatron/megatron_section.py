"""Section ``megatron_cfg`` where Megatron Core trains: its keys are Strop's; what only NeMo-RL's workers have is left out."""

from __future__ import annotations

from collections.abc import Mapping

from strop.base_config import followed_keys
from strop.config.source import keys
from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.nemo_rl.megatron.megatron_options import (
    MEMORY,
    OF_TORCH,
    SPEED,
    TOWERS,
    move_environment,
    refuse_unknown,
    translate_multi_token_prediction,
)
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import describe, is_switched_off

UNUSED: Mapping[str, tuple[str, ...]] = {  # why -> options
    SPEED: (
        "cuda_graph_*", "inference_*", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms", "hybridep_*", "moe_pad_experts_*",
        "use_torch_fsdp2", "distributed_data_parallel_config.*", "apply_rope_fusion", "bias_activation_fusion", "attention_backend",
    ),
    MEMORY: (
        "empty_unused_memory_level", "clear_memory_caches_before_refit", "fine_grained_activation_offloading", "offload_modules",
        "fp8_cfg.force_clear_fp8_caches",
    ),
    "logits are float32, in chunks of logprob_chunk_size": (
        "defer_fp32_logits", "use_fused_linear_logprobs", "fused_linear_logprobs_chunk_size",
    ),
    "weights are read from Hugging Face folders": ("force_reconvert_from_hf", "converter_type"),
    "checkpointing.async_save saves during training": ("checkpoint",),
    "policy.precision says it": ("pipeline_dtype", "optimizer.params_dtype", "optimizer.bf16", "optimizer.fp16"),
    "the run has as many steps as its section says": ("train_iters",),
    "every loss is divided by counts of the whole optimizer step, however it is cut": (
        "calculate_per_token_loss", "cp_normalize", "do_not_average_loss", "scale_loss_by_dp_cp_size",
    ),
    "metrics of experts are not logged": ("track_moe_metrics",),
    "the model's own configuration determines it": ("moe_router_num_groups", "moe_router_group_topk"),
    "a resumed run follows the configuration": ("scheduler.*_opt_param_scheduler",),
    "adapters are float32, and each rank has those of its layers": ("peft.lora_dtype", "peft.a2a_experimental"),
    TOWERS: ("freeze_config", "freeze_vision_*", "freeze_sound_*", "radio_*"),
}  # fmt: skip
TRAINING = ("optimizer", "scheduler", "peft", "distributed_data_parallel_config")
INSTEAD = {  # of the torch learner -> of Megatron Core
    "optimizer.kwargs.lr": "optimizer.lr",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "freeze_moe_router": "freeze_moe_router",
    **{f"dtensor_cfg.{own}": to for own, to in OF_TORCH.items()},
    "dtensor_cfg": "*",
}


def carry_section(recipe: Recipe, model: str) -> None:
    """Leave a model's section as it is, but for what has no counterpart, and drop what is about the torch learner."""
    section = f"{model}.megatron_cfg"
    if _refuse_two_learners(recipe, model):
        return
    if recipe.value(f"{section}.enabled") is not True:
        recipe.set(f"{section}.enabled", True, because="policy.backend")
    for name in ("optimizer", "scheduler", "freeze_moe_router", "dtensor_cfg"):
        _drop_torch_section(recipe, model, name)
    if recipe.is_own_key(f"{model}.dtensor_cfg.enabled"):
        recipe.set(f"{model}.dtensor_cfg.enabled", False, because=f"{section}.enabled")
    for name in TRAINING if model == "teacher" else ():
        recipe.unused_if_set(f"{section}.{name}", "a teacher only scores")
    _pack_rows(recipe, model)
    move_environment(recipe, f"{section}.env_vars")
    _translate_values(recipe, section)
    for why, names in UNUSED.items():
        for key in [key for name in names for key in recipe.find(f"{section}.{name}")]:
            if not recipe.is_own_key(key):
                recipe.unused(key, why)
    for key in written_leaves(recipe, section):
        if not recipe.is_own_key(key) and not key.startswith(f"{section}.model_overrides."):
            fix = f"Remove the key; {section}.model_overrides sets attributes of Megatron Core's model."
            refuse_unknown(recipe, section, key, fix)


def _refuse_two_learners(recipe: Recipe, model: str) -> bool:
    """Refuse a model that both learners are to train, as NeMo-RL does."""
    torch, megatron = f"{model}.dtensor_cfg.enabled", f"{model}.megatron_cfg.enabled"
    both = recipe.is_written(torch) and recipe.value(torch) is True and recipe.value("policy.backend") == "auto"
    if both:
        text = f"found true, and {torch} is true: a model has one learner"
        recipe.refuse(megatron, text, f"Set {torch}=false, or say policy.backend=megatron or torch.")
        recipe.explained.append(f"{model}.dtensor_cfg")
        recipe.drop(f"{model}.megatron_cfg")
    return both


def _drop_torch_section(recipe: Recipe, model: str, name: str) -> None:
    """Drop what the torch learner would read. What was set for this run, and not by the recipe it begins with, is refused."""
    key, section = f"{model}.{name}", f"{model}.megatron_cfg"
    asked = max(recipe.layer_of(f"{section}.enabled"), recipe.layer_of("policy.backend"))
    found = [leaf for leaf in written_leaves(recipe, key) if not leaf.endswith(".enabled") and not is_default(recipe, leaf)]
    for leaf in found:
        known = name in ("optimizer", "scheduler") or recipe.is_own_key(leaf)
        if known and (recipe.layer_of(leaf) > asked or recipe.is_on_command_line(leaf)):
            inner = next(to for own, to in INSTEAD.items() if leaf.removeprefix(f"{model}.").startswith(own))
            text = f"found {describe(recipe.value(leaf))}, which Megatron Core, the learner of this run, does not read"
            recipe.refuse(leaf, text, f"Set {section}.{inner}, or policy.backend=torch.")
    if found and recipe.is_set(key):
        recipe.note(key, Effect.UNUSED, f"{section} says it where Megatron Core trains")
    recipe.drop(key)


def _pack_rows(recipe: Recipe, model: str) -> None:
    """Padded micro-batches are packed ones of as many tokens: there is no other way through the pipeline."""
    key = f"{model}.sequence_packing.enabled"
    if recipe.is_own_key(key) and recipe.value(key) is False:
        recipe.set(key, True, because=key)
        recipe.note(key, Effect.RENAMED, "rows are packed where Megatron Core trains; the gradient is the same")


def _translate_values(recipe: Recipe, section: str) -> None:
    """Read values that NeMo-RL writes otherwise, and refuse what trains another model."""
    translate_multi_token_prediction(recipe, section)
    dtype, tokens = f"{section}.moe_router_dtype", f"{section}.moe_token_dispatcher_type"
    if recipe.value(dtype) in ("none", "None"):
        recipe.set(dtype, None, because=dtype)
    if recipe.value(tokens) == "allgather" or recipe.value(f"{section}.moe_flex_dispatcher_backend") == "hybridep":
        recipe.unused_if_set(tokens, "alltoall brings the same tokens to the same experts")
        recipe.drop(f"{section}.moe_enable_deepep")
    if recipe.value(f"{section}.transformer_impl") == "inference_optimized":
        recipe.unused(f"{section}.transformer_impl", "the same layers train and sample without it")
    balancing, weight = f"{section}.moe_router_load_balancing_type", f"{section}.moe_aux_loss_coeff"
    ranks = recipe.value(f"{section}.expert_model_parallel_size", 1)  # of any type: the schema refuses what is no number
    if isinstance(ranks, int) and ranks > 1 and not is_switched_off(recipe.value(balancing)) and not recipe.is_set(weight):
        text = f"no loss that balances the load of experts is added unless {weight} is set"
        recipe.note(balancing, Effect.CHANGED, text, f"Set {weight}, such as the model's router_aux_loss_coef.")
    _refuse_data_types(recipe, section)
    if recipe.value(f"{section}.freeze_config.freeze_language_model", False):
        key = f"{section}.freeze_config.freeze_language_model"
        recipe.refuse(key, "found true, but then nothing that models of text have is trained", "Set it to false.")


def _refuse_data_types(recipe: Recipe, section: str) -> None:
    half, masters = f"{section}.optimizer.fp16", f"{section}.optimizer.bf16"
    if recipe.value(half):
        recipe.refuse(half, "found true, but float16 is not in this version", "Set it to false.")
    if recipe.value(masters) is False and recipe.value(f"{section.split('.')[0]}.precision") == "bfloat16":
        recipe.note(masters, Effect.CHANGED, "bfloat16 weights have float32 masters in the optimizer, also where this is false")
        recipe.drop(masters)


def written_leaves(recipe: Recipe, key: str) -> list[str]:
    """Return the keys that the recipe writes at or under a key."""
    value = recipe.value(key)
    if isinstance(value, Mapping) and value:
        return [leaf for name in value for leaf in written_leaves(recipe, f"{key}.{name}")]
    return [key] if recipe.is_set(key) else []


def is_default(recipe: Recipe, key: str) -> bool:
    """Return whether a key or section of the recipe says only what the schema's defaults do."""
    path = tuple(key.split("."))
    field = keys.find_field(recipe.root, path)
    if field is not None and followed_keys(field):
        return True
    value = recipe.value(key)
    if isinstance(value, Mapping) and value:
        return all(is_default(recipe, f"{key}.{name}") for name in value)
    default = get_at(keys.default_values(recipe.root), path)
    return value in (None, list(default) if isinstance(default, tuple) else default)
