"""The optimizer, its schedule and the precision of TRL's trainers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strop.extensions.recipes.library_recipe import LibraryRecipe
from strop.extensions.recipes.rules import Effect

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


ROLLOUTS = ("grpo", "rloo", "online_dpo")  # commands that sample
GPUS = "cluster.gpus_per_node"
ONLY_AT_THE_END = 1_000_000_000  # a save_period that no run reaches: what is left is the checkpoint of the last step


@dataclass(frozen=True)
class Batches:
    """Sizes of a run, counted in completions or recorded examples."""

    optimizer_step: int
    batch: int  # of rollouts that are sampled together; of recorded data, an optimizer step
    optimizer_steps: int  # of a batch


def count_batches(recipe: LibraryRecipe) -> Batches:
    """Return the sizes; for arguments that TRL refuses, those without its steps_per_generation."""
    own = recipe.value("per_device_train_batch_size") * recipe.value("gpus")
    accumulation = recipe.value("gradient_accumulation_steps")
    if recipe.value("num_generations") is None:
        return Batches(own * accumulation, own * accumulation, 1)
    generated, steps = recipe.value("generation_batch_size"), recipe.value("steps_per_generation")
    generated = generated or own * (steps or accumulation)
    generated = max(generated, own * accumulation)  # several are sampled with the same weights before an optimizer step
    return Batches(own * accumulation, generated, max(1, generated // (own * accumulation)) * recipe.value("num_iterations"))


def translate_batches(recipe: LibraryRecipe) -> None:
    """per_device_train_batch_size x GPUs x gradient_accumulation_steps examples are an optimizer step."""
    sizes, gpus = count_batches(recipe), recipe.value("gpus")
    recipe.set(GPUS, gpus, because="per_device_train_batch_size")
    assumed = "" if recipe.value("gpus_known") else ", for 1 GPU: `strop translate --gpus N` counts for N"
    step = (
        f"{sizes.optimizer_step} {'examples' if recipe.value('num_generations') is None else 'completions'} are an optimizer step"
    )
    key = "per_device_train_batch_size"
    recipe.set("policy.train_micro_batch_size", recipe.value(key), because=key)
    recipe.carry(key, "policy.train_global_batch_size", sizes.optimizer_step, f"{step}{assumed}", changed=bool(assumed))
    if recipe.is_written("gradient_accumulation_steps"):
        recipe.note("gradient_accumulation_steps", Effect.RENAMED, f"policy.train_global_batch_size={sizes.optimizer_step} here")
    if recipe.value("num_generations") is not None:
        _translate_groups(recipe, sizes)


def _translate_groups(recipe: LibraryRecipe, sizes: Batches) -> None:
    group, iterations = recipe.value("num_generations"), recipe.value("num_iterations")
    recipe.carry("num_generations", "{section}.num_generations_per_prompt", group)
    recipe.carry("num_iterations", "{section}.update_epochs", iterations)
    key = next((key for key in ("generation_batch_size", "steps_per_generation") if recipe.value(key)), "num_generations")
    if sizes.batch % group:
        recipe.refuse(
            key, f"{sizes.batch} completions are no whole groups of {group}", "Set num_generations to a divisor, or --gpus."
        )
        recipe.set("policy.train_global_batch_size", None)  # one problem is enough
        return
    generated = recipe.value("generation_batch_size") or recipe.value("per_device_train_batch_size") * recipe.value("gpus") * (
        recipe.value("steps_per_generation") or recipe.value("gradient_accumulation_steps")
    )
    if sizes.batch % sizes.optimizer_step or sizes.batch % generated or (iterations > 1 and generated < sizes.optimizer_step):
        why = f"{generated} completions and optimizer steps of {sizes.optimizer_step} do not divide each other"
        recipe.refuse(
            key, f"{why}, and an optimizer step would mix batches", "Set it to a multiple of gradient_accumulation_steps."
        )
        recipe.set("policy.train_global_batch_size", None)
        return
    prompts = sizes.batch // group
    recipe.set("{section}.num_prompts_per_step", prompts, because=key)
    for written in ("generation_batch_size", "steps_per_generation"):
        if recipe.is_written(written) and recipe.value(written) is not None:
            text = f"{recipe.kind}.num_prompts_per_step={prompts} here, {sizes.batch} completions"
            recipe.note(written, Effect.RENAMED, text)


def count_steps(recipe: LibraryRecipe, optimizer_steps: int) -> int:
    """Return how many of Strop's steps make this number of optimizer steps, rounded up."""
    return math.ceil(optimizer_steps / count_batches(recipe).optimizer_steps)


