"""Kinds of run, checkpoints, trackers, the cluster, and how tensors travel."""

from __future__ import annotations

import math

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Refused, Renamed, Rule, Unused, is_switched_off


def refuse_other_sections(recipe: Recipe) -> None:
    """Refuse sections that belong to another kind of run."""
    commands = {section: section for section in ("grpo", "sft", "dpo", "rm", "ppo", "distillation")}
    purposes = {
        "teacher": "a run with a teacher",
        "value": "a run with a critic",
    }
    for section, command in {
        **commands,
        "teacher": "distillation",
        "value": "ppo",
    }.items():
        if not recipe.is_set(section) or recipe.is_own_key(section):
            continue
        if is_switched_off(recipe.value(section)):
            recipe.unused(section, "it is switched off")
        else:
            purpose = purposes.get(section, "a run with this section")
            recipe.refuse(
                section,
                f"this is not a section of strop {getattr(recipe.root, 'section', 'eval')}",
                f"Use strop {command} for {purpose}. Remove the key.",
            )


def translate_fault_tolerance(recipe: Recipe) -> None:
    """Save as often as the recipe does for resuming: the newest checkpoint is always kept, the others are ranked."""
    key, period = "checkpointing.ft_save_period", "checkpointing.save_period"
    often, latest = recipe.value(key), recipe.value("checkpointing.ft_keep_latest_k")
    if isinstance(often, int) and often > 0:
        saved = recipe.value(period)
        every = math.gcd(often, saved) if isinstance(saved, int) and saved > 0 else often
        recipe.set(period, every, because=key)
        text = f"checkpointing.save_period={every} here: the newest checkpoint is always kept to resume from, besides the keep_top_k best"
        recipe.note(key, Effect.CHANGED, text)
        recipe.drop(key)
    elif recipe.is_set(key):
        recipe.unused(key, "it is switched off")
    if recipe.is_set("checkpointing.ft_keep_latest_k"):
        one = latest in (None, 1)
        text = "the newest checkpoint is always kept" if one else f"the newest checkpoint is kept here, not the newest {latest}"
        recipe.note("checkpointing.ft_keep_latest_k", Effect.UNUSED if one else Effect.CHANGED, text)
        recipe.drop("checkpointing.ft_keep_latest_k")


# NeMo-RL hands logger.wandb and logger.swanlab to wandb.init and swanlab.init, whatever they say.
_KEPT_ID = "the log folder keeps the id of the run, so that a resumed run stays one run"
_SERVICE_RULES: tuple[Rule, ...] = (
    Unused("logger.wandb.log_nemo_gym_full_result_tables", "every rollout is stored, see logger.rollouts"),
    Renamed("logger.swanlab.experiment_name", "logger.swanlab.name"),
    Renamed("logger.swanlab.description", "logger.swanlab.notes"),
    *(Unused(f"logger.{service}.{name}", _KEPT_ID) for service in ("wandb", "swanlab") for name in ("id", "resume", "reinit")),
    *(
        Unused(f"logger.wandb.{name}", "it is an argument of wandb.init that changes no metric")
        for name in ("settings", "config", "save_code", "sync_tensorboard", "monitor_gym", "force", "allow_val_change")
    ),
    *(
        Unused(f"logger.swanlab.{name}", "it is an argument of swanlab.init that changes no metric")
        for name in ("settings", "config", "logdir", "public", "private", "color", "callbacks")
    ),
)

RUN_RULES: tuple[Rule, ...] = (
    refuse_other_sections,
    Unused("checkpointing.model_save_format", "weights are saved as safetensors"),
    Refused(
        ("checkpointing.save_consolidated",),
        "every checkpoint can be exported to a Hugging Face folder afterwards",
        "Remove the key; strop export writes the folder.",
    ),
    *_SERVICE_RULES,
    Unused("cluster.master_port_range_*", "free ports are chosen automatically"),
    Unused("data_plane", "it only says how batches travel between processes, and changes no number"),
    translate_fault_tolerance,
    Renamed("checkpointing.is_async", "checkpointing.async_save"),
    Unused("*._override_", "only a section at the top of a file that inherits replaces that of the base, as in NeMo-RL"),
    Unused("grpo.calculate_advantages_on_gpu", "it changes where advantages are computed, not what they are"),
    Unused("*skip_reference_policy_logprobs_calculation", "they are computed only where a KL term needs them"),
)
