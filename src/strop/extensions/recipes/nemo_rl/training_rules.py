"""The training sections (``grpo``, ``ppo``, ``distillation``, ``sft``, ``dpo``, ``rm``): lengths, validation, filters, penalties; and
``loss_fn``."""

from __future__ import annotations

from typing import Any

from strop.config.source.yaml_source import get_at
from strop.extensions.recipes.rules import Effect, Recipe, Refused, Rule, Unused, is_switched_off

SECTIONS = ("grpo", "ppo", "distillation", "sft", "dpo", "rm")
UNTIL_FULL = "with dynamic sampling, groups are sampled until the batch is full"
NOT_READ = "NeMo-RL does not read it either"
MESSAGE_PENALTIES = {  # NeMo-RL has them with NeMo-Gym only
    "grpo.invalid_tool_call_advantage": "reward_penalties.invalid_tool_call_advantage",
    "grpo.malformed_thinking_advantage": "reward_penalties.malformed_think_tag_advantage",
}


def translate_lengths(recipe: Recipe) -> None:
    """Translate numbers that stand for "off", "all" and "no limit"."""
    for section in SECTIONS:
        if not recipe.is_own_key(section):
            continue
        _replace_negative(recipe, f"{section}.val_period", 0, "0 here, no periodic validation")
        _replace_negative(recipe, f"{section}.max_val_samples", None, "null here, all tasks")
        _replace_negative(recipe, f"{section}.val_batches", -1, "-1 here, all batches", also_zero=True)
        _replace_epochs(recipe, section)
        _round_validation(recipe, section)
    key = "checkpointing.save_period"
    if _is_below(recipe, key, 0):
        recipe.set(key, 1, because=key)
        recipe.note(key, Effect.CHANGED, "NeMo-RL saves after every step, and 1 does here; 0 turns saving off")


def _replace_negative(recipe: Recipe, key: str, value: int | None, text: str, *, also_zero: bool = False) -> None:
    if _is_below(recipe, key, 1 if also_zero else 0) and recipe.value(key) != value:
        recipe.set(key, value, because=key)
        recipe.note(key, Effect.RENAMED, text)


def _replace_epochs(recipe: Recipe, section: str) -> None:
    key = f"{section}.max_num_epochs"
    if not _is_below(recipe, key, 1):
        return
    recipe.set(key, None, because=key)
    asynchronous = recipe.value(f"{section}.async_{section}.enabled", False)
    if asynchronous:
        recipe.note(key, Effect.RENAMED, "null here, no limit")
    else:
        recipe.note(key, Effect.CHANGED, "null here, no limit; NeMo-RL trains nothing unless it is asynchronous")


def _round_validation(recipe: Recipe, section: str) -> None:
    """NeMo-RL validates whole batches of ``val_batch_size`` tasks and leaves out the rest."""
    key, most = f"{section}.val_batch_size", f"{section}.max_val_samples"
    if not recipe.is_set(key):
        return
    size, tasks = recipe.value(key), recipe.value(most)
    if isinstance(size, int) and isinstance(tasks, int) and 0 < size <= tasks and tasks % size:
        recipe.rename(key, most, text=f"{most}={tasks - tasks % size} here: NeMo-RL validates whole batches of {size} tasks")
        recipe.set(most, tasks - tasks % size, because=most if recipe.is_set(most) else section)
    else:
        recipe.unused(key, "validation goes through the same engine, which batches by itself")


def translate_failures(recipe: Recipe) -> None:
    """NeMo-RL tolerates this number of failed groups in a row, and the next one ends the run."""
    for section in SECTIONS:
        for key in list(recipe.find(f"{section}.async_{section}.max_generation_failures")):
            tolerated = recipe.value(key, 0)
            if not recipe.value(f"{section}.async_{section}.enabled", False):
                recipe.unused(key, "generation is not asynchronous")
            elif isinstance(tolerated, int):
                recipe.rename(key, f"{section}.max_errors_in_a_row", max(tolerated, 0) + 1)


def translate_message_penalties(recipe: Recipe) -> None:
    for key, to in MESSAGE_PENALTIES.items():
        if recipe.is_set(key):
            if is_switched_off(recipe.value(key)):
                recipe.unused(key, "it is switched off")
            else:
                recipe.rename(key, to)


