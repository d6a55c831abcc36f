"""Teachers (``teacher``, ``teachers``)."""

from __future__ import annotations

from strop.config.recipes.rules import Rule, Unused

TRAINING_KEYS = (
    "train_*",
    "generation*",
    "optimizer*",
    "scheduler",
    "max_grad_norm",
    "logprob_*",
    "megatron_cfg*",
    "dynamic_batching*",
    "sequence_packing*",
    "make_sequence_length_divisible_by",
    "offload_optimizer_for_logprob",
    "hf_config_overrides",
    "max_total_sequence_length",
)
TEACHER_RULES: tuple[Rule, ...] = tuple(Unused(f"teacher.{key}", "the teacher only scores") for key in TRAINING_KEYS)
