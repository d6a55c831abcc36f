"""Map flat keys of NeMo-RL's sections, such as ``grpo`` and ``loss_fn``, to fields of an algorithm and its parts.

A key that is null keeps the algorithm's default."""

from __future__ import annotations

from collections.abc import Iterator

from strop.base_config import fields_of
from strop.build.algorithm.algorithms import AlgorithmSetting
from strop.config import TrainingRunConfig
from strop.config.schema.distillation_config import DistillationConfig, DistillationLossConfig
from strop.config.schema.grpo_config import GrpoConfig, LossConfig
from strop.config.schema.ppo_config import PpoConfig, ValueLossConfig
from strop.config.schema.recorded_config import DpoConfig, RmConfig
from strop.config.schema.run_config import DistillationRunConfig, DpoRunConfig, GrpoRunConfig, PpoRunConfig, RmRunConfig
from strop.trainer.training_config import RolloutTrainingConfig


def collect_settings(config: TrainingRunConfig) -> list[AlgorithmSetting]:
    """Return the flat keys that a configuration sets, in the order in which they must be applied. Raises ValueError for contradictions."""
    match config:
        case GrpoRunConfig():
            return list(_policy_gradient_settings(config.section, config.grpo, config.loss_fn))
        case PpoRunConfig():
            return list(_ppo_settings(config.ppo, config.loss_fn, config.value_loss_fn))
        case DistillationRunConfig():
            return list(_distillation_settings(config.algorithm.name, config.distillation, config.loss_fn))
        case DpoRunConfig():
            return list(_dpo_settings(config.dpo))
        case RmRunConfig():
            return list(_rm_settings(config.rm, config.policy.reward_model_cfg.reward_model_type))
        case _:
            return []


def _dpo_settings(dpo: DpoConfig) -> Iterator[AlgorithmSetting]:
    return _make_settings(
        ("dpo.reference_policy_kl_penalty", "beta", dpo.reference_policy_kl_penalty),
        ("dpo.preference_average_log_probs", "average_log_probs", dpo.preference_average_log_probs),
        ("dpo.sft_average_log_probs", "sft_aggregation", _SFT_AGGREGATION[dpo.sft_average_log_probs]),
        ("dpo.preference_loss_weight", "preference_weight", dpo.preference_loss_weight),
        ("dpo.sft_loss_weight", "sft_weight", dpo.sft_loss_weight),
    )


def _ppo_settings(ppo: PpoConfig, loss: LossConfig, value: ValueLossConfig) -> Iterator[AlgorithmSetting]:
    gae, key = ppo.adv_estimator, "ppo.adv_estimator"
    yield from _make_settings(
        (f"{key}.gae_lambda", "advantage.lambda_policy", gae.gae_lambda),
        (f"{key}.gae_lambda_policy", "advantage.lambda_policy", gae.gae_lambda_policy),
        (f"{key}.gae_lambda", "advantage.lambda_value", gae.gae_lambda if gae.gae_lambda_policy is not None else None),
        (f"{key}.gae_lambda_value", "advantage.lambda_value", gae.gae_lambda_value),
        (f"{key}.gae_gamma", "advantage.gamma", gae.gae_gamma),
        (f"{key}.normalize_advantages", "advantage.whiten", gae.normalize_advantages),
        (f"{key}.length_adaptive_alpha", "advantage.length_adaptive_alpha", gae.length_adaptive_alpha),
        ("ppo.advantage_clip_low", "advantage_low", ppo.advantage_clip_low),
        ("ppo.advantage_clip_high", "advantage_high", ppo.advantage_clip_high),
        ("ppo.policy_training_start_step", "policy_training_start_step", ppo.policy_training_start_step),
        ("value_loss_fn.scale", "value_scale", value.scale),
    )
    yield from _filter_settings("ppo", ppo)
    if value.cliprange is not None:
        yield AlgorithmSetting("value_loss_fn.cliprange", "value_clip", value.cliprange or None)
    yield from _policy_loss_settings(loss, kl_in_reward="token_reward")


def _distillation_settings(
    name: str, distillation: DistillationConfig, loss: DistillationLossConfig
) -> Iterator[AlgorithmSetting]:
    """Yield the settings of a distillation. Only topk_distillation has a divergence to set."""
    if name == "topk_distillation":
        yield from _make_settings(
            ("loss_fn.kl_type", "kl_type", loss.kl_type),
            ("loss_fn.mixed_kl_weight", "mixed_kl_weight", loss.mixed_kl_weight),
            ("loss_fn.beta", "beta", loss.beta),
            ("loss_fn.zero_outside_topk", "outside", "bucket" if loss.zero_outside_topk else "renormalise"),
        )
    settings = _filter_settings("distillation", distillation)
    yield from settings if name != "topk_distillation" else (setting for setting in settings if setting.value)


_SFT_AGGREGATION = {True: "sequence_mean", False: "sequence_sum", None: None}


