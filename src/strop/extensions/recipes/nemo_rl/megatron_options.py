"""What becomes of Megatron Core's other options where the torch learner trains: most change how fast it computes, not what."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.source.keys import find_nearest_keys
from strop.extensions.recipes.rules import Effect, Recipe, describe, is_switched_off

SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "activation_checkpointing",
)  # fmt: skip
NUMBERS = (
    "optimizer.lr", "optimizer.min_lr", "optimizer.weight_decay", "optimizer.adam_beta1", "optimizer.adam_beta2",
    "optimizer.adam_eps", "optimizer.sgd_momentum", "optimizer.clip_grad", "scheduler.start_weight_decay",
    "scheduler.end_weight_decay", "scheduler.lr_decay_iters", "scheduler.lr_warmup_iters", "scheduler.lr_warmup_init",
    "scheduler.lr_warmup_fraction", "scheduler.lr_wsd_decay_iters", "mtp_num_layers", "mtp_loss_scaling_factor",
)  # fmt: skip
TRANSLATED = (  # what stands in one key of the torch learner
    *(number for number in NUMBERS if "." in number), "optimizer.optimizer", "optimizer.bf16", "optimizer.fp16",
    "optimizer.decoupled_weight_decay", "scheduler.lr_decay_style", "scheduler.lr_wsd_decay_style", "scheduler.weight_decay_incr_style",
    *(f"peft.{name}" for name in (
        "enabled", "target_modules", "exclude_modules", "dim", "alpha", "dropout", "dropout_position", "lora_A_init_method",
        "lora_B_init_method",
    )),
)  # fmt: skip
SPEED = "it changes the speed of Megatron Core's kernels and communication"
MEMORY = "it changes memory and speed"
TOWERS = "it is about images and sound, and Megatron Core trains models of text alone here"
OF_TORCH = {  # of the torch learner's dtensor_cfg -> of Megatron Core
    "tensor_parallel_size": "tensor_model_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_parallel_size": "expert_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "lora_cfg": "peft",
}
MULTI_TOKEN = ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads")
UNUSED_OPTIONS: Mapping[str, tuple[str, ...]] = {  # why -> options
    SPEED: (
        "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "use_fused_weighted_squared_relu",
        "attention_backend", "cuda_graph_*", "inference_*", "transformer_impl", "moe_permute_fusion", "moe_enable_deepep",
        "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_hybridep_num_sms", "hybridep_*", "moe_shared_expert_overlap",
        "moe_grouped_gemm", "moe_pad_experts_*", "use_gloo_process_groups", "distributed_data_parallel_config",
        "use_torch_fsdp2",
    ),
    MEMORY: (
        "empty_unused_memory_level", "clear_memory_caches_before_refit", "fine_grained_activation_offloading", "offload_modules",
        "recompute_granularity", "recompute_modules", "use_fused_linear_logprobs", "fused_linear_logprobs_chunk_size",
    ),
    "layers are not cut into stages": ("num_layers_in_*_pipeline_stage", "virtual_pipeline_*", "pipeline_dtype", "account_for_*"),
    "logits are float32, in chunks of logprob_chunk_size": ("defer_fp32_logits",),
    "weights are read from and saved as Hugging Face folders": ("checkpoint", "force_reconvert_from_hf", "converter_type"),
    "the run has as many steps as its section says": ("train_iters",),
    "every loss is divided by counts of the whole optimizer step, however it is cut": (
        "calculate_per_token_loss", "cp_normalize", "do_not_average_loss", "scale_loss_by_dp_cp_size",
    ),
    "metrics of experts are not logged": ("moe_per_layer_logging", "track_moe_metrics"),
    "it is about FP8, which is switched off": ("first_last_layers_bf16", "num_layers_at_*_in_bf16"),
    "masters and moments are float32, sharded over the ranks; dtensor_cfg.cpu_offload=true keeps them in the CPU's memory": (
        "optimizer.params_dtype", "optimizer.use_distributed_optimizer", "optimizer.use_precision_aware_optimizer",
        "optimizer.optimizer_cpu_offload", "optimizer.optimizer_offload_fraction", "optimizer.overlap_*",
    ),
    "a resumed run follows the configuration": ("scheduler.*_opt_param_scheduler",),
    "adapters are float32, and each rank has those of its layers": ("peft.lora_dtype", "peft.a2a_experimental"),
    TOWERS: ("freeze_config", "freeze_vision_*", "freeze_sound_*", "radio_*"),
}  # fmt: skip


def translate_options(recipe: Recipe, section: str) -> None:
    """Note what becomes of every option of ``megatron_cfg`` that has no counterpart, and refuse those that are not known."""
    for name in TRANSLATED:
        recipe.drop(f"{section}.{name}")
    for translate in (_translate_experts, translate_multi_token_prediction, _refuse_low_precision, _move_environment):
        translate(recipe, section)
    for why, names in UNUSED_OPTIONS.items():
        for name in names:
            for key in list(recipe.find(f"{section}.{name}")):
                recipe.unused(key, why)
    for key in _remaining(recipe, section):
        if key != f"{section}.enabled":
            refuse_unknown(recipe, section, key, "Remove the key.")


def refuse_unknown(recipe: Recipe, section: str, key: str, fix: str) -> None:
    """Refuse an option that is not known, and name the one that may be meant."""
    inside, _, name = key.rpartition(".")
    nearest = [near for near in find_nearest_keys(key.split("."), recipe.root) if near.startswith(f"{inside}.")]
    if name in OF_TORCH:
        nearest = [f"{section}.{OF_TORCH[name]}"]
    what = f"found {describe(recipe.value(key))}, but what this option of Megatron Core would be here is not known"
    recipe.refuse(key, what, f"Did you mean {nearest[0]}?" if nearest else fix)


def _remaining(recipe: Recipe, section: str) -> list[str]:
    """Return the options that no rule has dropped, those of the optimizer, the schedule and the adapters one by one."""
    keys = list(recipe.find(f"{section}.*"))
    inner = {f"{section}.{name}" for name in ("optimizer", "scheduler", "peft")}
    return [leaf for key in keys for leaf in (recipe.find(f"{key}.*") if key in inner else [key])]


def refuse_wrong_switch(recipe: Recipe, model: str) -> bool:
    """Refuse a section whose ``enabled`` is neither true nor false; return whether it is."""
    key = f"{model}.megatron_cfg.enabled"
    if isinstance(recipe.value(key, False), bool):
        return False
    _refuse_value(recipe, key, "true or false")
    recipe.drop(f"{model}.megatron_cfg")
    return True


def refuse_wrong_values(recipe: Recipe, section: str) -> bool:
    """Refuse values of another type than Megatron Core's; return whether there are any."""
    found = len(recipe.differences)
    for name in ("optimizer", "scheduler", "peft", "fp8_cfg"):
        if not isinstance(recipe.value(f"{section}.{name}", {}), Mapping):
            _refuse_value(recipe, f"{section}.{name}", "a section, with keys under it")
    for name in SIZES:
        value = recipe.value(f"{section}.{name}", 1)
        if "size" in name and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            _refuse_value(recipe, f"{section}.{name}", "a whole number of at least 1")
    for name in NUMBERS:
        value = recipe.value(f"{section}.{name}", 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            _refuse_value(recipe, f"{section}.{name}", "a number of at least 0")
    return len(recipe.differences) > found


def _refuse_value(recipe: Recipe, key: str, wanted: str) -> None:
    recipe.refuse(key, f"found {describe(recipe.value(key))}; it must be {wanted}", "Correct it.")


def _translate_experts(recipe: Recipe, section: str) -> None:
    """Mixtures of experts: no loss balances the load of the router, and its bias does not change."""
    frozen = f"{section}.freeze_moe_router"
    if recipe.is_set(frozen):
        recipe.rename(frozen, f"{section.split('.')[0]}.freeze_moe_router")
    mixture = recipe.value(f"{section}.expert_model_parallel_size", 1) > 1
    changed, no_experts = Effect.CHANGED, "it is about mixtures of experts"
    balancing = not is_switched_off(recipe.value(f"{section}.moe_router_load_balancing_type", "none"))
    balancing = balancing and not (
        recipe.is_set(f"{section}.moe_aux_loss_coeff") and not recipe.value(f"{section}.moe_aux_loss_coeff")
    )
    notes: dict[str, tuple[bool, str]] = {
        "moe_router_load_balancing_type": (balancing, "no loss that balances the load of experts is added"),
        "moe_router_bias_update_rate": (mixture, "the router's expert bias stays as the model has it"),
        "moe_router_dtype": (mixture, "the router computes in the data type that the model's own code chooses"),
    }
    for name, (differs, text) in notes.items():
        key = f"{section}.{name}"
        if recipe.is_set(key):
            asked = not is_switched_off(recipe.value(key))
            recipe.note(key, changed if differs and asked else Effect.UNUSED, text if asked else "it is switched off")
            recipe.drop(key)
    for name in ("moe_aux_loss_coeff", "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"):
        if recipe.is_set(f"{section}.{name}"):
            recipe.unused(f"{section}.{name}", f"{no_experts}; the model's own configuration determines it")


def translate_multi_token_prediction(recipe: Recipe, section: str) -> None:
    """Heads that predict several tokens: not trained; refused where their loss would reach the rest of the model."""
    layers = recipe.value(f"{section}.mtp_num_layers", 0)
    shapes_model = recipe.value(f"{section}.mtp_loss_scaling_factor", 0.0) and not recipe.value(
        f"{section}.mtp_detach_heads", False
    )
    key = f"{section}.mtp_num_layers"
    if layers and shapes_model:
        text = f"found {layers}, but a loss of multi-token prediction, which would train the model too, is not in this version"
        recipe.refuse(key, text, f"Set {key}=0, or {section}.mtp_detach_heads=true.")
    elif layers:
        recipe.note(key, Effect.CHANGED, "the heads of multi-token prediction are not loaded and not trained")
    for name in MULTI_TOKEN:
        if recipe.is_set(f"{section}.{name}"):
            recipe.unused(f"{section}.{name}", "there is no multi-token prediction") if not layers else recipe.drop(
                f"{section}.{name}"
            )


def _refuse_low_precision(recipe: Recipe, section: str) -> None:
    tower = f"{section}.freeze_config.freeze_language_model"
    if recipe.value(tower, False):
        recipe.refuse(tower, "found true, but then nothing that models of text have is trained", "Set it to false.")
    if recipe.value(f"{section}.fp8_cfg.enabled", False):
        _translate_fp8(recipe, section)
    elif recipe.is_set(f"{section}.fp8_cfg"):
        recipe.unused(f"{section}.fp8_cfg", "it is switched off")
    if recipe.is_set(f"{section}.model_overrides"):
        if is_switched_off(recipe.value(f"{section}.model_overrides")):
            recipe.unused(f"{section}.model_overrides", "it is empty")
        else:
            text = "it sets attributes of Megatron Core's model, and the model here is Hugging Face's"
            fix = f"Remove the key; {section.split('.')[0]}.hf_config_overrides sets those of the Hugging Face configuration."
            recipe.refuse(f"{section}.model_overrides", text, fix)


def _translate_fp8(recipe: Recipe, section: str) -> None:
    """Training in FP8 by Transformer Engine is training in FP8 by torchao, which has other scales."""
    to, asked = f"{section.partition('.')[0]}.fp8", recipe.value(f"{section}.fp8_cfg.fp8_recipe", "blockwise")
    name = {"tensorwise": "tensorwise", "delayed": "tensorwise"}.get(str(asked), "rowwise_with_gw_hp")
    recipe.set(f"{to}.enabled", True, because=f"{section}.fp8_cfg.enabled")
    recipe.set(f"{to}.recipe_name", name, because=f"{section}.fp8_cfg.enabled")
    text = f"{to}.recipe_name is {name} here, where Transformer Engine's is {asked}: layers round with other scales"
    recipe.note(f"{section}.fp8_cfg", Effect.CHANGED, text)
    recipe.drop(f"{section}.fp8_cfg")


def _move_environment(recipe: Recipe, section: str) -> None:
    move_environment(recipe, f"{section}.env_vars")


def move_environment(recipe: Recipe, key: str) -> None:
    """Move environment variables of a model's workers to ``cluster.roles.learner.env_vars``, as texts; those set there stay."""
    if not recipe.is_set(key):
        return
    variables = recipe.value(key, {})
    if not isinstance(variables, Mapping):
        _refuse_value(recipe, key, "a section, with the variables under it")
        return
    for name, value in variables.items():
        to = f"cluster.roles.learner.env_vars.{name}"
        if not recipe.is_set(to):
            recipe.set(to, str(value), because=key)
    if variables:
        recipe.note(key, Effect.RENAMED, "cluster.roles.learner.env_vars has them here")
    else:
        recipe.note(key, Effect.UNUSED, "it is empty")
    recipe.drop(key)
