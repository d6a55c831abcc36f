"""Section ``megatron_cfg``: who trains; with ``policy.backend=torch`` the torch learner does with what it says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.nemo_rl.media_rules import find_images
from strop.extensions.recipes.nemo_rl.megatron.megatron_options import (
    SIZES,
    refuse_wrong_switch,
    refuse_wrong_values,
    translate_options,
)
from strop.extensions.recipes.nemo_rl.megatron.megatron_section import carry_section, is_default, written_leaves
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Rule

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
