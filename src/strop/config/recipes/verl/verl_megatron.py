"""The optimizer and schedule of verl's Megatron Core workers."""

from __future__ import annotations

from strop.config.recipes.difference import Effect
from strop.config.recipes.library_recipe import LibraryRecipe

STYLES = ("constant", "linear", "cosine")


def is_megatron(recipe: LibraryRecipe) -> bool:
    return "megatron" in (recipe.value("actor_rollout_ref.actor.strategy"), recipe.value("engine.strategy"))


def translate_megatron_optimizer(recipe: LibraryRecipe, section: str, to: str) -> None:
    """Set ``optimizer`` and ``scheduler`` of ``megatron_cfg``: a warm-up from 0, then a decay to 0 by the end of the run."""
    name = str(recipe.value(f"{section}.optimizer")).lower()
    if name not in ("adam", "adamw", "sgd"):
        recipe.refuse(f"{section}.optimizer", "Megatron Core has adam and sgd", "Set adam.")
        return
    recipe.set(f"{to}.optimizer.optimizer", "sgd" if name == "sgd" else "adam", because=f"{section}.optimizer")
    recipe.carry(f"{section}.lr", f"{to}.optimizer.lr", recipe.value(f"{section}.lr"))
    recipe.set(f"{to}.optimizer.min_lr", 0.0, because=f"{section}.lr")
    recipe.carry(f"{section}.weight_decay", f"{to}.optimizer.weight_decay", recipe.value(f"{section}.weight_decay"))
    for number, beta in enumerate(recipe.value(f"{section}.betas"), 1):
        recipe.set(f"{to}.optimizer.adam_beta{number}", beta, because=f"{section}.betas")
    if recipe.is_written(f"{section}.betas"):
        recipe.note(f"{section}.betas", Effect.RENAMED, f"{to}.optimizer has adam_beta1 and adam_beta2 here")
    prefix = f"{section}.override_optimizer_config."
    for key in [key for key in recipe.values if key.startswith(prefix)]:
        option = key.removeprefix(prefix)
        if "offload" in option or "overlap" in option or "precision_aware" in option:
            recipe.unused(key, "it says where the optimizer keeps its state")
        else:
            recipe.carry(key, f"{to}.optimizer.{option}", recipe.value(key))
    _translate_schedule(recipe, section, f"{to}.scheduler")


def _translate_schedule(recipe: LibraryRecipe, section: str, to: str) -> None:
    keys = [f"{section}.{name}" for name in ("lr_decay_style", "lr_scheduler_type", "warmup_style", "lr_scheduler")]
    key = next((key for key in keys if recipe.is_written(key) and recipe.value(key) is not None), keys[0])
    style = recipe.value(key) or "constant"
    if style not in STYLES:
        recipe.refuse(key, "there is no counterpart", f"Set one of {', '.join(STYLES)}.")
        return
    recipe.carry(key, f"{to}.lr_decay_style", style)
    steps, ratio = recipe.value(f"{section}.lr_warmup_steps"), recipe.value(f"{section}.lr_warmup_steps_ratio")
    recipe.set(f"{to}.lr_decay_iters", None, because=key)
    recipe.set(f"{to}.lr_warmup_init", 0.0, because=key)
    recipe.set(f"{to}.lr_warmup_iters", max(steps or 0, 0), because=f"{section}.lr_warmup_steps")
    if ratio and not (steps and steps > 0):
        recipe.set(f"{to}.lr_warmup_fraction", ratio, because=f"{section}.lr_warmup_steps_ratio")
    for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
        if recipe.is_written(f"{section}.{name}"):
            recipe.note(f"{section}.{name}", Effect.RENAMED, f"{to} has the warm-up here, from a rate of 0")
