"""Section ``env``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from strop.config.recipes.difference import Effect
from strop.config.recipes.recipe import Recipe
from strop.config.recipes.rules import Rule, is_switched_off
from strop.config.source.yaml_source import get_at

MATH_VERIFIERS = {"hf_math_verify": "math_verify", "dapo_math_verify": "dapo"}
CHOICE_VERIFIERS = ("english_multichoice", "multilingual_multichoice")
OWN_REWARD = "Score the answers with a function of yours: env.{alias}={{reward: file.py:function}}."

# A game makes its own tasks, in a script of its own: that no data names it does not say that it is not played.
GAME = "sliding_puzzle_game"
OWN_GAME = (
    "Write the game as a class (env.sliding_puzzle_game.type=file.py:Class, and data.train.env_name names it), or remove the section "
    "(~env.sliding_puzzle_game) to train on data.train."
)

# Environments of NeMo-RL, by alias, that Strop does not have. Those of images and of NeMo-Gym are refused with their data.
MISSING_ENVIRONMENTS = {
    "code": "no environment of this version runs programs that a model wrote",
    "code_jaccard": "rewards for overlap with a reference program are not built in",
    GAME: "its game is not built in",
}
# How NeMo-RL places, batches and trains a reward model changes none of its scores.
ONLY_SCORES = "the reward model is loaded whole and only scores"
REWARD_MODEL_LAYOUT = {
    "resources": "the reward model is whole in the driver's process, on its first GPU; cluster.environment_hosts=1 with "
    "cluster.roles.environment.num_gpus=1 gives it one of its own",
    **dict.fromkeys(("dtensor_cfg", "megatron_cfg", "dynamic_batching", "sequence_packing", "max_grad_norm"), ONLY_SCORES),
    **dict.fromkeys(("num_workers", "offload_optimizer_for_logprob", "make_sequence_length_divisible_by"), ONLY_SCORES),
    **dict.fromkeys(("processor", "logprob_batch_size", "generation"), ONLY_SCORES),
}
REWARD_MODEL_KEYS = {*REWARD_MODEL_LAYOUT, "tokenizer", "max_model_len", "reward_model_cfg", "checkpoint_path"}  # NeMo-RL's alone


NEMO_GYM_ADDRESSES = ("env.nemo_gym.head_url", "env.nemo_gym.servers")
NEMO_GYM_OPTIONS = ("type", "head_url", "servers", "components", "timeout_s", "agent_timeout_s", "reward_weights")  # Strop's
STARTED_APART = "NeMo-Gym's servers are started apart from the run, with their own configuration"
GATEWAY = "the gateway answers agents, and parses calls of tools by the model's chat format"


def has_nemo_gym_servers(recipe: Recipe) -> bool:
    """Return whether a recipe says where NeMo-Gym's servers are."""
    return any(recipe.is_set(key) for key in NEMO_GYM_ADDRESSES)


def translate_nemo_gym(recipe: Recipe) -> None:
    """Translate a recipe of NeMo-Gym's that says where its servers are: its data and its rewards stay, its set-up is not needed."""
    for key in list(recipe.find("env.should_*nemo_gym*")):
        recipe.unused(key, "the environment of the data is nemo_gym")
    for key in list(recipe.find("env.should_mask_flagged_samples")):
        recipe.unused(key, "a sample that a server could not measure is an error of its rollout, which is not trained on")
    for name in list(recipe.value("env.nemo_gym") or {}):
        if name not in NEMO_GYM_OPTIONS:
            recipe.unused(f"env.nemo_gym.{name}", STARTED_APART)
    for name in ("expose_http_server", "http_server_serving_chat_kwargs", "reasoning_parser_plugin", "tool_parser_plugin"):
        for key in list(recipe.find(f"*generation.vllm_cfg.{name}")):
            recipe.unused(key, GATEWAY)


def translate_environments(recipe: Recipe) -> None:
    """Translate the options of each environment. One that no data names is not made by NeMo-RL, and need not exist."""
    written = get_at(recipe.source.values, ("env",))
    if not isinstance(written, Mapping) or not any(written.get(alias) for alias in (*MISSING_ENVIRONMENTS, *TRANSLATIONS)):
        return
    used = set(_used_aliases(recipe))
    for alias, options in list((recipe.value("env") or {}).items()):
        key = f"env.{alias}"
        if not isinstance(options, Mapping) or options.get("type") or {"reward", "rewards"} & set(options):
            continue
        if alias == GAME:
            recipe.refuse(key, MISSING_ENVIRONMENTS[alias], OWN_GAME)
        elif why := MISSING_ENVIRONMENTS.get(alias):
            if used and alias not in used and not recipe.is_on_command_line(key):
                recipe.unused(key, "no data names it")
            else:
                recipe.refuse(key, why, OWN_REWARD.format(alias=alias))
        elif translate := TRANSLATIONS.get(alias):
            translate(recipe, key, options)


def _used_aliases(recipe: Recipe) -> Iterator[str]:
    for part in ("train", "validation", "default"):
        entries = recipe.value(f"data.{part}")
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, Mapping) and entry.get("env_name"):
                yield str(entry["env_name"])
    if name := recipe.value("data.env_name"):
        yield str(name)


