"""Trained models (``policy``, ``value``): batching, tokenizer, the torch learner."""

from __future__ import annotations

from strop.config.recipes.difference import Effect
from strop.config.recipes.nemo_rl.megatron.megatron_options import move_environment
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Refused, Renamed, Rule, Unused

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
        ("*.dequantize_base_checkpoint",),
        "quantised checkpoints are not in this version",
        "Set policy.model_name to a dequantised copy of the model, and remove the key.",
    ),
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
