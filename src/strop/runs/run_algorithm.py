"""Create the algorithm of a run without importing torch, so that incompatibilities are found before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from strop.algorithm_factory import AlgorithmSetting, find_algorithm, make_algorithm
from strop.algorithms.base import Algorithm, Plan
from strop.algorithms.critic import Gae
from strop.algorithms.policy_gradient.composition import Composition
from strop.base_config import default_of, fields_of, iter_sections, option_set_by
from strop.config import TRAINING_RUNS, GrpoRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.schema.grpo_config import AlgorithmConfig, LossConfig
from strop.config.schema.run_config import PpoRunConfig
from strop.runs.tasks import have_turn_states, list_reward_names
from strop.trainer.training_config import RewardShapingConfig


def collect_settings(config: TrainingRunConfig) -> list[AlgorithmSetting]:
    """Return the settings of a configuration in the order of application: parts before their options, ``algorithm.*`` last.

    Raises ValueError for contradictions.
    """
    flat = [*_part_settings(config), *_named_settings(config)]
    flat.sort(key=lambda setting: "." in setting.field)
    options = [AlgorithmSetting(f"algorithm.{name}", name, value) for name, value in config.algorithm.options.items()]
    for part in flat:
        named = [option.key for option in options if option.field == part.field and _names_part(option.value)]
        if named:
            raise ValueError(f"{part.key} chooses the {part.field}, and {named[0]} names one too; remove one of them")
    return [*flat, *options]


def _names_part(value: object) -> bool:
    """Return whether a value replaces a whole part, rather than options of one."""
    return not isinstance(value, dict) or "name" in value


def _named_settings(config: TrainingRunConfig) -> Iterator[AlgorithmSetting]:
    """Yield the keys that are declared as aliases of an option (``strop.base_config.sets``) and differ from their default."""
    for key, section in iter_sections(config):
        for name, field in fields_of(type(section)).items():
            option, value = option_set_by(field), getattr(section, name)
            if option is not None and value != default_of(section, name) and config.needs_option(option, value):
                yield AlgorithmSetting(f"{key}.{name}", option, value)


def _part_settings(config: TrainingRunConfig) -> Iterator[AlgorithmSetting]:
    """Yield the keys that choose a part, or set several options."""
    match config:
        case GrpoRunConfig():
            if (name := config.grpo.adv_estimator.name) is not None:
                yield AlgorithmSetting("grpo.adv_estimator.name", "advantage", ADVANTAGE_NAMES.get(name, name))
            yield from shaping_settings("grpo", config.grpo.reward_shaping)
            yield from _policy_loss_settings(config.loss_fn, config.algorithm, kl_in_reward="reward")
        case PpoRunConfig():
            yield from _lambda_settings(config)
            estimator = config.ppo.adv_estimator
            if estimator.normalize_advantages and estimator.deviation is None:
                yield AlgorithmSetting("ppo.adv_estimator.normalize_advantages", "advantage.deviation", "unbiased")
            if (clip := config.value_loss_fn.cliprange) != default_of(config.value_loss_fn, "cliprange"):
                yield AlgorithmSetting("value_loss_fn.cliprange", "value_clip", clip or None)
            yield from shaping_settings("ppo", config.ppo.reward_shaping)
            yield from _policy_loss_settings(config.loss_fn, config.algorithm, kl_in_reward="token_reward")
        case _:
            yield from config.algorithm_settings()


ADVANTAGE_NAMES = {"grpo": "group_relative"}  # NeMo-RL's name -> Strop's name, if they differ


def _lambda_settings(config: PpoRunConfig) -> Iterator[AlgorithmSetting]:
    """``gae_lambda`` is the policy's lambda. If the policy has a separate key for it, ``gae_lambda`` is the critic's, which does
    not follow that one.
    """
    gae, key = config.ppo.adv_estimator, "ppo.adv_estimator.gae_lambda"
    if gae.gae_lambda_policy is None:
        if gae.gae_lambda is not None:
            yield AlgorithmSetting(key, "advantage.lambda_policy", gae.gae_lambda)
        return
    own = getattr(make_algorithm(config.algorithm.name, config.algorithm.kwargs), "advantage", None)
    if gae.gae_lambda is not None:
        yield AlgorithmSetting(key, "advantage.lambda_value", gae.gae_lambda)
    elif isinstance(own, Gae) and own.lambda_value is None:
        yield AlgorithmSetting("ppo.adv_estimator.gae_lambda_policy", "advantage.lambda_value", own.lambda_policy)


def shaping_settings(section: str, shaping: RewardShapingConfig) -> Iterator[AlgorithmSetting]:
    if shaping.enabled:
        options = {
            "name": "soft_overlong",
            "buffer": shaping.overlong_buffer_length,
            "penalty": shaping.overlong_buffer_penalty if shaping.stop_properly_penalty_coef is None else 0.0,
            "max_length": shaping.max_response_length,
            "truncated_factor": shaping.stop_properly_penalty_coef,
        }
        yield AlgorithmSetting(f"{section}.reward_shaping", "shaping", options)


def _policy_loss_settings(loss: LossConfig, algorithm: AlgorithmConfig, *, kl_in_reward: str) -> Iterator[AlgorithmSetting]:
    yield from _objective_settings(loss)
    yield from _correction_settings(loss)
    if loss.resolved_aggregation is not None:
        yield AlgorithmSetting("loss_fn.aggregation", "aggregation", loss.resolved_aggregation)
    if loss.use_kl_in_reward:
        yield AlgorithmSetting("loss_fn.use_kl_in_reward", "kl.place", kl_in_reward)
    elif loss.use_on_policy_kl_approximation is False and loss.reference_policy_kl_penalty and _is_kl_in_loss(algorithm):
        yield AlgorithmSetting("loss_fn.use_on_policy_kl_approximation", "kl.score_gradient", True)
    for key in ("input_clamp", "output_clamp"):
        name, value = f"kl_{key}_value", getattr(loss, f"kl_{key}_value")
        if loss.reference_policy_kl_penalty or value != default_of(loss, name):
            yield AlgorithmSetting(f"loss_fn.{name}", f"kl.{key}", value)


def _is_kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    kl = algorithm.options.get("kl")
    return not isinstance(kl, dict) or kl.get("place", "loss") == "loss"


def _objective_settings(loss: LossConfig) -> Iterator[AlgorithmSetting]:
    objectives = {
        "sequence_level_importance_ratios": ("sequence_clip", loss.sequence_level_importance_ratios),
        "use_cispo": ("cispo", loss.use_cispo),
        "disable_ppo_ratio": ("reinforce", loss.disable_ppo_ratio),
    }
    requested = [(key, name) for key, (name, enabled) in objectives.items() if enabled]
    if len(requested) > 1:
        raise ValueError(f"loss_fn: {' and '.join(key for key, _ in requested)} each choose the objective; set only one of them")
    for key, name in requested:
        yield AlgorithmSetting(f"loss_fn.{key}", "objective", name)


def _correction_settings(loss: LossConfig) -> Iterator[AlgorithmSetting]:
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
    )
    bounds = [
        f"truncated_importance_sampling_{name}" for name, bound in (("ratio", high), ("ratio_min", low)) if bound is not None
    ]
    if kind is None and bounds:
        raise ValueError(
            f"loss_fn.{bounds[0]}: found {getattr(loss, bounds[0])}, but truncated_importance_sampling_type is null, so the weight would "
            "have no bound; set the type to tis, icepop or seq-mask-tis and use_importance_sampling_correction to true, or set "
            f"{' and '.join(bounds)} to null"
        )
    if not loss.use_importance_sampling_correction:
        if kind is not None:
            raise ValueError(
                f"loss_fn.truncated_importance_sampling_type: found {kind}, but loss_fn.use_importance_sampling_correction is false; "
                "set it to true, or the type to null"
            )
        return
    if kind is not None and high is None:
        raise ValueError(
            f"loss_fn.truncated_importance_sampling_ratio: found null, but {kind} needs an upper bound; set it, for example to 2.0"
        )
    options: dict[str, object] = {
        "name": {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask_tis"}.get(str(kind), "importance")
    }
    if kind is not None:
        upper, lower = ("cap", "floor") if kind == "tis" else ("high", "low")
        options |= {upper: high, **({} if low is None else {lower: low})}
    if loss.sequence_level_importance_ratios and kind in (None, "tis", "icepop"):
        options["level"] = "sequence"
    yield AlgorithmSetting("loss_fn.use_importance_sampling_correction", "corrections", [options])


def make_run_algorithm(config: TrainingRunConfig) -> Algorithm:
    """Create the algorithm of a run. Raises ValueError if the algorithm, its parts and the run are incompatible."""
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.kwargs, collect_settings(config))
    check_section(config.algorithm.name, algorithm, config.section)
    check_algorithm(algorithm, make_plan(config) if isinstance(config, RolloutRunConfig) else Plan())
    if isinstance(config, GrpoRunConfig):
        _check_penalties(config, algorithm)
    return algorithm


def make_plan(config: RolloutRunConfig) -> Plan:
    """Return what an algorithm is asked about a run on rollouts."""
    training = config.rollout_training
    return Plan(
        group_size=training.num_generations_per_prompt,
        optimizer_steps=count_steps_per_batch(config) * training.epochs_per_batch,
        max_staleness=training.max_staleness,
        environment_rewards=list_reward_names(config),
        step_rewards=bool(list_reward_names(config, of_steps=True)),
        quantized_rollouts=config.policy.generation.weight_format or "",
        turn_states=have_turn_states(config),
    )


def _check_penalties(config: GrpoRunConfig, algorithm: Algorithm) -> None:
    """Raise ValueError if turns would get advantages that the algorithm does not read."""
    if config.reward_penalties.gives_advantages and not isinstance(algorithm, Composition):
        raise ValueError(
            f"reward_penalties gives turns separate advantages, which the algorithm {config.algorithm.name} does not read; set "
            "invalid_tool_call_advantage and malformed_think_tag_advantage to null, or penalize_invalid_tool_call and "
            "penalize_malformed_think_tag to true, which set the reward"
        )


def count_steps_per_batch(config: RolloutRunConfig) -> int:
    """Return the number of optimizer steps in one pass over the rollouts of a step."""
    per_step = config.rollout_training.rollouts_per_step
    return per_step // (config.policy.train_global_batch_size or per_step)


def infer_section(algorithm: Algorithm) -> str:
    """Return the section of the configuration (the kind of run) that provides what an algorithm needs."""
    return next((section for section, kind in TRAINING_RUNS.items() if kind.suits(algorithm)), "grpo")


def find_section(name: str) -> str:
    """Return the section (the kind of run) of the algorithm ``name``, or of a kind of run. Raises ValueError for an unknown name."""
    if name in TRAINING_RUNS:
        return name
    kind = find_algorithm(name)
    try:
        return infer_section(kind())
    except TypeError:  # it has options without a default
        found: Any = kind
        return next((section for section, each in TRAINING_RUNS.items() if kind.recorded_data and each.suits(found)), "grpo")


def check_section(name: str, algorithm: Algorithm, section: str) -> None:
    """Raise ValueError if an algorithm belongs to another kind of run."""
    kind = TRAINING_RUNS[section]
    if not kind.suits(algorithm) and (expected := infer_section(algorithm)) != section:
        raise ValueError(
            f"algorithm.name: {name} {TRAINING_RUNS[expected].learns}, so it belongs to strop {expected}; an algorithm of strop {section} "
            f"{kind.learns}. Choose another algorithm, or run strop {expected}"
        )


def check_algorithm(algorithm: Algorithm, plan: Plan) -> None:
    """Raise ValueError with every problem that the algorithm reports for the plan of the run."""
    if problems := list(algorithm.validate(plan)):
        raise ValueError("the algorithm does not fit the run:\n  " + "\n  ".join(problems))
