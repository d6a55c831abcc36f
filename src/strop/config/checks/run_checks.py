"""All checks of a configuration: one list, shared by loading, a dry run, a run and a plan.

A rule that reads one section is a method of it (``BaseConfig.errors`` and ``warnings``), and so is one about the section of an extension
and the rest of the run (``errors_of_run`` and ``warnings_of_run``). The others are functions, by the section that they are about; the
annotation of ``config`` says to which kinds of run each applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

from strop import plugins
from strop.base_config import BaseConfig, iter_sections
from strop.config.checks import cluster_checks, data_checks, policy_checks, unused_keys
from strop.config.schema.run_config import DistillationRunConfig, GrpoRunConfig, PpoRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.problems import Problem

Problems = Iterator[Problem]


def check_measured_peak(config: TrainingRunConfig) -> Problems:
    if config.logger.peak_tflops == "measure" and config.policy.device.startswith("cuda"):
        yield Problem(
            "logger.peak_tflops",
            f"found measure, which measures processors, and policy.device={config.policy.device}",
            "Leave logger.peak_tflops=null for a GPU of the table of devices (docs/planning.md), or set the peak of one GPU in TFLOP/s.",
        )


def check_teachers(config: DistillationRunConfig) -> Problems:
    for key, teacher in config.all_teachers.items():
        if unknown := sorted(set(teacher.environments or ()) - set(config.env)):
            yield Problem(f"{key}.environments", f"found {unknown}, but env has {sorted(config.env)}", "Set it to some of these.")
        if teacher.model_name == "self" and teacher.self_weights == "ema" and not config.policy.ema.enabled:
            yield Problem(f"{key}.self_weights", "found ema, but there is no moving average", "Set policy.ema.enabled=true.")
    general = [teacher for teacher in config.all_teachers.values() if teacher.environments is None]
    if len(general) > 1 and config.algorithm.name == "topk_distillation":
        yield Problem(
            "teachers",
            "several teachers are for all environments, and the top-k tokens of their mixture are unknown",
            "Give each its environments (teachers.NAME.environments), or set algorithm.name=distillation.",
        )


def warn_unranked_checkpoints(config: TrainingRunConfig) -> Problems:
    saving, period = config.checkpointing, config.training.val_period
    ranked = saving.saving_enabled and saving.keep_top_k is not None
    if not ranked or not (saving.metric_name or "").startswith("val:"):
        return
    if period == 0:
        yield Problem(
            "checkpointing.metric_name",
            f"{config.section}.val_period is 0, so {saving.metric_name} is not measured during the run: the newest checkpoints are kept",
            "Set it to null, or to a metric train:NAME.",
        )
    elif saving.save_period % period:
        yield Problem(
            "checkpointing.save_period",
            f"found {saving.save_period}, which is not a multiple of {config.section}.val_period = {period}: some checkpoints have no "
            f"{saving.metric_name} to rank them",
            f"Set it to a multiple of {period}.",
        )


def warn_unused_recomputation(config: RolloutRunConfig) -> Problems:
    section = config.rollout_training.async_config
    recomputes = config.rollout_training.max_staleness > 0 and section.recompute_kv_cache_after_weight_updates
    if recomputes and not config.policy.generation.uses_engines:
        yield Problem(
            f"{config.section}.async_{config.section}.recompute_kv_cache_after_weight_updates",
            "it has no effect: the torch engine finishes running requests before weights change",
        )


def warn_unused_columns(config: TrainingRunConfig) -> Problems:
    for column in plugins.load_all("columns"):
        if not (isinstance(column.stored, str) and column.is_stored(config)):
            continue
        if not column.is_on(config):
            yield Problem(column.stored, f"it has no effect: {column.key} is false, so there is no column {column.name} to store")
        elif config.logger.rollouts == "none":
            yield Problem(column.stored, "it has no effect: logger.rollouts is none, so no rollouts are stored")


def warn_unused_kl_in_reward(config: GrpoRunConfig | PpoRunConfig) -> Problems:
    loss, algorithm = config.loss_fn, config.algorithm
    no_default_kl = algorithm.name in ("grpo", "ppo") and "kl" not in algorithm.kwargs
    if loss.use_kl_in_reward and (
        loss.reference_policy_kl_penalty == 0 or (loss.reference_policy_kl_penalty is None and no_default_kl)
    ):
        yield Problem("loss_fn.use_kl_in_reward", "it has no effect: loss_fn.reference_policy_kl_penalty is 0")


Check = Callable[[Any], Problems]

ERROR_CHECKS: Mapping[str, tuple[Check, ...]] = {  # section -> its rules
    "data": (
        data_checks.check_training_data,
        data_checks.check_unread_keys,
        data_checks.check_quotas,
        data_checks.check_curriculum,
    ),
    "policy": (
        policy_checks.check_global_batch,
        policy_checks.check_critic_batch,
        policy_checks.check_token_budget,
        policy_checks.check_lengths,
        policy_checks.check_engine_device,
        policy_checks.check_order_of_events,
        policy_checks.check_measured_budget,
        cluster_checks.check_one_learner,
        cluster_checks.check_learner_processes,
    ),
    "teacher": (check_teachers, cluster_checks.check_teacher_processes),
    "dpo": (data_checks.check_precomputed_reference,),
    "env": (data_checks.check_environments, data_checks.check_past_opponents),
    "eval": (data_checks.check_eval_sampling,),
    "logger": (check_measured_peak,),
    "cluster": (*cluster_checks.MACHINE_CHECKS, cluster_checks.check_resources),
}
WARNING_CHECKS: Mapping[str, tuple[Check, ...]] = {
    "data": (data_checks.warn_no_validation_data,),
    "policy": (
        policy_checks.warn_order_of_turns,
        policy_checks.warn_unused_offload,
        unused_keys.warn_unused_batch_sizes,
    ),
    "checkpointing": (warn_unranked_checkpoints,),
    "logger": (warn_unused_columns,),
    "cluster": (cluster_checks.warn_unused_roles, cluster_checks.warn_idle_devices),
    "loss_fn": (warn_unused_kl_in_reward,),
    "training": (warn_unused_recomputation, unused_keys.warn_unused_validation_size),
    "every section": (unused_keys.warn_sections_off,),
}


def find_errors(config: BaseConfig) -> list[Problem]:
    """Return the errors of a configuration; empty if the run can work."""
    sections = list(iter_sections(config))
    return [
        *(problem for key, section in sections for problem in section.errors(key)),
        *(problem for key, section in sections for problem in section.errors_of_run(key, config)),
        *_run(ERROR_CHECKS, config),
    ]


def find_warnings(config: BaseConfig) -> list[Problem]:
    """Return warnings: settings that work, but perhaps not as intended."""
    sections = list(iter_sections(config))
    return [
        *(problem for key, section in sections for problem in section.warnings(key)),
        *(problem for key, section in sections for problem in section.warnings_of_run(key, config)),
        *_run(WARNING_CHECKS, config),
    ]


def _run(checks: Mapping[str, tuple[Check, ...]], config: BaseConfig) -> list[Problem]:
    applicable = [check for group in checks.values() for check in group if isinstance(config, _asked_of(check))]
    return [problem for check in applicable for problem in check(config)]


@cache
def _asked_of(check: Check) -> Any:
    """Return the kind of run that a check concerns."""
    return get_type_hints(check)["config"]
