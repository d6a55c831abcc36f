"""Kinds of run, checkpoints, trackers, the cluster, and how tensors travel."""

from __future__ import annotations

from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Refused, Rule, Unused, is_switched_off


def refuse_other_sections(recipe: Recipe) -> None:
    """Refuse sections that belong to another kind of run."""
    commands = {section: section for section in ("grpo", "sft", "dpo", "rm", "ppo", "distillation")}
    purposes = {
        "teacher": "a run with a teacher",
        "on_policy_distillation": "a run with a teacher",
        "value": "a run with a critic",
    }
    for section, command in {
        **commands,
        "teacher": "distillation",
        "on_policy_distillation": "distillation",
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


RUN_RULES: tuple[Rule, ...] = (
    refuse_other_sections,
    Unused("checkpointing.model_save_format", "weights are saved as safetensors"),
    Refused(
        ("checkpointing.save_consolidated",),
        "every checkpoint can be exported to a Hugging Face folder afterwards",
        "Remove the key; strop export writes the folder.",
    ),
    Refused(("logger.mlflow_enabled",), "MLflow is not in this version", "Set it to false."),
    Unused("logger.mlflow", "MLflow is not in this version, and switched off"),
    Refused(("logger.swanlab_enabled",), "SwanLab is not in this version", "Set it to false."),
    Unused("logger.swanlab", "SwanLab is not in this version, and switched off"),
    Unused("logger.monitor_gpus", "GPUs are not monitored in this version"),
    Unused("logger.gpu_monitoring", "GPUs are not monitored in this version"),
    Unused("logger.wandb.log_nemo_gym_full_result_tables", "every rollout is stored, see logger.rollouts"),
    Unused("cluster.master_port_range_*", "free ports are chosen automatically"),
    Refused(("data_plane",), "NeMo-RL's TransferQueue is not in this version", "Set data_plane.enabled=false."),
)
