"""The training sections (``grpo``, ``ppo``, ``distillation``, ``sft``, ``dpo``, ``rm``): lengths, validation, filters, penalties; and
``loss_fn``."""

from __future__ import annotations

from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Refused, Rule, Unused, is_switched_off

SECTIONS = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")
UNTIL_FULL = "with dynamic sampling, groups are sampled until the batch is full"
NOT_READ = "NeMo-RL does not read it either"
MESSAGE_PENALTIES = {  # NeMo-RL has them with NeMo-Gym only
    "grpo.invalid_tool_call_advantage": "reward_penalties.invalid_tool_call_advantage",
    "grpo.malformed_thinking_advantage": "reward_penalties.malformed_think_tag_advantage",
}


def translate_lengths(recipe: Recipe) -> None:
    """Translate numbers that stand for "off", "all" and "no limit"."""
    for section in SECTIONS:
        if not recipe.is_own_key(section):
            continue
        _replace_negative(recipe, f"{section}.val_period", 0, "0 here, no periodic validation")
        _replace_negative(recipe, f"{section}.max_val_samples", None, "null here, all tasks")
        _replace_negative(recipe, f"{section}.val_batches", -1, "-1 here, all batches", also_zero=True)
        _replace_epochs(recipe, section)
        _round_validation(recipe, section)
    key = "checkpointing.save_period"
    if _is_below(recipe, key, 0):
        recipe.set(key, 1, because=key)
        recipe.note(key, Effect.CHANGED, "NeMo-RL saves after every step, and 1 does here; 0 turns saving off")


def _replace_negative(recipe: Recipe, key: str, value: int | None, text: str, *, also_zero: bool = False) -> None:
    if _is_below(recipe, key, 1 if also_zero else 0) and recipe.value(key) != value:
        recipe.set(key, value, because=key)
        recipe.note(key, Effect.RENAMED, text)


def _replace_epochs(recipe: Recipe, section: str) -> None:
    key = f"{section}.max_num_epochs"
    if not _is_below(recipe, key, 1):
        return
    recipe.set(key, None, because=key)
    asynchronous = recipe.value(f"{section}.async_{section}.enabled", False)
    if asynchronous:
        recipe.note(key, Effect.RENAMED, "null here, no limit")
    else:
        recipe.note(key, Effect.CHANGED, "null here, no limit; NeMo-RL trains nothing unless it is asynchronous")


def _round_validation(recipe: Recipe, section: str) -> None:
    """NeMo-RL validates whole batches of ``val_batch_size`` tasks and leaves out the rest."""
    key, most = f"{section}.val_batch_size", f"{section}.max_val_samples"
    if not recipe.is_set(key):
        return
    size, tasks = recipe.value(key), recipe.value(most)
    if isinstance(size, int) and isinstance(tasks, int) and 0 < size <= tasks and tasks % size:
        recipe.rename(key, most, text=f"{most}={tasks - tasks % size} here: NeMo-RL validates whole batches of {size} tasks")
        recipe.set(most, tasks - tasks % size, because=most if recipe.is_set(most) else section)
    else:
        recipe.unused(key, "validation goes through the same engine, which batches by itself")


def translate_failures(recipe: Recipe) -> None:
    """NeMo-RL tolerates this number of failed groups in a row, and the next one ends the run."""
    for section in SECTIONS:
        for key in list(recipe.find(f"{section}.async_{section}.max_generation_failures")):
            tolerated = recipe.value(key, 0)
            if not recipe.value(f"{section}.async_{section}.enabled", False):
                recipe.unused(key, "generation is not asynchronous")
            elif isinstance(tolerated, int):
                recipe.rename(key, f"{section}.max_errors_in_a_row", max(tolerated, 0) + 1)


def translate_message_penalties(recipe: Recipe) -> None:
    for key, to in MESSAGE_PENALTIES.items():
        if recipe.is_set(key):
            if is_switched_off(recipe.value(key)):
                recipe.unused(key, "it is switched off")
            else:
                recipe.rename(key, to)


def _is_below(recipe: Recipe, key: str, bound: int) -> bool:
    value = get_at(recipe.source.values, tuple(key.split("."))) if recipe.is_set(key) else None
    if isinstance(value, str):
        value = recipe.value(key)
    return isinstance(value, int) and not isinstance(value, bool) and value < bound


TRAINING_RULES: tuple[Rule, ...] = (
    translate_lengths,
    translate_failures,
    translate_message_penalties,
    Unused("*.val_batch_size", "validation goes through the same engine, which batches by itself"),
    Unused("*.batch_multiplier", UNTIL_FULL),
    Unused("*.dynamic_sampling_oversample_ratio", UNTIL_FULL),
    Refused(
        ("grpo.zero_variance_prompt_filtering",),
        "NeMo-RL has no code for it",
        "Set grpo.use_dynamic_sampling=true to replace groups with equal rewards. Remove the key.",
    ),
    Unused("grpo.penalize_invalid_tool_call", NOT_READ),
    Unused("grpo.penalize_malformed_thinking", NOT_READ),
    Unused("grpo.invalid_tool_call_strategy", NOT_READ),
    Unused("grpo.num_val_generations_per_prompt", f"{NOT_READ}: it reads val_num_generations_per_prompt"),
    Unused("*.calculate_advantages_on_gpu", "advantages are computed in the driver process"),
    Unused("ppo.async_ppo.warmup_generation_lead_steps", "it only lets generation run ahead while the policy does not change"),
    Unused(
        "ppo.async_ppo.drop_incomplete_targets_on_restore",
        "groups in flight when a checkpoint was saved are sampled again by the run that continues",
    ),
)


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