def _translate_math(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if key == "env.math_default":
        recipe.set(f"{key}.type", "math", because=key)
    kind, checker = options.get("verifier_type"), options.get("math_verify_impl")
    if str(kind) in CHOICE_VERIFIERS:
        recipe.rename(f"{key}.verifier_type", f"{key}.verifier", kind)
        checker = None  # not read beside it
    elif kind in (None, "math"):
        _drop(recipe, f"{key}.verifier_type", "math is how the environment checks answers anyway")
    else:
        _refuse_value(recipe, f"{key}.verifier_type", kind, ("math", *CHOICE_VERIFIERS))
    if str(checker) in MATH_VERIFIERS:
        recipe.rename(f"{key}.math_verify_impl", f"{key}.verifier", MATH_VERIFIERS[str(checker)])
    elif checker is None:
        _drop(recipe, f"{key}.math_verify_impl", "it does not apply to this kind of answer")
    else:
        _refuse_value(recipe, f"{key}.math_verify_impl", checker, tuple(MATH_VERIFIERS))
    _drop(recipe, f"{key}.stop_strings", "the environment does not read it; policy.generation.stop_strings stops a turn")


def _translate_math_multi_reward(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if (checker := options.get("math_verify_impl", "hf_math_verify")) != "hf_math_verify":
        _refuse_value(recipe, f"{key}.math_verify_impl", checker, ("hf_math_verify",))
    _drop(recipe, f"{key}.math_verify_impl", "the answer is compared as text, there too")
    _drop(recipe, f"{key}.verifier_type", "there is one verifier")
    _drop(recipe, f"{key}.stop_strings", "the environment does not read it; policy.generation.stop_strings stops a turn")


def _translate_reward_model(recipe: Recipe, key: str, options: Mapping[str, Any]) -> None:
    if not REWARD_MODEL_KEYS & options.keys():
        return  # Strop's own keys
    _refuse_divided_reward_model(recipe, f"{key}.dtensor_cfg", options.get("dtensor_cfg"))
    for name, why in REWARD_MODEL_LAYOUT.items():
        _drop(recipe, f"{key}.{name}", why)
    if isinstance(tokenizer := options.get("tokenizer"), Mapping):
        template = tokenizer.get("chat_template")
        if template not in (None, "default"):
            recipe.set(f"{key}.chat_template", template, because=f"{key}.tokenizer.chat_template")
        if tokenizer.get("name", options.get("model_name")) != options.get("model_name"):
            recipe.refuse(
                f"{key}.tokenizer.name", "the reward model has its own tokenizer here", f"Set it to ${{{key}.model_name}}."
            )
        _drop(recipe, f"{key}.tokenizer", "its name is the model's, and its chat template is chat_template here")
    if options.get("max_model_len") is not None:
        recipe.rename(f"{key}.max_model_len", f"{key}.max_length")
    kind = options.get("reward_model_cfg")
    if isinstance(kind, Mapping) and kind.get("reward_model_type", "bradley_terry") != "bradley_terry":
        _refuse_value(recipe, f"{key}.reward_model_cfg.reward_model_type", kind["reward_model_type"], ("bradley_terry",))
    _drop(recipe, f"{key}.reward_model_cfg", "a reward model has one score here, too")
    if is_switched_off(options.get("checkpoint_path")):
        _drop(recipe, f"{key}.checkpoint_path", "it is switched off")
    else:
        recipe.refuse(
            f"{key}.checkpoint_path",
            "weights are read from the folder of the model, not from a checkpoint of training",
            f"Export the checkpoint, set {key}.model_name to its folder, and remove the key.",
        )
    recipe.note(
        key,
        Effect.CHANGED,
        "the reward model reads the messages in its own chat template; NeMo-RL gives it the prompt as the policy's template renders it, "
        "inside a message of the user",
    )


def _refuse_divided_reward_model(recipe: Recipe, key: str, sizes: Any) -> None:
    """Refuse the first size above 1: who divides a reward model does so because one GPU does not hold it."""
    for name in ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"):
        size = sizes.get(name) if isinstance(sizes, Mapping) else None
        if isinstance(size, int) and size > 1:
            recipe.refuse(
                f"{key}.{name}",
                f"found {size}, but the reward model of an environment is whole on one device in this version",
                "Set it to 1 if the model fits one GPU.",
            )
            return


TRANSLATIONS: Mapping[str, Callable[[Recipe, str, Mapping[str, Any]], None]] = {
    "math": _translate_math,
    "math_default": _translate_math,
    "math_multi_reward": _translate_math_multi_reward,
    "reward_model": _translate_reward_model,
}


def _drop(recipe: Recipe, key: str, why: str) -> None:
    if recipe.is_set(key):
        recipe.unused(key, why)


def _refuse_value(recipe: Recipe, key: str, value: Any, known: tuple[str, ...]) -> None:
    recipe.refuse(key, f"found {value!r:.80}; NeMo-RL has {' and '.join(known)}", f"Set it to {' or '.join(known)}.")


ENVIRONMENT_RULES: tuple[Rule, ...] = (translate_environments,)
