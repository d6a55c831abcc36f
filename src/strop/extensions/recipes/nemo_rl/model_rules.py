"""Models (``policy``, ``value``, ``teacher``): batching, tokenizer, the torch learner, optimizers of other packages."""

from __future__ import annotations

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.nemo_rl.megatron.megatron_options import move_environment
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Refused, Renamed, Rule, Unused

PACKED = "rows are packed without padding"
SAME_MATH = "it chooses how the same numbers are computed"
AUTOMODEL = "*.dtensor_cfg.automodel_kwargs"


def cut_by_tokens(recipe: Recipe) -> None:
    """``dynamic_batching.enabled=true``: micro-batches of a number of tokens, which are packed ones here."""
    for model in ("policy", "value"):
        key = f"{model}.dynamic_batching.enabled"
        if not recipe.is_set(key) or recipe.value(key) is not True:
            continue
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            if recipe.is_set(f"{model}.dynamic_batching.{name}"):
                budget = recipe.value(f"{model}.dynamic_batching.{name}")
                recipe.set(f"{model}.sequence_packing.{name}", budget, because=f"{model}.dynamic_batching.{name}")
        recipe.set(f"{model}.sequence_packing.enabled", True, because=key)
        text = f"{model}.sequence_packing cuts by the same numbers of tokens here, without padding; the gradient is the same"
        recipe.note(key, Effect.RENAMED, text)
        recipe.drop(key)


def move_environments(recipe: Recipe) -> None:
    for model in ("policy", "value"):
        move_environment(recipe, f"{model}.dtensor_cfg.env_vars")


MODEL_RULES: tuple[Rule, ...] = (
    cut_by_tokens,
    move_environments,
    Renamed("*.activation_checkpointing_enabled", "*.dtensor_cfg.activation_checkpointing"),
    Unused("*.offload_optimizer_for_logprob", "it changes memory only"),
    Unused("*.make_sequence_length_divisible_by", PACKED),
    Unused("*.sequence_length_round", PACKED),
    Unused("*.sequence_packing.algorithm", "groups are packed as a whole"),
    Unused("*.sequence_packing.microbatch_order", "the gradient does not depend on it"),
    Unused("*.sequence_packing.fuse_loss", "the loss of a packed row is computed at once"),
    Unused("policy.refit_buffer_size_gb", "it changes how weights are sent: policy.generation.weight_sync.bucket_mb does here"),
    Unused("*.tokenizer.use_fastokens", "it gives the same tokens"),
    Unused("*.dtensor_cfg._v2", "there is one torch learner"),
    Unused("*.dtensor_cfg.clear_cache_every_n_steps", "the allocator's cache is left alone"),
    Unused("*.dtensor_cfg.defer_fsdp_grad_sync", "gradients are summed over the ranks once an optimizer step"),
    Unused("*.dtensor_cfg.moe_parallelizer.ignore_router_for_ac", "recomputed activations are the same"),
    Refused(("*.dtensor_cfg.moe_parallelizer.*",), "what this option of Automodel would be here is not known", "Remove the key."),
    Unused("*.dtensor_cfg.moe_parallelizer", "nothing else is in it"),
    Unused("*.dtensor_cfg.lora_cfg.lora_dtype", "adapters are float32"),
    Unused(f"{AUTOMODEL}.force_hf", "models are Hugging Face's own"),
    Unused(f"{AUTOMODEL}.attn_implementation", SAME_MATH),
    Unused(f"{AUTOMODEL}.use_liger_kernel", SAME_MATH),
    Unused(f"{AUTOMODEL}.use_sdpa_patching", SAME_MATH),
    Refused(
        (f"{AUTOMODEL}.backend.fake_balanced_gate",),
        "this replaces the router of a mixture of experts for measurements of speed",
        "Set it to false.",
    ),
    Unused(f"{AUTOMODEL}.backend", SAME_MATH),
    Refused(
        (f"{AUTOMODEL}.freeze_config.freeze_language_model",),
        "no part of a model can be frozen in this version",
        "Remove the key.",
    ),
    Unused(f"{AUTOMODEL}.freeze_config", "nothing else is in it"),
    Refused((f"{AUTOMODEL}.*",), "what this option of Automodel would be here is not known", "Remove the key."),
    Unused(AUTOMODEL, "nothing else is in it"),
    Refused(
        ("policy.pretrained_checkpoint",),
        "the weights are those of policy.model_name",
        "Set policy.model_name to a Hugging Face folder with these weights, and remove the key.",
    ),
    Unused("value.reward_model_cfg", "the critic is a sequence classifier with one label"),
    Refused(
        ("policy.reward_model_cfg",),
        "this run trains a language model",
        "Use strop rm to train a reward model, or set enabled=false.",
    ),
)


# Of Transformer Engine's optimizer: in which type it keeps what, which torch's keeps as the weights.
STORAGE = (
    "master_weights", "master_weight_dtype", "store_param_remainders", "exp_avg_dtype", "exp_avg_sq_dtype", "set_grad_none",
    "capturable", "use_decoupled_grad",
)  # fmt: skip


def translate_fused_adam(recipe: Recipe) -> None:
    """Take torch's AdamW, the same formula, for Transformer Engine's fused one."""
    for key in list(recipe.find("*.optimizer.name")):
        if not str(recipe.value(key)).startswith("transformer_engine.") or not str(recipe.value(key)).endswith(".FusedAdam"):
            continue
        options = f"{key.removesuffix('.name')}.kwargs"
        decoupled = recipe.value(f"{options}.adam_w_mode", True)
        name = "torch.optim.AdamW" if decoupled else "torch.optim.Adam"
        recipe.set(key, name, because=key)
        for option in (*STORAGE, "adam_w_mode"):
            recipe.drop(f"{options}.{option}")
        if recipe.value(f"{options}.weight_decay") is None:
            recipe.set(f"{options}.weight_decay", 0.0, because=key)  # its default
        recipe.note(key, Effect.CHANGED, f"{name} here, the same formula, with moments in the type of the trained weights")


OPTIMIZER_RULES: tuple[Rule, ...] = (translate_fused_adam,)


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
