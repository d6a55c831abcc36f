"""Section ``megatron_cfg`` where Megatron Core trains: its keys are Strop's; what only NeMo-RL's workers have is left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strop.base_config import followed_keys
from strop.config.source import keys
from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.nemo_rl.generation_rules import find_images
from strop.extensions.recipes.nemo_rl.megatron_options import (
    MEMORY,
    OF_TORCH,
    SIZES,
    SPEED,
    TOWERS,
    move_environment,
    refuse_unknown,
    refuse_wrong_switch,
    refuse_wrong_values,
    translate_multi_token_prediction,
    translate_options,
)
from strop.extensions.recipes.rules import Effect, Recipe, Rule, describe, is_switched_off

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


MODELS = ("policy", "value", "teacher")
FUSED_LAYERS = {  # Megatron's linear layers -> those of Hugging Face models
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def choose_learner(recipe: Recipe) -> None:
    """Carry over the sections of the models that Megatron Core trains; with ``policy.backend=torch`` translate them."""
    present = [model for model in MODELS if isinstance(recipe.value(f"{model}.megatron_cfg"), Mapping)]
    present = [model for model in present if recipe.is_set(f"{model}.megatron_cfg") and not refuse_wrong_switch(recipe, model)]
    asked = [model for model in present if recipe.value(f"{model}.megatron_cfg.enabled")]
    if recipe.value("policy.backend") == "torch" or _needs_torch(recipe, asked):
        for model in asked:
            _translate_model(recipe, model)
            recipe.drop(f"{model}.megatron_cfg")
        for model in ("policy", "value"):
            if model not in asked and recipe.value(f"{model}.dtensor_cfg.enabled") is False:
                recipe.set(f"{model}.dtensor_cfg.enabled", True, because="policy.backend")
    else:
        if recipe.value("policy.backend") == "megatron":
            asked = [model for model in MODELS if recipe.is_own_key(f"{model}.megatron_cfg") and recipe.is_set(model)]
        for model in asked:
            carry_section(recipe, model)
    for model in present:
        if model not in asked:
            _leave_out(recipe, model)
            recipe.drop(f"{model}.megatron_cfg")


def _needs_torch(recipe: Recipe, asked: list[str]) -> bool:
    """Choose the torch learner for what Megatron Core cannot train here, unless the recipe says who trains. Return whether it did."""
    if "policy" not in asked or recipe.value("policy.backend") != "auto":
        return False
    if recipe.value("policy.quant_cfg"):
        because, why = "policy.quant_cfg", "Megatron Core's layers do not round as policy.quant_cfg says"
    elif (images := find_images(recipe)) is not None:
        because, why = images, "Megatron Core trains models of text alone in this version, and this one reads images"
    else:
        return False
    recipe.set("policy.backend", "torch", because=because)
    recipe.note("policy.megatron_cfg.enabled", Effect.CHANGED, f"the torch learner trains (policy.backend=torch): {why}")
    return True


def _is_null(recipe: Recipe, key: str) -> bool:
    return recipe.is_set(key) and get_at(recipe.source.values, tuple(key.split("."))) is None


def _leave_out(recipe: Recipe, model: str) -> None:
    """Say that a section is switched off, unless the only learning rate of the recipe is in it."""
    section, optimizer = f"{model}.megatron_cfg", f"{model}.optimizer"
    rate = recipe.value(f"{section}.optimizer.lr")
    if recipe.value(f"{model}.dtensor_cfg.enabled") and rate and _is_null(recipe, optimizer):
        recipe.refuse(
            optimizer,
            f"found null, and the learning rate {_show(rate)} is in {section}.optimizer, which is switched off",
            f"Set {section}.enabled=true and policy.backend=torch, which take over what {section} says, or set {optimizer}.",
        )
    for key in [] if is_default(recipe, section) else list(recipe.find(f"{section}.*")):
        if key != f"{section}.enabled":
            recipe.note(key, Effect.UNUSED, f"{section} is switched off")


def _translate_model(recipe: Recipe, model: str) -> None:
    """Move what ``megatron_cfg`` says of a model to the sections of the torch learner."""
    section = f"{model}.megatron_cfg"
    if refuse_wrong_values(recipe, section):
        return
    sizes = _translate_sizes(recipe, section)
    if model == "teacher":
        if recipe.is_own_key("teacher.dtensor_cfg"):
            _replace(recipe, "teacher.dtensor_cfg", sizes, section)
        recipe.note(section, Effect.UNUSED, "the rest of it is about training, and a teacher only scores")
        return
    if recipe.is_set(f"{section}.optimizer"):
        _translate_optimizer(recipe, model)
        _translate_schedule(recipe, model)
    adapters = _translate_adapters(recipe, f"{section}.peft")
    _replace(recipe, f"{model}.dtensor_cfg", {"enabled": True, **sizes, **adapters}, section)
    for name in SIZES:
        recipe.drop(f"{section}.{name}")
    translate_options(recipe, section)


def _replace(recipe: Recipe, key: str, value: Any, section: str) -> None:
    """Set a key or a section that the recipe, which asks for Megatron Core, did not mean.

    Keys in it stay that are set where ``policy.backend`` is or later, and not where the recipe asks for Megatron Core.
    """
    start, asked = recipe.layer_of("policy.backend"), recipe.layer_of(f"{section}.enabled")
    kept = {leaf: recipe.value(leaf) for leaf in written_leaves(recipe, key) if recipe.layer_of(leaf) >= start > asked}
    if not kept and recipe.value(key) not in (None, value) and recipe.is_set(key):
        recipe.note(key, Effect.UNUSED, f"{section} says it where Megatron Core trains")
    recipe.set(key, value, because=f"{section}.enabled")
    for leaf, own in kept.items():
        recipe.set(leaf, own, because=leaf)


# --- the optimizer ---------------------------------------------------------------------------------------------------------


def _translate_optimizer(recipe: Recipe, model: str) -> None:
    key = f"{model}.megatron_cfg.optimizer"
    options: Mapping[str, Any] = recipe.value(key, {})
    name, kwargs = options.get("optimizer", "adam"), {"lr": options.get("lr"), "weight_decay": _find_weight_decay(recipe, model)}
    if name == "adam":
        decoupled = options.get("decoupled_weight_decay", True) is not False
        torch_name = "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
        kwargs["betas"] = [options.get("adam_beta1", 0.9), options.get("adam_beta2", 0.999)]
        kwargs["eps"] = options.get("adam_eps", 1e-8)
    elif name == "sgd":
        torch_name, kwargs["momentum"] = "torch.optim.SGD", options.get("sgd_momentum", 0.9)
    else:
        recipe.refuse(f"{key}.optimizer", f"found {name!r}, which is none of torch's", "Set it to adam or sgd.")
        return
    if kwargs["lr"] is None:
        recipe.refuse(key, "it has no lr", f"Set {key}.lr.")
        return
    if options.get("fp16"):
        recipe.refuse(f"{key}.fp16", "found true, but float16 is not in this version", "Set it to false.")
    _replace(
        recipe, f"{model}.optimizer", {"name": torch_name, "kwargs": kwargs, "decay_vectors": False}, f"{model}.megatron_cfg"
    )
    shown = ", ".join(f"{option}={_show(value)}" for option, value in kwargs.items())
    recipe.note(key, Effect.RENAMED, f"{model}.optimizer is {torch_name} with {shown} here, without decay of biases and norms")
    limit = options.get("clip_grad", recipe.value(f"{model}.max_grad_norm"))
    _replace(recipe, f"{model}.max_grad_norm", float(limit) if limit else None, f"{model}.megatron_cfg")


def _find_weight_decay(recipe: Recipe, model: str) -> float:
    """Return the weight decay, which the schedule sets at every step whatever the optimizer's is."""
    section = f"{model}.megatron_cfg"
    decay: float = recipe.value(f"{section}.optimizer.weight_decay", 0.01)
    start, end = (recipe.value(f"{section}.scheduler.{edge}_weight_decay", decay) for edge in ("start", "end"))
    if start != end:
        recipe.refuse(
            f"{section}.scheduler.end_weight_decay",
            f"found {end}, but a weight decay that changes during training (from {start}) is not in this version",
            f"Set it to {section}.scheduler.start_weight_decay.",
        )
    return float(start)


