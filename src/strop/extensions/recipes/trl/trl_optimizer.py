"""The optimizer, its schedule and the precision of TRL's trainers."""

from __future__ import annotations

import math
from typing import Any

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.library_recipe import LibraryRecipe

KWARGS = "policy.optimizer.kwargs"
ADAM_KEYS = ("adam_beta1", "adam_beta2", "adam_epsilon")
OPTIMIZERS = {
    "adamw_torch": "torch.optim.AdamW",
    "adamw_torch_fused": "torch.optim.AdamW",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adamw": "bitsandbytes.optim.PagedAdamW",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
}


def translate_optimizer(recipe: LibraryRecipe) -> None:
    key = "optim"
    name = OPTIMIZERS.get(recipe.value(key))
    if name is None:
        recipe.refuse(key, "there is no counterpart", "Set policy.optimizer.name to a class, such as torch.optim.AdamW.")
        return
    recipe.carry(key, "policy.optimizer.name", name)
    recipe.carry("learning_rate", f"{KWARGS}.lr", recipe.value("learning_rate"))
    recipe.carry("weight_decay", f"{KWARGS}.weight_decay", recipe.value("weight_decay"))
    if "Adam" in name:
        betas = [recipe.value("adam_beta1"), recipe.value("adam_beta2")]
        recipe.set(f"{KWARGS}.betas", betas, because="adam_beta1")
        recipe.set(f"{KWARGS}.eps", recipe.value("adam_epsilon"), because="adam_epsilon")
        for written in (written for written in ADAM_KEYS if recipe.is_written(written)):
            option = "eps" if written == "adam_epsilon" else "betas"
            recipe.note(written, Effect.RENAMED, f"{KWARGS}.{option} here")
    else:
        for unread in ADAM_KEYS:
            recipe.unused(unread, f"{recipe.value(key)} does not read it")
    if recipe.value("weight_decay"):  # biases and norms have none there
        recipe.set("policy.optimizer.decay_vectors", False, because="weight_decay")


def translate_schedule(recipe: LibraryRecipe) -> None:
    """transformers' schedules: a warm-up from 0, in optimizer steps."""
    key = "lr_scheduler_type"
    kind, options = str(recipe.value(key)), dict(recipe.value("lr_scheduler_kwargs") or {})
    name, kwargs = _name_schedule(kind, options, float(recipe.value("learning_rate")))
    if name is None or options:
        wrong = key if name is None else "lr_scheduler_kwargs"
        recipe.refuse(wrong, "there is no counterpart", "Set policy.scheduler: its page is docs/training.md.")
        return
    most = recipe.value("max_steps")
    if name != "constant" and most > 0:
        kwargs["total_steps"] = most
    warmup = _translate_warmup(recipe, kind, most)
    if warmup and name == "wsd":
        warmup["warmup_init_ratio"] = kwargs["min_ratio"]
    kwargs |= warmup
    recipe.set("policy.scheduler_unit", "optimizer_step", because=key)
    recipe.carry(key, "policy.scheduler", {"name": name, "kwargs": kwargs}, f"policy.scheduler.name={name} here")
    if recipe.is_written("lr_scheduler_kwargs") and recipe.value("lr_scheduler_kwargs"):
        recipe.note("lr_scheduler_kwargs", Effect.RENAMED, "policy.scheduler.kwargs here")


def _translate_warmup(recipe: LibraryRecipe, kind: str, most: int) -> dict[str, Any]:
    ratio = recipe.value("warmup_ratio") or 0
    key = "warmup_ratio" if ratio else "warmup_steps"
    steps = ratio or recipe.value("warmup_steps") or 0
    if kind == "constant":
        recipe.unused(key, "a constant schedule has no warm-up there")
        return {}
    if not steps:
        return {}
    if recipe.is_written(key):
        recipe.note(key, Effect.RENAMED, "policy.scheduler.kwargs has it here, in optimizer steps, from a rate of 0")
    if steps >= 1:
        return {"warmup_steps": int(steps), "warmup_init_ratio": 0.0}
    if most > 0:
        return {"warmup_steps": math.ceil(steps * most), "warmup_init_ratio": 0.0}
    return {"warmup_ratio": float(steps), "warmup_init_ratio": 0.0}


def _name_schedule(kind: str, options: dict[str, Any], rate: float) -> tuple[str | None, dict[str, Any]]:
    """Return Strop's schedule; what stays in ``options`` has no counterpart."""
    least = options.pop("min_lr", 0.0) / rate if rate and kind == "cosine_with_min_lr" else 0.0
    least = options.pop("min_lr_rate", least) if kind == "cosine_with_min_lr" else least
    match kind:
        case "constant" | "constant_with_warmup":
            return "constant", {}
        case "linear":
            return "linear", {}
        case "cosine" if options.pop("num_cycles", 0.5) == 0.5:
            return "cosine", {}
        case "cosine_with_min_lr" if options.pop("num_cycles", 0.5) == 0.5:
            return "cosine", {"min_ratio": least}
        case "cosine_with_restarts":
            return "cosine_with_restarts", {"cycles": int(options.pop("num_cycles", 1))}
        case "polynomial":
            end = options.pop("lr_end", 1e-7)
            return "polynomial", {"power": options.pop("power", 1.0), "min_ratio": end / rate if rate else 0.0}
        case "inverse_sqrt":
            scale = options.pop("timescale", None)
            return "inverse_sqrt", {} if scale is None else {"timescale": scale}
        case "warmup_stable_decay":
            least = options.pop("min_lr_ratio", 0.0)
            shape = options.pop("decay_type", "cosine")
            decay = options.pop("num_decay_steps", None)
            if shape in ("linear", "cosine", "1-sqrt") and decay and options.pop("warmup_type", "linear") == "linear":
                return "wsd", {"decay_steps": decay, "decay": "sqrt" if shape == "1-sqrt" else shape, "min_ratio": least}
    return None, {}


def translate_precision(recipe: LibraryRecipe) -> None:
    """bf16 is autocast; dtype is the type of the weights."""
    if recipe.value("fp16"):
        recipe.refuse("fp16", "it needs loss scaling, which is not in this version", "Set bf16: true.")
    halved = recipe.value("bf16") in (None, True)
    recipe.carry("bf16", "policy.precision", "bfloat16" if halved else "float32")
    options = recipe.value("model_init_kwargs") or {}
    key = "model_init_kwargs" if "dtype" in options or "torch_dtype" in options else "dtype"
    kind = str(options.get("dtype", options.get("torch_dtype", recipe.value("dtype")))).removeprefix("torch.")
    if kind in ("float16", "fp16", "half"):
        recipe.refuse(key, "weights are float32 or bfloat16 here", "Set dtype: bfloat16.")
    elif kind == "bfloat16":
        text = "policy.weights_dtype=bfloat16 here, whose optimizer keeps float32 master weights"
        recipe.carry(key, "policy.weights_dtype", "bfloat16", text, changed=True)
    elif kind == "auto":
        recipe.carry(
            key, "policy.weights_dtype", "float32", "policy.weights_dtype=float32 here, whatever the checkpoint has", changed=True
        )
    elif key == "dtype":
        recipe.carry(key, "policy.weights_dtype", "float32")
