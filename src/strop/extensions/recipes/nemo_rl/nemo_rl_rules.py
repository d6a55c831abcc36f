"""Files of NeMo-RL, and what each of its keys that Strop does not have becomes here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.config.source.yaml_source import read_config_file
from strop.extensions.recipes.library_recipe import DEFAULT, ReadRecipe, RecipeFormat
from strop.extensions.recipes.nemo_rl.data_rules import DATA_RULES
from strop.extensions.recipes.nemo_rl.environment_rules import ENVIRONMENT_RULES, UNSUPPORTED_RULES, explain_learner
from strop.extensions.recipes.nemo_rl.generation_rules import GENERATION_RULES, MEDIA_RULES
from strop.extensions.recipes.nemo_rl.megatron_rules import MEGATRON_RULES
from strop.extensions.recipes.nemo_rl.model_rules import (
    MODEL_RULES,
    OPTIMIZER_RULES,
    ROUTER_RULES,
    RUN_RULES,
    TEACHER_RULES,
    translate_modelopt,
)
from strop.extensions.recipes.nemo_rl.training_rules import ADVANTAGE_RULES, LOSS_RULES, SINGLE_CONTROLLER_RULES, TRAINING_RULES
from strop.extensions.recipes.rules import Rule

NEMO_RL_RULES: tuple[Rule, ...] = (
    *TEACHER_RULES,
    *UNSUPPORTED_RULES,
    translate_modelopt,
    *SINGLE_CONTROLLER_RULES,
    *MEDIA_RULES,
    *RUN_RULES,
    *ENVIRONMENT_RULES,
    *ADVANTAGE_RULES,
    *LOSS_RULES,
    *TRAINING_RULES,
    *MEGATRON_RULES,
    *MODEL_RULES,
    *OPTIMIZER_RULES,
    *ROUTER_RULES,
    *GENERATION_RULES,
    *DATA_RULES,
    explain_learner,
)


KINDS = ("eval", "distillation", "ppo", "grpo", "sft", "dpo", "rm")  # a file of the first ones may have sections of the others


def find_kind(values: Mapping[str, Any]) -> str | None:
    """Return the kind of run that the sections of a configuration make; None if it is no run's."""
    return next((kind for kind in KINDS if kind in values), None)


def read_nemo_rl(path: Path) -> ReadRecipe:
    source = read_config_file(path)
    return ReadRecipe(find_kind(source.values), source)


FORMAT = RecipeFormat(DEFAULT, lambda values: find_kind(values) is not None, read_nemo_rl)
