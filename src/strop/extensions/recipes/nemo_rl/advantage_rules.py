"""Section ``grpo.adv_estimator``: NeMo-RL's estimators, each with its own options, which win over those of ``grpo``."""

from __future__ import annotations

from typing import Any

from strop.extensions.recipes.difference import Effect
from strop.extensions.recipes.recipe import Recipe
from strop.extensions.recipes.rules import Rule

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