def _is_below(recipe: Recipe, key: str, bound: int) -> bool:
    value = get_at(recipe.source.values, tuple(key.split("."))) if recipe.is_set(key) else None
    if isinstance(value, str):
        value = recipe.value(key)
    return isinstance(value, int) and not isinstance(value, bool) and value < bound


TRAINING_RULES: tuple[Rule, ...] = (
    translate_lengths,
    translate_failures,
    translate_message_penalties,
    Unused("*.val_batch_size", "validation goes through the same engine, which batches by itself"),
    Unused("*.batch_multiplier", UNTIL_FULL),
    Unused("*.dynamic_sampling_oversample_ratio", UNTIL_FULL),
    Refused(
        ("grpo.zero_variance_prompt_filtering",),
        "NeMo-RL has no code for it",
        "Set grpo.use_dynamic_sampling=true to replace groups with equal rewards. Remove the key.",
    ),
    Unused("grpo.penalize_invalid_tool_call", NOT_READ),
    Unused("grpo.penalize_malformed_thinking", NOT_READ),
    Unused("grpo.invalid_tool_call_strategy", NOT_READ),
    Unused("grpo.num_val_generations_per_prompt", f"{NOT_READ}: it reads val_num_generations_per_prompt"),
    Unused("*.calculate_advantages_on_gpu", "advantages are computed in the driver process"),
    Unused("ppo.async_ppo.warmup_generation_lead_steps", "it only lets generation run ahead while the policy does not change"),
    Unused(
        "ppo.async_ppo.drop_incomplete_targets_on_restore",
        "groups in flight when a checkpoint was saved are sampled again by the run that continues",
    ),
)


CLIPS = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")


def drop_clips_without_ratio(recipe: Recipe) -> None:
    """Drop what REINFORCE has no use for: it has no ratio to clip or to set to 1."""
    key = "loss_fn.disable_ppo_ratio"
    if not (recipe.is_set(key) and recipe.value(key)):
        return
    for name in CLIPS:
        if recipe.is_set(f"loss_fn.{name}"):
            recipe.unused(f"loss_fn.{name}", "disable_ppo_ratio leaves no ratio to clip")
    if recipe.value("loss_fn.force_on_policy_ratio", False):
        recipe.unused("loss_fn.force_on_policy_ratio", "with disable_ppo_ratio there is no ratio, and the gradient is the same")


def translate_kl_place(recipe: Recipe) -> None:
    """Put the KL term where the estimator of the recipe reads it."""
    key = "loss_fn.use_kl_in_reward"
    if not (recipe.is_own_key("grpo") and recipe.is_set(key) and recipe.value(key)):
        return
    if not recipe.value("loss_fn.reference_policy_kl_penalty", 0):
        return
    name = recipe.value("grpo.adv_estimator.name")
    if name == "reinforce_plus_plus":
        recipe.set("algorithm.kl.place", "token_credit", because=key)
        recipe.note(key, Effect.RENAMED, "algorithm.kl.place=token_credit here")
        recipe.drop(key)
    elif name in ("grpo", "gdpo"):
        text = f"the KL estimate is subtracted from the reward; NeMo-RL's {name} does not read it, and trains without a KL term"
        recipe.note(key, Effect.CHANGED, text)


LOSS_RULES: tuple[Rule, ...] = (drop_clips_without_ratio, translate_kl_place)


SECTION = "grpo.adv_estimator"
ESTIMATORS = {  # NeMo-RL's name -> the advantage
    "grpo": "group_relative",
    "gdpo": "decoupled_rewards",
    "reinforce_plus_plus": "batch_whitened",
    "raw_reward": "plain_reward",
}
OPTIONS = ("normalize_rewards", "use_leave_one_out_baseline", "minus_baseline", "reward_weights", "normalize_advantages")
READS = {  # NeMo-RL's name -> the options that it reads
    "grpo": OPTIONS[:2],
    "gdpo": (*OPTIONS[:2], "reward_weights"),
    "reinforce_plus_plus": ("minus_baseline",),
    "raw_reward": ("normalize_advantages",),
}


