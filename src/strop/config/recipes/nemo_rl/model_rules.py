"""Trained models (``policy``, ``value``): batching, tokenizer, the torch learner."""

from __future__ import annotations

from strop.config.recipes.rules import Refused, Rule, Unused

MODEL_RULES: tuple[Rule, ...] = (
    Refused(("*.offload_optimizer_for_logprob",), "it is not in this version", "Remove the key."),
    Unused("*.make_sequence_length_divisible_by", "rows are packed without padding"),
    Refused(("*.tokenizer.use_fastokens",), "it is not in this version", "Remove the key."),
    Unused("*.dtensor_cfg._v2", "there is one torch learner"),
    Refused(("*.dtensor_cfg.automodel_kwargs",), "they are not in this version", "Remove the key."),
    Refused(
        ("*.dtensor_cfg.env_vars",),
        "environment variables are set for whole processes",
        "Use cluster.roles.learner.env_vars. Remove the key.",
    ),
    Unused("*.dtensor_cfg.clear_cache_every_n_steps", "the allocator's cache is left alone"),
    Refused(
        ("policy.activation_checkpointing_enabled",),
        "there is one key for it",
        "Use policy.dtensor_cfg.activation_checkpointing. Remove the key.",
    ),
    Refused(("policy.draft",), "draft models are not in this version", "Remove the key."),
    Unused("value.reward_model_cfg", "the critic is a sequence classifier with one label"),
    Unused("*.sequence_packing.algorithm", "groups are packed as a whole"),
    Unused("*.sequence_packing.microbatch_order", "the gradient does not depend on it"),
    Unused("*.sequence_length_round", "rows are packed without padding"),
)