def _rm_settings(rm: RmConfig, kind: str) -> Iterator[AlgorithmSetting]:
    return _make_settings(
        ("policy.reward_model_cfg.reward_model_type", "kind", kind if kind != "bradley_terry" else None),
        ("rm.use_margin", "use_margin", rm.use_margin or None),
        ("rm.centering", "centering", rm.centering or None),
    )


def _policy_gradient_settings(section: str, grpo: GrpoConfig, loss: LossConfig) -> Iterator[AlgorithmSetting]:
    """Yield settings in the order in which they must be applied: a key that chooses a part comes before keys that set its options."""
    yield from _advantage_settings(section, grpo)
    yield from _policy_loss_settings(loss, kl_in_reward="reward")


def _policy_loss_settings(loss: LossConfig, *, kl_in_reward: str) -> Iterator[AlgorithmSetting]:
    yield from _objective_settings(loss)
    yield from _correction_settings(loss)
    yield from _kl_settings(loss, kl_in_reward)
    yield from _make_settings(
        ("loss_fn.force_on_policy_ratio", "on_policy_ratio", loss.force_on_policy_ratio or None),
        ("loss_fn.aggregation", "aggregation", loss.resolved_aggregation),
        ("loss_fn.constant_length", "constant_length", loss.constant_length),
        ("loss_fn.positive_example_nll_weight", "positive_nll", loss.positive_example_nll_weight or None),
        ("loss_fn.entropy_bonus", "entropy_bonus", loss.entropy_bonus),
    )


def _make_settings(*settings: tuple[str, str, object]) -> Iterator[AlgorithmSetting]:
    return (AlgorithmSetting(key, field, value) for key, field, value in settings if value is not None)


def _advantage_settings(section: str, grpo: GrpoConfig) -> Iterator[AlgorithmSetting]:
    yield from _make_settings(
        (
            f"{section}.adv_estimator.name",
            "advantage",
            ADVANTAGE_NAMES.get(str(grpo.adv_estimator.name), grpo.adv_estimator.name),
        ),
        (f"{section}.minus_baseline", "advantage.baseline", grpo.minus_baseline),
        (f"{section}.use_leave_one_out_baseline", "advantage.leave_one_out", grpo.use_leave_one_out_baseline),
        (f"{section}.normalize_rewards", "advantage.normalize", grpo.normalize_rewards),
        (f"{section}.advantage_clip_low", "advantage_low", grpo.advantage_clip_low),
        (f"{section}.advantage_clip_high", "advantage_high", grpo.advantage_clip_high),
    )
    yield from _filter_settings(section, grpo)


def _filter_settings(section: str, training: RolloutTrainingConfig) -> Iterator[AlgorithmSetting]:
    shaping = training.reward_shaping
    yield from _make_settings(
        (f"{section}.use_dynamic_sampling", "drop_constant_groups", training.use_dynamic_sampling),
        (f"{section}.overlong_filtering", "overlong_filtering", training.overlong_filtering),
    )
    if shaping.enabled:
        options = {
            "name": "soft_overlong",
            "buffer": shaping.overlong_buffer_length,
            "penalty": shaping.overlong_buffer_penalty,
            "max_length": shaping.max_response_length,
            "truncated_factor": shaping.stop_properly_penalty_coef,
        }
        yield AlgorithmSetting(f"{section}.reward_shaping", "shaping", options)


ADVANTAGE_NAMES = {"grpo": "group_relative"}  # NeMo-RL's name -> Strop's name, if they differ


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
    yield from _make_settings(
        ("loss_fn.ratio_clip_min", "objective.low", loss.ratio_clip_min),
        ("loss_fn.ratio_clip_max", "objective.high", loss.ratio_clip_max),
        ("loss_fn.ratio_clip_c", "objective.dual", loss.ratio_clip_c),
    )


def _correction_settings(loss: LossConfig) -> Iterator[AlgorithmSetting]:
    kind, high, low = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio,
        loss.truncated_importance_sampling_ratio_min,
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
    if loss.sequence_level_importance_ratios and kind in (None, "tis"):
        options["level"] = "sequence"
    yield AlgorithmSetting("loss_fn.use_importance_sampling_correction", "corrections", [options])


def _kl_settings(loss: LossConfig, placement: str) -> Iterator[AlgorithmSetting]:
    penalty = loss.reference_policy_kl_penalty
    yield from _make_settings(
        ("loss_fn.reference_policy_kl_penalty", "kl.weight", penalty),
        ("loss_fn.reference_policy_kl_type", "kl.estimator", loss.reference_policy_kl_type),
        ("loss_fn.use_kl_in_reward", "kl.place", placement if loss.use_kl_in_reward else None),
        ("loss_fn.use_on_policy_kl_approximation", "kl.unbiased", loss.use_on_policy_kl_approximation or None),
    )
    for key, field in (("kl_input_clamp_value", "kl.input_clamp"), ("kl_output_clamp_value", "kl.output_clamp")):
        value = getattr(loss, key)
        if penalty or value != fields_of(LossConfig)[key].default:
            yield AlgorithmSetting(f"loss_fn.{key}", field, value)
