"""NeMo-Gym: ``env.should_use_nemo_gym``, section ``env.nemo_gym``, and the server of vLLM through which its agents reach the policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.rules import Effect, Recipe, Refused, Rule, is_switched_off

SECTION = "env.nemo_gym"
OWN_OPTIONS = (  # of Strop's environment nemo_gym
    "type", "config", "python", "start_timeout_s", "head_url", "servers", "components", "timeout_s", "agent_timeout_s", "reward_weights",
    "effort_levels",
)  # fmt: skip
STARTED_APART = "NeMo-Gym's servers are started apart from the run, with their own configuration"
GATEWAY = "the gateway answers agents, and parses tool calls by the model's chat format"
IGNORED = {  # keys of the section that NeMo-RL reads, or sets
    "pad_dynamic_image_shapes": "images are packed with their own sizes",
    "tokenizer_config": "the gateway tokenizes",
    "policy_base_url": GATEWAY,
    "policy_api_key": GATEWAY,
    "token_id_capture": "the gateway records tokens",
}
PENALTIES = {
    "invalid_tool_call_patterns": "reward_penalties.tool_call_patterns",
    "thinking_tags": "reward_penalties.thinking_tags",
}
SERVER_OPTIONS = ("expose_http_server", "http_server_serving_chat_kwargs", "reasoning_parser_plugin", "tool_parser_plugin")
MOST_TURNS = 1024


def translate_nemo_gym(recipe: Recipe) -> None:
    """Let the run start the servers that a recipe describes, or reach those that it has the addresses of."""
    starts = any(recipe.value(key) for key in ("env.should_use_nemo_gym", f"{SECTION}.config_paths", f"{SECTION}.config"))
    if not starts and not has_addresses(recipe):
        return drop_server_options(
            recipe, "nothing in the recipe requests NeMo-Gym, and agents reach the policy through the gateway"
        )
    for key in list(recipe.find("env.should_*nemo_gym*")):
        recipe.unused(key, "the environment of the data is nemo_gym, and every rollout is stored")
    for key in list(recipe.find("env.should_mask_flagged_samples")):
        if recipe.value(key) is False:
            recipe.note(key, Effect.CHANGED, "a sample that a server could not measure is left out; NeMo-RL trains on its reward")
            recipe.drop(key)
        else:
            recipe.unused(key, "a sample that a server could not measure is an error of its rollout, which is not trained on")
    _translate_section(recipe)
    if recipe.value("grpo.adv_estimator.name") == "gdpo" and not recipe.value(f"{SECTION}.components"):
        recipe.refuse(
            "grpo.adv_estimator.name",
            "found 'gdpo', but a reward for each component must be known before the first answer of a verifier",
            f"Set {SECTION}.components to the names in its reward_components, in alphabetical order.",
        )
        recipe.explained.append("grpo.adv_estimator")
    _translate_template(recipe)
    drop_server_options(recipe, GATEWAY)
    for key in list(recipe.find("policy.generation.stop_*")):
        if recipe.value(key):
            recipe.unused(key, "NeMo-RL sets it to null with NeMo-Gym")
    for section in ("grpo", "distillation", "ppo"):
        key = f"{section}.max_rollout_turns"
        if not recipe.value("env.should_use_nemo_gym") or not recipe.is_own_key(key) or recipe.is_on_command_line(key):
            continue
        if recipe.value(key, MOST_TURNS) < MOST_TURNS:
            recipe.set(key, MOST_TURNS, because=key if recipe.is_written(key) else "env.should_use_nemo_gym")
            recipe.note(key, Effect.RENAMED, f"{MOST_TURNS} here, no limit: NeMo-RL leaves it to NeMo-Gym's agents (max_steps)")
    for key in list(recipe.find("sif_dir")):
        recipe.unused(key, "other keys refer to it, and have its value")


def has_addresses(recipe: Recipe) -> bool:
    """Return whether a recipe says where NeMo-Gym's servers are, which then run separately."""
    return any(recipe.is_set(f"{SECTION}.{name}") for name in ("head_url", "servers"))


def drop_server_options(recipe: Recipe, why: str) -> None:
    for name in SERVER_OPTIONS:
        for key in list(recipe.find(f"*generation.*_c*f*g.{name}")):
            recipe.unused(key, "it is switched off" if is_switched_off(recipe.value(key)) else why)


