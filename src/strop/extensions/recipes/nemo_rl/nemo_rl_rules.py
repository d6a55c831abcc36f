"""What each key of NeMo-RL's recipes that Strop does not have becomes here."""

from __future__ import annotations

from strop.extensions.recipes.nemo_rl.advantage_rules import ADVANTAGE_RULES
from strop.extensions.recipes.nemo_rl.data_rules import DATA_RULES
from strop.extensions.recipes.nemo_rl.environment_rules import ENVIRONMENT_RULES
from strop.extensions.recipes.nemo_rl.generation_rules import GENERATION_RULES
from strop.extensions.recipes.nemo_rl.media_rules import MEDIA_RULES
from strop.extensions.recipes.nemo_rl.megatron.megatron_rules import MEGATRON_RULES
from strop.extensions.recipes.nemo_rl.model_rules import MODEL_RULES, OPTIMIZER_RULES, TEACHER_RULES
from strop.extensions.recipes.nemo_rl.modelopt_rules import translate_modelopt
from strop.extensions.recipes.nemo_rl.run_rules import RUN_RULES
from strop.extensions.recipes.nemo_rl.single_controller_rules import SINGLE_CONTROLLER_RULES
from strop.extensions.recipes.nemo_rl.training_rules import LOSS_RULES, TRAINING_RULES
from strop.extensions.recipes.nemo_rl.unsupported_rules import UNSUPPORTED_RULES, explain_learner
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
