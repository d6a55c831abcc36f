"""Translate a recipe: from keys of NeMo-RL that Strop does not have to those that say the same here.

NeMo-RL's keys are mostly Strop's, so a file says by its keys whose it is: ``is_recipe``. A configuration in Strop's own words is not
translated, and imports no rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from strop.base_config import BaseConfig, KeyPath, fields_of, section_model
from strop.config.load.recipe_library import Translation
from strop.config.source.interpolation import resolve_source
from strop.config.source.keys import entry_model, find_field
from strop.config.source.yaml_source import ConfigSource, get_at
from strop.problems import Problem

MOST_NAMED = 8  # unused keys in a warning


def translate_nemo_rl(source: ConfigSource, root: type[BaseConfig]) -> Translation | None:
    """Translate what a recipe sets; None for a configuration in Strop's own keys."""
    if not is_recipe(source, root):
        return None
    from strop.extensions.recipes.nemo_rl.nemo_rl_rules import NEMO_RL_RULES
    from strop.extensions.recipes.rules import Effect, Recipe, matches_any

    recipe = Recipe(source, root)
    for rule in NEMO_RL_RULES:
        rule(recipe)
    place = {".".join(path): index for index, path in enumerate(source.origins)}
    differences = sorted(recipe.differences, key=lambda difference: place.get(difference.key, 0))
    refused, changed = (
        [each.to_problem() for each in differences if each.effect is effect] for effect in (Effect.REFUSED, Effect.CHANGED)
    )
    return Translation(
        recipe.finish(),
        tuple(refused),
        (*changed, *_warn_unused([each.key for each in differences if each.effect is Effect.UNUSED])),
        tuple(differences),
        partial(matches_any, patterns=tuple(recipe.explained)),
    )


def _warn_unused(unused: Sequence[str]) -> Iterator[Problem]:
    """Yield in one line what has no effect."""
    if unused:
        more = f" and {len(unused) - MOST_NAMED} more" if len(unused) > MOST_NAMED else ""
        message = f"ignored keys of NeMo-RL that have no effect here: {', '.join(unused[:MOST_NAMED])}{more}"
        yield Problem("", message, "`strop translate` says why of each.")


def is_recipe(source: ConfigSource, root: type[BaseConfig]) -> bool:
    """Return whether a configuration says anything in NeMo-RL's words: a key that Strop does not have, or a value that only NeMo-RL gives
    to a key of both."""
    values = resolve_source(source, root)[0]
    return any(not is_own_key(path, root) or _is_foreign_value(path, get_at(values, path)) for path in source.origins)


def is_own_key(path: KeyPath, root: type[BaseConfig]) -> bool:
    """Return whether Strop has a key, or leaves its name to the code that reads the mapping around it, such as an optimizer."""
    if path[0] == "env" and len(path) > 1:
        return path[1] not in ENVIRONMENTS and not path[1].startswith("should_") and path[2:3] not in ENVIRONMENT_OPTIONS
    if find_field(root, path) is not None:
        return True
    around = next((field for end in range(len(path) - 1, 0, -1) if (field := find_field(root, path[:end])) is not None), None)
    if around is None:
        return False
    if (section := section_model(around) or entry_model(around)) is None:
        return True
    options = fields_of(section).get("options")
    return options is not None and bool(options.exclude)  # it takes in all other keys


def _is_foreign_value(path: KeyPath, value: Any) -> bool:
    patterns = VALUES.get(path[-1]) or VALUES.get(".".join(path[-2:]), ())
    return any(fnmatchcase(str(value), pattern) for pattern in patterns)


ENVIRONMENTS = ("sliding_puzzle_game", "dapo", "math_default", "code_jaccard", "nemo_gym")  # aliases that have a meaning there
ENVIRONMENT_OPTIONS = {
    (name,)
    for name in (
        "num_workers", "verifier_type", "math_verify_impl", "stop_strings", "reward_functions", "terminate_on_evaluation", "resources",
        "dtensor_cfg", "megatron_cfg", "dynamic_batching", "sequence_packing", "max_grad_norm", "offload_optimizer_for_logprob",
        "make_sequence_length_divisible_by", "processor", "logprob_batch_size", "generation", "tokenizer", "max_model_len",
        "reward_model_cfg", "checkpoint_path",
    )
}  # fmt: skip
VALUES: Mapping[str, Sequence[str]] = {  # last name of a key, or last two -> patterns of values that only a recipe has
    "policy.model_name": ("None",),
    "generation.model_name": ("None",),
    **dict.fromkeys(("policy.optimizer", "value.optimizer"), ("None",)),  # the learning rate may be megatron_cfg's
    "policy.backend": ("torch", "megatron"),  # which learner reads what megatron_cfg says
    "megatron_cfg.enabled": ("True",),
    "dynamic_batching.enabled": ("True",),
    "optimizer.name": ("transformer_engine.*",),
    "generation.backend": ("megatron", "trtllm", "dynamo"),
    "vllm_cfg.logprobs_mode": ("raw_logprobs",),
    "speculative_config": ("*",),
    "limit_mm_per_prompt": ("*",),
    "adv_estimator.name": ("grpo", "gdpo", "reinforce_plus_plus", "raw_reward", "opd"),
    "loss_fn.disable_ppo_ratio": ("True",),
    "teachers": ("[[]*",),
    **dict.fromkeys(("val_period", "max_val_samples", "save_period"), ("-*",)),
    "max_num_epochs": ("-*", "0"),
    "val_batches": ("0",),
    "env_name": ("nemo_gym",),
    "dataset_name": (
        "ResponseDataset", "PreferenceDataset", "BinaryPreferenceDataset", "OpenAIFormatDataset", "openai_format", "NemoGymDataset",
        "general-conversation-jsonl", "arrow_text", "audiomcq", "avqa", "daily-omni", "intent-train", "intent-bench", "mmau",
        "TwinkStart/MMAU",
    ),
}  # fmt: skip
