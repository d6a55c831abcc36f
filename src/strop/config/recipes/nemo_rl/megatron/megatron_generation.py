"""Megatron Core as the engine of rollouts (``policy.generation.backend: megatron``), for which vLLM stands here."""

from __future__ import annotations

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import is_switched_off

SIZES = {"tensor_model_parallel_size": "tensor_parallel_size", "expert_model_parallel_size": "expert_parallel_size"}


def sample_with_vllm(recipe: Recipe) -> None:
    """Sample with vLLM engines of the same sizes: with the same weights and options the distribution is the same.

    Whoever asks for Megatron Core on the command line is told that it does not sample in this version.
    """
    for key in list(recipe.find("*generation.backend")):
        if recipe.value(key) == "megatron" and not recipe.is_on_command_line(key):
            _translate_backend(recipe, key)
    for key in list(recipe.find("*generation.mcore_generation_config")):
        recipe.unused(key, "it is for Megatron Core's engine; vllm_cfg is for vLLM's")


def _translate_backend(recipe: Recipe, key: str) -> None:
    section = key.removesuffix(".backend")
    for option in list(recipe.find(f"{section}.mcore_generation_config.*")):
        size = SIZES.get(option.rpartition(".")[2])
        if size is not None and not is_switched_off(recipe.value(option)):
            recipe.rename(option, f"{section}.vllm_cfg.{size}", text="vLLM samples")
    recipe.set(key, "vllm", because=key)
    recipe.note(
        key,
        Effect.CHANGED,
        "rollouts are sampled by vLLM and not by Megatron Core, from the same weights with the same options: probabilities differ by "
        "rounding, and the learner's ratio is to what vLLM sampled",
    )
