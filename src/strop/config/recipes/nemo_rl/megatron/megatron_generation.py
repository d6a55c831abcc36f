"""Megatron Core as the engine of rollouts (``policy.generation.backend: megatron``), for which vLLM stands here."""

from __future__ import annotations

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import is_switched_off

SIZES = {"tensor_model_parallel_size": "tensor_parallel_size", "expert_model_parallel_size": "expert_parallel_size"}


def sample_with_vllm(recipe: Recipe) -> None:
    """Sample with vLLM engines of the same sizes: with the same weights and options the distribution is the same."""
    for key in list(recipe.find("*generation.backend")):
        section = key.removesuffix(".backend")
        asked = recipe.value(key) == "megatron"
        for option in list(recipe.find(f"{section}.mcore_generation_config.*")) if asked else []:
            size = SIZES.get(option.rpartition(".")[2])
            if size is not None and not is_switched_off(recipe.value(option)):
                recipe.rename(option, f"{section}.vllm_cfg.{size}", text="vLLM samples")
        if asked:
            recipe.set(key, "vllm", because=key)
            recipe.note(
                key,
                Effect.CHANGED,
                "rollouts are sampled by vLLM and not by Megatron Core, from the same weights with the same options: probabilities differ "
                "by rounding, and the learner's ratio is to what vLLM sampled",
            )
        recipe.unused_if_set(f"{section}.mcore_generation_config", "it is for Megatron Core's engine; vllm_cfg is for vLLM's")