def translate_estimator(recipe: Recipe) -> None:
    """Set the advantage and its options to what NeMo-RL's estimator computes."""
    if not (recipe.is_own_key("grpo") and recipe.is_set(SECTION)):
        return
    options = [name for name in OPTIONS if recipe.is_set(f"{SECTION}.{name}")]
    name = recipe.value(f"{SECTION}.name", "grpo" if options else None)
    if name is not None and not isinstance(name, str):
        return  # which the schema refuses
    if name == "opd":
        refuse_teachers(recipe)
    elif name in ESTIMATORS:
        _set_advantage(recipe, name)
    for option in options:
        key = f"{SECTION}.{option}"
        if option in READS.get(name, ()):
            recipe.drop(key)
        elif recipe.is_set(key):
            recipe.unused(key, f"{name} does not read it")


def refuse_teachers(recipe: Recipe) -> None:
    """Refuse on-policy distillation with several teachers, unless its own section, which is refused too, requests it."""
    if not recipe.value("on_policy_distillation"):
        recipe.refuse(
            f"{SECTION}.name",
            "found 'opd', whose credit comes from teachers, and strop grpo has none",
            "Use strop distillation with algorithm.name=distillation and a section teacher.",
        )
    recipe.drop(f"{SECTION}.name")


def _set_advantage(recipe: Recipe, name: str) -> None:
    key = f"{SECTION}.name"
    written = key if recipe.is_set(key) else SECTION
    own, values = _own_options(recipe, name), {}
    if name in ("grpo", "gdpo"):
        values = {
            "grpo.normalize_rewards": own["normalize_rewards"],
            "grpo.use_leave_one_out_baseline": own["use_leave_one_out_baseline"],
            f"{SECTION}.deviation": "others" if own["use_leave_one_out_baseline"] else "unbiased",
        }
        if recipe.is_set(f"{SECTION}.deviation"):
            del values[f"{SECTION}.deviation"]
    else:
        _drop_unread(recipe, name)
    if name == "gdpo":
        values["algorithm.advantage.weights"] = recipe.value(f"{SECTION}.reward_weights")
    if name == "reinforce_plus_plus":
        values["algorithm.advantage.group_mean"] = recipe.value(f"{SECTION}.minus_baseline", True)
    advantage = ESTIMATORS[name]
    if name == "raw_reward" and recipe.value(f"{SECTION}.normalize_advantages", True):
        advantage = "batch_whitened"
    for target, value in values.items():
        recipe.set(target, value, because=_origin(recipe, target, written))
    recipe.set(key, advantage, because=written)
    said = ", ".join(f"{target}={_written(value)}" for target, value in {key: advantage, **values}.items())
    recipe.note(written, Effect.RENAMED, f"{said} here")


def _own_options(recipe: Recipe, name: str) -> dict[str, Any]:
    """Return what the estimator's options are: as its section sets them, else as ``grpo`` does, else NeMo-RL's defaults."""
    found = {}
    for option in ("normalize_rewards", "use_leave_one_out_baseline"):
        keys = [key for key in (f"{SECTION}.{option}", f"grpo.{option}") if recipe.is_set(key)]
        found[option] = recipe.value(keys[0], True) if keys else True
    return found


def _drop_unread(recipe: Recipe, name: str) -> None:
    for option in ("normalize_rewards", "use_leave_one_out_baseline"):
        recipe.unused_if_set(f"grpo.{option}", f"{name} does not read it")


def _origin(recipe: Recipe, target: str, written: str) -> str:
    """Return the key of the recipe that gives ``target`` its value."""
    option = f"{SECTION}.{target.rpartition('.')[2]}"
    return option if recipe.is_set(option) else written


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def refuse_estimator_without_critic(recipe: Recipe) -> None:
    """NeMo-RL's ppo can leave its critic out, which is another kind of run here."""
    key = "ppo.adv_estimator.name"
    if recipe.is_own_key(key) and recipe.is_set(key) and recipe.value(key) == "raw_reward":
        recipe.refuse(
            key,
            "found 'raw_reward', which has no critic, and strop ppo trains one",
            "Use strop grpo with grpo.adv_estimator.name=raw_reward.",
        )


ADVANTAGE_RULES: tuple[Rule, ...] = (translate_estimator, refuse_estimator_without_critic)


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
