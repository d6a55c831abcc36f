"""Sections ``policy.generation`` (``generation`` of an evaluation) and how weights reach the engines."""

from __future__ import annotations

from collections.abc import Mapping

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Refused, Rule, Unused

SPECULATION_KEYS = {"model": "model_name"}  # vLLM's names of options, and Strop's
SPECULATION_READ = frozenset(
    {"method", "model_name", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "draft_tensor_parallel_size"}
)
WEIGHT_SYNC = "policy.generation.weight_sync configures how weights are sent"


def translate_logprobs_mode(recipe: Recipe) -> None:
    """Accept raw log-probabilities where they are those of the sampling distribution."""
    for key in list(recipe.find("*generation.vllm_cfg.logprobs_mode")):
        if recipe.value(key) != "raw_logprobs":
            continue
        section = key.removesuffix(".vllm_cfg.logprobs_mode")
        off = {"temperature": (1,), "top_p": (1,), "top_k": (-1,), "min_p": (0,)}
        cut = [name for name, values in off.items() if recipe.value(f"{section}.{name}", values[0]) not in values]
        if not cut:
            recipe.note(
                key, Effect.RENAMED, "processed_logprobs here, which are the same at temperature 1 without top_k, top_p and min_p"
            )
            recipe.set(key, "processed_logprobs", because=key)
        else:
            changed = ", ".join(f"{section}.{name}={recipe.value(f'{section}.{name}')}" for name in cut)
            recipe.refuse(
                key,
                f"found 'raw_logprobs', but with {changed} tokens are sampled from another distribution, of which the learner computes "
                "log-probabilities",
                "Set it to processed_logprobs.",
            )


def translate_env_vars(recipe: Recipe) -> None:
    """Write the values of environment variables as texts, which they are for a process."""
    for key in list(recipe.find("*generation.vllm_cfg.env_vars")):
        variables = recipe.value(key, {})
        if isinstance(variables, Mapping) and not all(isinstance(value, str) for value in variables.values()):
            for name, value in variables.items():
                if not isinstance(value, str):
                    recipe.set(f"{key}.{name}", "" if value is None else str(value), because=f"{key}.{name}")
        elif variables == {} and recipe.is_set(key):
            recipe.drop(key)


def translate_speculation(recipe: Recipe) -> None:
    """Write vLLM's speculative_config as Strop's section ``speculation``."""
    for key in list(recipe.find("*generation.vllm_kwargs.speculative_config")):
        found = recipe.value(key)
        if not isinstance(found, Mapping):
            recipe.unused(key, "it is switched off")
            continue
        section = key.replace("vllm_kwargs.speculative_config", "vllm_cfg.speculation")
        options = {SPECULATION_KEYS.get(str(name), str(name)): value for name, value in found.items() if value is not None}
        if options.get("method") == "mtp" and "model_name" not in options:
            options["model_name"] = recipe.value("policy.model_name")
        for name in sorted(set(options) - SPECULATION_READ):
            recipe.refuse(f"{key}.{name}", f"found {options.pop(name)!r}, which {section} does not have", "Remove the key.")
        if options.pop("draft_tensor_parallel_size", None) is not None:
            recipe.note(f"{key}.draft_tensor_parallel_size", Effect.UNUSED, "a draft has the engine's tensor_parallel_size")
        if recipe.value("policy.draft.enabled"):
            options.pop("model_name", None)  # it is the head that is trained
        for name, value in options.items():
            recipe.set(f"{section}.{name}", value, because=key)
        recipe.note(key, Effect.RENAMED, f"{section} here")
        recipe.drop(key)


GENERATION_RULES: tuple[Rule, ...] = (
    translate_logprobs_mode,
    translate_env_vars,
    translate_speculation,
    Unused("*generation.port_range_*", "free ports are chosen automatically"),
    Unused("*generation.refit_*", WEIGHT_SYNC),
    Unused("*.refit_buffer_size_gb", WEIGHT_SYNC),
    Unused("*generation.vllm_cfg.use_tqdm", "the console shows the progress of a step"),
    Unused("*generation.vllm_cfg.*vllm_metrics_logger*", "the engine's statistics are logged at every step"),
    Unused("*generation.vllm_cfg.load_format", "weights are published by the learner"),
    Unused("*generation.vllm_cfg.skip_tokenizer_init", "stop strings need the tokenizer"),
    Refused(
        ("*generation.vllm_cfg.distributed_executor_backend",),
        "the engine chooses it",
        "Use policy.generation.vllm_kwargs. Remove the key.",
    ),
    Unused("*generation.vllm_cfg.*_refit_*", WEIGHT_SYNC),
    Unused("*generation.vllm_cfg.cap_max_tokens_to_context", "a completion ends at the engine's context anyway"),
    Unused("*generation.vllm_cfg.enable_thinking", "NeMo-RL does not read it; policy.tokenizer.chat_template_kwargs sets it"),
    Unused("*generation.vllm_cfg.enforce_monotonicity", "NeMo-RL does not read it"),
    Unused("*generation.vllm_cfg.enable_expert_parallel", "NeMo-RL does not read it; expert_parallel_size says it"),
)
