"""How many examples TRL trains on in a step, how long, and when it validates and saves. Its steps are optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.library_recipe import LibraryRecipe

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
