"""Section ``async_rl`` of NeMo-RL's single controller: asynchronous training whose weights change in flight."""

from __future__ import annotations

from typing import Any

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Rule

GROUPS = "grpo.num_prompts_per_step"
KEY, SAMPLER = "async_rl", "async_rl.sampler"


def translate_single_controller(recipe: Recipe) -> None:
    """Set ``grpo.async_grpo`` to what the sampler does; refuse samplers that have no counterpart."""
    if not recipe.is_set(KEY):
        return
    if recipe.value(KEY) is None:
        recipe.unused(KEY, "it is switched off")
        return
    if recipe.value("grpo.async_grpo.enabled"):
        text = f"found it together with grpo.async_grpo.enabled=true: NeMo-RL's single controller reads {KEY} alone"
        recipe.refuse(KEY, text, "Set grpo.async_grpo=null, or remove async_rl.")
        return
    options = _read_sampler(recipe)
    if options is None:  # it is refused
        recipe.explained.append(KEY)
        recipe.drop(KEY)
        return
    recipe.set("grpo.async_grpo", options, because=KEY)
    shown = ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())
    recipe.note(KEY, Effect.RENAMED, f"grpo.async_grpo has {shown} here")
    for name, why in UNUSED.items():
        recipe.unused_if_set(f"{KEY}.{name}", why)
    recipe.drop(KEY)


UNUSED = {
    "rollout_failure": "a group that fails is dropped and counted, and another takes its place; grpo.max_errors_in_a_row ends the run",
    "stall_watchdog": "the section watchdog says here who waits for whom",
    "generation_fleet_health": "an engine that dies is started again",
    "generation_router": "requests go to the engines that answer",
    "min_groups_for_streaming_train": "the gradient does not depend on how a step is cut",
    "max_inflight_prompts": "the engines take as many requests as they have room for",
    "diagnostics": "every rollout is stored, see logger.rollouts",
}


def _read_sampler(recipe: Recipe) -> dict[str, Any] | None:
    """Return ``grpo.async_grpo`` for the sampler; None for one that is refused. Weights always change in flight there."""
    name = recipe.value(f"{SAMPLER}.name", "in_order")
    age = recipe.value(f"{SAMPLER}.max_{'lookahead' if name == 'in_order' else 'staleness'}_versions", 1)
    if isinstance(age, bool) or not isinstance(age, int) or age < 0:
        recipe.refuse(SAMPLER, f"found {age!r} versions; it must be a whole number of at least 0", "Correct it.")
        return None
    options: dict[str, Any] = {
        "enabled": True,
        "max_trajectory_age_steps": age,
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": recipe.value(f"{KEY}.recompute_kv_cache_after_weight_updates", False),
    }
    if age == 0 and name != "windowed":  # the next batch begins when the last is trained on
        return {"enabled": False}
    match name:
        case "in_order":
            return options
        case "weight_fifo":
            text = "groups of one version are trained on in the order they began, not as they finish"
            recipe.note(f"{SAMPLER}.name", Effect.CHANGED, text)
            return options
        case "ready_first":
            text = "finished groups overtake others until one would get older than max_trajectory_age_steps, which is then waited for"
            recipe.note(f"{SAMPLER}.name", Effect.CHANGED, text)
            return {**options, "order": "windowed", "window": (age + 1) * recipe.value(GROUPS)}
        case "windowed" if not recipe.value(f"{SAMPLER}.sample_freshest_first", False):
            buffered = recipe.value(f"{KEY}.max_buffered_rollouts", 64)  # without those of the step that trains
            return {**options, "order": "drop_too_old", "slots": buffered + recipe.value(GROUPS)}
    recipe.refuse(
        f"{SAMPLER}.name",
        f"found {name!r}, whose order of groups there is no counterpart for",
        "Set in_order, ready_first, weight_fifo, or windowed without sample_freshest_first.",
    )
    return None


SINGLE_CONTROLLER_RULES: tuple[Rule, ...] = (translate_single_controller,)
