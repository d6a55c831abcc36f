"""What each key of NeMo-RL's recipes that Strop does not have becomes here."""

from __future__ import annotations

from strop.extensions.recipes.nemo_rl.data_rules import DATA_RULES
from strop.extensions.recipes.nemo_rl.environment_rules import ENVIRONMENT_RULES, UNSUPPORTED_RULES, explain_learner
from strop.extensions.recipes.nemo_rl.generation_rules import GENERATION_RULES, MEDIA_RULES
from strop.extensions.recipes.nemo_rl.megatron_rules import MEGATRON_RULES
from strop.extensions.recipes.nemo_rl.model_rules import (
    MODEL_RULES,
    OPTIMIZER_RULES,
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
    *GENERATION_RULES,
    *DATA_RULES,
    explain_learner,
)
