"""Section ``loss_fn``: keys that NeMo-RL reads only together with others, or not at all beside them."""

from __future__ import annotations

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Rule

CLIPS = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")


def drop_clips_without_ratio(recipe: Recipe) -> None:
    """Drop what REINFORCE has no use for: it has no ratio to clip or to set to 1."""
    key = "loss_fn.disable_ppo_ratio"
    if not (recipe.is_set(key) and recipe.value(key)):
        return
    for name in CLIPS:
        if recipe.is_set(f"loss_fn.{name}"):
            recipe.unused(f"loss_fn.{name}", "disable_ppo_ratio leaves no ratio to clip")
    if recipe.value("loss_fn.force_on_policy_ratio", False):
        recipe.unused("loss_fn.force_on_policy_ratio", "with disable_ppo_ratio there is no ratio, and the gradient is the same")


def translate_kl_place(recipe: Recipe) -> None:
    """Put the KL term where the estimator of the recipe reads it."""
    key = "loss_fn.use_kl_in_reward"
    if not (recipe.is_own_key("grpo") and recipe.is_set(key) and recipe.value(key)):
        return
    if not recipe.value("loss_fn.reference_policy_kl_penalty", 0):
        return
    name = recipe.value("grpo.adv_estimator.name")
    if name == "reinforce_plus_plus":
        recipe.set("algorithm.kl.place", "token_credit", because=key)
        recipe.note(key, Effect.RENAMED, "algorithm.kl.place=token_credit here")
        recipe.drop(key)
    elif name in ("grpo", "gdpo"):
        text = f"the KL estimate is subtracted from the reward; NeMo-RL's {name} does not read it, and trains without a KL term"
        recipe.note(key, Effect.CHANGED, text)


LOSS_RULES: tuple[Rule, ...] = (drop_clips_without_ratio, translate_kl_place)