def _translate_section(recipe: Recipe) -> None:
    """Move what NeMo-RL passes on to NeMo-Gym to ``config``, and translate what it reads itself."""
    written = get_at(recipe.source.values, ("env", "nemo_gym"))
    apart = has_addresses(recipe)
    passed: dict[str, Any] = {}
    for name, value in list(written.items()) if isinstance(written, Mapping) else []:
        key = f"{SECTION}.{name}"
        if name in PENALTIES:
            recipe.rename(key, PENALTIES[name])
        elif name in IGNORED or (name == "effort_levels" and not _shapes(recipe.value(key))):
            recipe.unused(key, IGNORED.get(name, "it is switched off"))
        elif name == "is_trajectory_collection":
            Refused([key], "the run trains", "Remove it, and evaluate with strop eval.")(recipe)
        elif name == "num_gpu_nodes":
            _translate_nodes(recipe, key)
        elif apart and name not in OWN_OPTIONS:
            recipe.unused(key, STARTED_APART)
        elif name not in OWN_OPTIONS:
            passed[name] = _resolve(value, recipe.value(key))
            _refuse_bad_words(recipe, key, passed[name])
            recipe.drop(key)
    if passed:
        place = f"{SECTION}.config_paths"
        recipe.set(f"{SECTION}.config", passed, because=place if recipe.is_written(place) else SECTION)
        recipe.note(place, Effect.RENAMED, f"{SECTION}.config here, with the other keys that NeMo-Gym reads")


def _shapes(levels: Any) -> bool:
    return isinstance(levels, Mapping) and bool(levels.get("low_string")) and (levels.get("low_weight") or 0) > 0


def _translate_nodes(recipe: Recipe, key: str) -> None:
    if is_switched_off(recipe.value(key)):
        return recipe.unused(key, "it is switched off")
    text = (
        "NeMo-Gym starts its judges on GPUs that are free in the Ray cluster of RAY_ADDRESS, or else in one of its own; NeMo-RL keeps "
        f"{recipe.value(key)} nodes of its cluster free for them"
    )
    recipe.note(key, Effect.CHANGED, text)
    recipe.drop(key)


def _refuse_bad_words(recipe: Recipe, key: str, server: Any) -> None:
    models = server.get("responses_api_models") if isinstance(server, Mapping) else None
    for kind, values in models.items() if isinstance(models, Mapping) else []:
        extra = values.get("extra_body") if isinstance(values, Mapping) else None
        if isinstance(extra, Mapping) and not is_switched_off(extra.get("bad_words")):
            place = f"{key}.responses_api_models.{kind}.extra_body.bad_words"
            why = "words cannot be forbidden: the learner would compute log-probabilities of another distribution than the engine sampled"
            recipe.refuse(place, f"found {extra['bad_words']!r:.80}, but {why}", "Remove the key, and let the reward count them.")


def _resolve(written: Any, resolved: Any) -> Any:
    """Return a value with what its ``${...}`` stand for; those without a value stay, and are reported where the run reads them."""
    if isinstance(written, Mapping):
        found = resolved if isinstance(resolved, Mapping) else {}
        return {name: _resolve(value, found.get(name)) for name, value in written.items()}
    if isinstance(written, list) and isinstance(resolved, list) and len(written) == len(resolved):
        return [_resolve(*pair) for pair in zip(written, resolved, strict=True)]
    return resolved if resolved is not None else written


def _translate_template(recipe: Recipe) -> None:
    """Take the chat template, and its variables, that NeMo-RL gives to vLLM's server: the agents' prompts are rendered with them."""
    for place in list(recipe.find("policy.generation.vllm_cfg.http_server_serving_chat_kwargs")):
        for name, own in (("chat_template", "chat_template"), ("default_chat_template_kwargs", "chat_template_kwargs")):
            key, to = f"{place}.{name}", f"policy.tokenizer.{own}"
            value = recipe.value(key)
            if value and value != recipe.value(to):
                recipe.set(to, value, because=key)
                recipe.note(key, Effect.RENAMED, f"{to} here")


NEMO_GYM_RULES: tuple[Rule, ...] = (translate_nemo_gym,)
