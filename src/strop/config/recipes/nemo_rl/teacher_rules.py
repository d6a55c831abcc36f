"""Teachers (``teacher``, ``teachers``)."""

from __future__ import annotations

from strop.config.recipes.rules import Refused, Rule, Unused

CUTS = "teacher.logprob_mb_tokens cuts what the teacher reads"
WHY_UNUSED = {
    "train_*": "the teacher is not trained",
    "optimizer*": "the teacher is not trained",
    "scheduler": "the teacher is not trained",
    "max_grad_norm": "the teacher is not trained",
    "offload_optimizer_for_logprob": "the teacher is not trained",
    "hf_config_overrides.router_aux_loss_coef": "the teacher is not trained",
    "generation*": "the teacher does not sample",
    "logprob_*": CUTS,
    "dynamic_batching*": CUTS,
    "sequence_packing*": CUTS,
    "make_sequence_length_divisible_by": "rows are packed without padding",
    "max_total_sequence_length": "the teacher reads the student's rollouts whole",
}
TEACHER_RULES: tuple[Rule, ...] = (
    *(Unused(f"teacher.{key}", why) for key, why in WHY_UNUSED.items()),
    Refused(
        ("teacher.hf_config_overrides",),
        "a teacher is read with the configuration in its folder",
        "Change config.json in a copy of its folder, and set teacher.model_name to the copy. Remove the key.",
    ),
)