def _translate_schedule(recipe: Recipe, model: str) -> None:
    key = f"{model}.megatron_cfg.scheduler"
    options, optimizer = recipe.value(key, {}), recipe.value(f"{model}.megatron_cfg.optimizer", {})
    try:
        scheduler = make_schedule_section(options, optimizer.get("lr") or 0.0, optimizer.get("min_lr") or 0.0)
    except ValueError as error:
        recipe.refuse(f"{key}.lr_decay_style", str(error), "Set it to one that is, with its options.")
        return
    _replace(recipe, f"{model}.scheduler", scheduler, f"{model}.megatron_cfg")
    arguments = ", ".join(f"{name}={_show(value)}" for name, value in (scheduler or {}).get("kwargs", {}).items())
    shown = f"{scheduler['name']} with {arguments}" if scheduler else "null, a constant rate,"
    if scheduler and scheduler["name"] == "inverse_sqrt":
        recipe.note(key, Effect.CHANGED, f"{model}.scheduler is {shown} here, which does not end at lr_decay_iters")
    else:
        recipe.note(key, Effect.RENAMED, f"{model}.scheduler is {shown} here")


def _show(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# --- parallel sizes --------------------------------------------------------------------------------------------------------


def _translate_sizes(recipe: Recipe, section: str) -> dict[str, Any]:
    """Return the keys of ``dtensor_cfg`` for the parallel sizes, and note how they differ."""

    def read(name: str) -> int:
        return int(recipe.value(f"{section}.{name}", 1))

    tensor, context, stages = (read(f"{kind}_parallel_size") for kind in ("tensor_model", "context", "pipeline_model"))
    experts = read("expert_model_parallel_size") * read("expert_tensor_parallel_size")
    sizes = {"tensor_parallel_size": tensor, "context_parallel_size": context}
    if experts > 1:
        sizes["expert_parallel_size"] = math.lcm(experts, tensor)
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    recipe.note(f"{section}.tensor_model_parallel_size", Effect.RENAMED, f"the parallel sizes are {shown} here")
    if experts > 1 and experts % tensor:
        recipe.note(
            f"{section}.expert_model_parallel_size",
            Effect.CHANGED,
            f"experts are divided over {sizes['expert_parallel_size']} ranks instead of {experts}, a multiple of the tensor-parallel "
            "size; the gradient is the same",
        )
    if stages > 1:
        recipe.note(
            f"{section}.pipeline_model_parallel_size",
            Effect.CHANGED,
            f"the weights of all layers are sharded over these {stages} times as many ranks instead of cut into stages (FSDP2); the "
            "gradient is the same, and dtensor_cfg.pipeline_parallel_size cuts the layers here too",
        )
    sequence = recipe.value(f"{section}.sequence_parallel", False) is True and tensor > 1
    recompute = recipe.value(f"{section}.activation_checkpointing", False) is True
    return {**sizes, "sequence_parallel": sequence, "activation_checkpointing": recompute}


# --- adapters --------------------------------------------------------------------------------------------------------------


def _translate_adapters(recipe: Recipe, key: str) -> dict[str, Any]:
    """Return ``lora_cfg`` for the adapters of ``megatron_cfg.peft``, if they are enabled."""
    options: Mapping[str, Any] = recipe.value(key, {})
    if not options.get("enabled"):
        if recipe.is_set(key):
            recipe.unused(key, "it is switched off")
        return {}
    if (start := options.get("lora_B_init_method", "zero")) != "zero":
        recipe.refuse(f"{key}.lora_B_init_method", f"found {start!r}, but B starts at zero here", "Set it to zero.")
    excluded = list(options.get("exclude_modules") or ())
    targets = list(options.get("target_modules") or ())
    names = {"dim": "dim", "alpha": "alpha", "dropout": "dropout", "dropout_position": "dropout_position"}
    values = {own: options[name] for name, own in {**names, "lora_A_init_method": "lora_A_init"}.items() if name in options}
    values |= {"target_modules": _split_layers(targets), "exclude_modules": _split_layers(excluded)}
    layers = ", ".join(values["target_modules"]) or "all linear layers but the output layer"
    recipe.note(
        key,
        Effect.CHANGED,
        f"{layers} of the Hugging Face model each have their own adapters, where Megatron Core's fused layers (such as linear_qkv) share "
        "one",
    )
    return {"lora_cfg": {"enabled": True, **values}}


def _split_layers(patterns: list[str]) -> list[str]:
    """Return the patterns with Hugging Face's names for Megatron's fused layers."""
    split: list[str] = []
    for pattern in patterns:
        fused = next((name for name in FUSED_LAYERS if name in pattern), None)
        split += [pattern.replace(fused, name) for name in FUSED_LAYERS[fused]] if fused else [pattern]
    return split


MEGATRON_RULES: tuple[Rule, ...] = (choose_learner,)


# Megatron Core's learning-rate schedules as those of ``policy.scheduler``, with the same rate at every step.


SHAPES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse-square-root": "inverse_sqrt", "WSD": "wsd"}
WSD_DECAYS = {"linear": "linear", "cosine": "cosine", "exponential": "exponential", "minus_sqrt": "sqrt"}


def make_schedule_section(options: Mapping[str, Any], rate: float, lowest: float) -> dict[str, Any] | None:
    """Return the section ``scheduler`` for options of ``megatron_cfg.scheduler``; None for a constant rate.

    ``rate`` and ``lowest`` are the optimizer's ``lr`` and ``min_lr``. NeMo-RL's workers advance the schedule once a call of ``train``:
    its iterations are passes over a batch. Raises ValueError for what no schedule here says.
    """
    style = options.get("lr_decay_style", "linear")
    if style not in SHAPES:
        raise ValueError(f"found {style!r}, which is none of {', '.join(SHAPES)}")
    kwargs = _warmup(options, rate)
    if style == "constant":
        return {"name": "constant", "kwargs": kwargs} if kwargs else None
    kwargs["min_ratio"] = lowest / rate if rate else 0.0
    if style == "inverse-square-root":
        start = {} if "warmup_init_ratio" in kwargs else {"warmup_steps": 1, "warmup_init_ratio": 1.0}  # as from its first step
        return {"name": "inverse_sqrt", "kwargs": {**kwargs, **start}}
    if options.get("lr_decay_iters") is not None:
        kwargs["total_steps"] = options["lr_decay_iters"]
    if style == "WSD":
        if options.get("lr_wsd_decay_iters") is None:
            raise ValueError("found 'WSD', but lr_wsd_decay_iters is not set")
        decay = WSD_DECAYS[options.get("lr_wsd_decay_style", "exponential")]
        kwargs |= {"decay": decay, "decay_steps": options["lr_wsd_decay_iters"]}
    return {"name": SHAPES[style], "kwargs": kwargs}


def _warmup(options: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Return the arguments of the warm-up, which begins at ``lr_warmup_init``; none without a warm-up."""
    if options.get("lr_warmup_fraction"):
        length: dict[str, Any] = {"warmup_ratio": options["lr_warmup_fraction"]}
    elif options.get("lr_warmup_iters"):
        length = {"warmup_steps": options["lr_warmup_iters"]}
    else:
        return {}
    return {**length, "warmup_init_ratio": (options.get("lr_warmup_init") or 0.0) / rate if rate else 0.0}