def translate_lengths(recipe: LibraryRecipe) -> None:
    """max_steps, if it is set, or else whole passes over the data."""
    most, epochs = recipe.value("max_steps"), recipe.value("num_train_epochs")
    if most > 0:
        steps = count_steps(recipe, most)
        inexact = steps * count_batches(recipe).optimizer_steps != most
        made = steps * count_batches(recipe).optimizer_steps
        text = f"{recipe.kind}.max_num_steps={steps} here, {made} optimizer steps"
        recipe.carry("max_steps", "{section}.max_num_steps", steps, text, changed=inexact)
        recipe.set("{section}.max_num_epochs", None, because="max_steps")
        recipe.unused("num_train_epochs", "max_steps is set")
        return
    recipe.carry("max_steps", "{section}.max_num_steps", -1)
    whole = max(1, round(epochs))
    if whole == epochs:
        recipe.carry("num_train_epochs", "{section}.max_num_epochs", whole)
    else:
        recipe.refuse("num_train_epochs", "epochs are whole here", "Set max_steps, or a whole number.")


def translate_validation(recipe: LibraryRecipe) -> None:
    strategy = recipe.value("eval_strategy")
    if strategy == "steps":
        steps = recipe.value("eval_steps") or recipe.value("logging_steps")
        period = _to_steps(recipe, "eval_steps", steps)
        recipe.carry("eval_steps", "{section}.val_period", period)
    else:
        recipe.set("{section}.val_period", 0, because="eval_strategy")
        recipe.unused("eval_steps", f"eval_strategy is {strategy}")
    if strategy == "epoch":
        recipe.carry(
            "eval_strategy", "{section}.val_at_end", True, f"{recipe.kind}.val_at_end=true here, and not in between", changed=True
        )
    elif recipe.is_written("eval_strategy"):
        recipe.note("eval_strategy", Effect.RENAMED, f"{recipe.kind}.val_period says it here")
    recipe.carry("eval_on_start", "{section}.val_at_start", bool(recipe.value("eval_on_start")))
    if recipe.kind == "grpo":
        recipe.set("grpo.max_val_samples", None, because="eval_strategy")
        generations = recipe.value("num_generations_eval") or recipe.value("num_generations") or 1
        recipe.carry("num_generations_eval", "grpo.val_num_generations_per_prompt", generations)


def translate_saving(recipe: LibraryRecipe) -> None:
    strategy, steps = recipe.value("save_strategy"), recipe.value("save_steps")
    end = "only the last step is saved"
    if strategy == "steps":
        recipe.carry("save_steps", "checkpointing.save_period", _to_steps(recipe, "save_steps", steps))
        if recipe.is_written("save_strategy"):
            recipe.note("save_strategy", Effect.RENAMED, "checkpointing.save_period says it here")
    else:
        text = f"checkpointing.save_period={ONLY_AT_THE_END} here: {end}"
        recipe.carry("save_strategy", "checkpointing.save_period", ONLY_AT_THE_END, text, changed=strategy != "no")
        recipe.unused("save_steps", f"save_strategy is {strategy}")
    limit, metric = recipe.value("save_total_limit"), recipe.value("metric_for_best_model")
    text = f"checkpointing.keep_top_k={limit} here, besides the newest"
    recipe.carry("save_total_limit", "checkpointing.keep_top_k", limit, text if limit else "")
    _translate_best(recipe, metric)
    recipe.carry("save_only_model", "checkpointing.save_optimizer", not recipe.value("save_only_model"))


def _translate_best(recipe: LibraryRecipe, metric: str | None) -> None:
    best = recipe.value("load_best_model_at_end")
    name = "val:loss" if recipe.kind != "grpo" else "val:reward"
    if (metric in (None, "loss", "eval_loss") and best and recipe.kind != "grpo") or metric in (
        "eval_loss",
        "eval_reward",
        "loss",
    ):
        recipe.set("checkpointing.metric_name", name, because="metric_for_best_model")
        higher = recipe.value("greater_is_better")
        recipe.set(
            "checkpointing.higher_is_better", name != "val:loss" if higher is None else higher, because="greater_is_better"
        )
        for key in ("metric_for_best_model", "greater_is_better"):
            if recipe.is_written(key) and recipe.value(key) is not None:
                recipe.note(key, Effect.RENAMED, "checkpointing.metric_name and higher_is_better say it here")
    else:
        recipe.set("checkpointing.metric_name", None, because="metric_for_best_model")
        if metric is not None:
            text = "metrics have other names here: checkpointing.metric_name ranks checkpoints"
            recipe.note("metric_for_best_model", Effect.CHANGED, text)
        recipe.unused("greater_is_better", "checkpoints are not ranked")
    if best:
        recipe.note(
            "load_best_model_at_end", Effect.CHANGED, "the best checkpoint is kept, and the run ends with the last weights"
        )


def _to_steps(recipe: LibraryRecipe, key: str, optimizer_steps: Any) -> int:
    """A share of the run, or a number of optimizer steps, in Strop's steps."""
    if isinstance(optimizer_steps, float) and 0 < optimizer_steps < 1:
        most = recipe.value("max_steps")
        if most <= 0:
            recipe.refuse(key, "a share of the run needs its length", "Set max_steps, or a number of steps.")
            return 1
        optimizer_steps = max(1, math.ceil(optimizer_steps * most))
    return count_steps(recipe, int(optimizer_steps))
