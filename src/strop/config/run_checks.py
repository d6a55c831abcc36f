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
from strop.base_config import BaseConfig, changed_keys, default_of, iter_sections
from strop.checkpointing.checkpointing_config import CheckpointingConfig
from strop.config import cluster_checks, policy_checks
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import (
    EvalRunConfig,
    GrpoRunConfig,
    PpoRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    environment_alias,
    list_trained_models,
)
from strop.data.data_config import DataEntryConfig, DefaultEntryConfig, EvalDataConfig, EvalSetConfig, entry_keys
from strop.data.packing_config import DynamicBatchingConfig, SequencePackingConfig
from strop.generation.generation_config import ColocatedConfig
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.problems import Problem
from strop.trainer.training_config import AsyncConfig

Problems = Iterator[Problem]

OF_ROWS = ("subset", "split", "revision", "input_key", "output_key", "messages_key", "image_key", "media_data_dir")


def check_training_data(config: TrainingRunConfig) -> Problems:
    if not config.data.train:
        yield Problem(
            "data.train",
            "there is nothing to train on",
            "Set data.train.dataset_name, or data.train.env_name for an environment that generates its tasks."
            if isinstance(config, RolloutRunConfig)
            else "Set data.train.dataset_name.",
        )


def check_unread_keys(config: TrainingRunConfig) -> Problems:
    """Keys set for all entries in data.default are not checked, because others may read them."""
    parts = {"data.train": config.data.train, "data.validation": config.data.validation or ()}
    for place, entry in (
        (key, each) for part, own in parts.items() for key, each in zip(entry_keys(part, len(own)), own, strict=True)
    ):
        generated = entry.data_name is None
        reader = "a generated task" if generated else f"strop {config.section}"
        for name in dict.fromkeys((*config.unread_keys, *(OF_ROWS if generated else ()))):
            value = getattr(entry, name)
            if value not in (default_of(entry, name), getattr(config.data.default, name)):
                yield Problem(
                    f"{place}.{name}", f"found {value}, which {reader} does not read", "Remove the key, or set it to null."
                )


def check_quotas(config: TrainingRunConfig) -> Problems:
    """The groups of a step are distributed over its entries."""
    quotas = [entry.prompts_per_step for entry in config.data.train]
    if not quotas or None in quotas:
        return
    total, of_each = sum(quota or 0 for quota in quotas), " + ".join(map(str, quotas))
    key, wanted = config.groups_key, config.groups_per_step or 0
    if total != wanted:
        yield Problem(
            f"{entry_keys('data.train', len(quotas))[0]}.prompts_per_step",
            f"the entries of data.train have {of_each} = {total} groups per step, but {key} is {wanted or 'null'}",
            f"Set {key}={total}{f', or prompts_per_step of the entries so that they add up to {wanted}' if wanted else ''}.",
        )


def check_environments(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    config = config.with_graders() if isinstance(config, EvalRunConfig) else config
    aliases = ", ".join(config.env) or "nothing"
    for key, entry in iter_sections(config.data, "data"):
        unused = isinstance(entry, EvalDataConfig) and entry.sets
        if not isinstance(entry, DataEntryConfig) or isinstance(entry, DefaultEntryConfig) or unused:
            continue
        alias = environment_alias(config, entry)
        if alias is None and (unknown := _explain_unknown_set(entry.dataset_name)):
            yield Problem(f"{key}.dataset_name", unknown)  # a built-in set would have brought its environment
        elif alias is None:
            yield Problem(
                f"{key}.env_name",
                f"found null, but env has {aliases}, so the environment that scores these tasks is ambiguous",
                "Set it to one of the aliases in env."
                if config.env
                else "Add an environment, such as env.math={}, or your own reward, such as env.task.reward=rewards.py:correct.",
            )
        elif alias not in config.env:
            yield Problem(
                f"{key}.env_name", f"found {alias!r}, but env has {aliases}", f"Add env.{alias}={{}}, or set it to one of these."
            )


def _explain_unknown_set(name: str | None) -> str:
    from strop.data.builtin_sets import BUILTIN_DATASETS
    from strop.data.sources.dataset_class import is_dataset_class
    from strop.data.sources.records import DataError
    from strop.data.sources.shards import is_pattern
    from strop.data.sources.source import check_hub_name, is_local

    if name is None or name in BUILTIN_DATASETS or is_local(name) or is_pattern(name) or is_dataset_class(name):
        return ""
    try:
        check_hub_name(name)
    except DataError as error:
        return str(error)
    return ""


def check_past_opponents(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    """Earlier selves of the policy exist in the learner's process of a training run."""
    for alias, section in config.env.items():
        if section.type_of(alias) != "two_player" or section.options.get("opponent") != "past":
            continue
        if isinstance(config, EvalRunConfig):
            yield Problem(
                f"env.{alias}.opponent",
                "found past, but a model that is evaluated has no earlier selves",
                "Set it to self, or to endpoint with an earlier checkpoint served by strop serve.",
            )
        elif config.policy.generation.uses_engines or count_devices(config).uses_ray:
            yield Problem(
                f"env.{alias}.opponent",
                "found past, but earlier selves are sampled by the torch engine in the learner's process, and this run has "
                f"{_name_engines(config) if config.policy.generation.uses_engines else 'learners in other processes'}",
                "Set it to self or endpoint, or set policy.generation.backend=torch and cluster.backend=local.",
            )


def _name_engines(config: RolloutRunConfig) -> str:
    return f"{config.policy.generation.engine_name} engines"


def check_eval_sampling(config: EvalRunConfig) -> Problems:
    section, temperature = config.eval, config.generation.temperature
    if not config.data.sets and section.num_tests_per_prompt > 1 and temperature == 0:
        yield Problem(
            "eval.num_tests_per_prompt",
            f"found {section.num_tests_per_prompt}, but generation.temperature is 0, so all samples of a task would be equal",
            "Set generation.temperature above 0, or it to 1.",
        )
    for key, entry in iter_sections(config.data, "data"):
        if not isinstance(entry, EvalSetConfig):
            continue
        samples = entry.num_tests_per_prompt or section.num_tests_per_prompt
        if samples > 1 and (temperature if entry.temperature is None else entry.temperature) == 0:
            yield Problem(
                f"{key}.temperature",
                f"it is 0 for {entry.data_name or key}, so all {samples} samples of a task would be equal",
                "Set it, or generation.temperature, above 0, or eval.num_tests_per_prompt to 1.",
            )
        if samples < section.k_value:
            yield Problem(
                f"{key}.num_tests_per_prompt", f"found {samples}, fewer than eval.k_value = {section.k_value}", "Raise it."
            )


def warn_no_validation_data(config: TrainingRunConfig) -> Problems:
    training, data, key = config.training, config.data, config.section
    validates = training.val_period > 0 or training.val_at_start or training.val_at_end
    if validates and not data.validation and not any(entry.split_validation_size for entry in data.train):
        yield Problem(
            "data.validation",
            "there is no validation data, so validation is off",
            f"Set data.validation or data.train.split_validation_size, or {key}.val_period=0 to train without validation.",
        )


# Sections with keys that are read even when they are not enabled, or with their own checks for that.
READ_WHERE_OFF = (SequencePackingConfig, DynamicBatchingConfig, ColocatedConfig, DtensorConfig, CheckpointingConfig)
IGNORED = ("enabled", "match_all_linear")  # the second determines the behaviour without it
SWITCHED = (AsyncConfig,)  # often turned off only on the command line, to compare with synchronous training


def warn_sections_off(config: BaseConfig) -> Problems:
    for key, section in iter_sections(config):
        if isinstance(section, READ_WHERE_OFF + SWITCHED) or getattr(section, "enabled", True):
            continue
        if unused := changed_keys(key, section, ignore=IGNORED):
            verb = "has" if len(unused) == 1 else "have"
            yield Problem(unused[0], f"{', '.join(unused)} {verb} no effect: {key}.enabled is false")


def warn_unused_batch_sizes(config: TrainingRunConfig) -> Problems:
    """Batch sizes in rollouts only set the default of token budgets, so they have no effect if budgets are set."""
    for key, model in list_trained_models(config):
        section = "sequence_packing" if model.sequence_packing.enabled else "dynamic_batching"
        yield from _warn_unused_sizes(key, section, model)
        yield from _warn_unused_budgets(key, section, model)


def _warn_unused_sizes(key: str, section: str, model: ModelConfig) -> Problems:
    defaults = {"train": ("train_micro_batch_size", None), "logprob": ("logprob_batch_size", model.train_micro_batch_size)}
    for name, (size_key, default) in defaults.items():
        size, budget = getattr(model, size_key), getattr(model.batching, f"{name}_mb_tokens")
        scales_logprobs = name == "train" and model.logprob_batch_size == size and _follows(model, "logprob")
        if size != default and not _follows(model, name) and not scales_logprobs:
            yield Problem(
                f"{key}.{size_key}",
                f"found {size}, which has no effect: {key}.{section}.{name}_mb_tokens = {budget} cuts the micro-batches",
                f"Remove one of the two; without the second it is {key}.max_total_sequence_length x {size_key}.",
            )


def _follows(model: ModelConfig, name: str) -> bool:
    """Return whether a token budget is the one derived from the batch size in rollouts."""
    size = model.train_micro_batch_size if name == "train" else model.logprob_batch_size
    budget = getattr(model.batching, f"{name}_mb_tokens")
    return budget is None or (size is not None and budget == size * model.max_total_sequence_length)


def _warn_unused_budgets(key: str, section: str, model: ModelConfig) -> Problems:
    other = "dynamic_batching" if section == "sequence_packing" else "sequence_packing"
    for name, used in (("train", model.train_tokens), ("logprob", model.score_tokens)):
        budget = getattr(getattr(model, other), f"{name}_mb_tokens")
        if budget not in (None, used):
            yield Problem(
                f"{key}.{other}.{name}_mb_tokens",
                f"found {budget}, which has no effect: {key}.sequence_packing.enabled is {str(section == 'sequence_packing').lower()}, so "
                f"{key}.{section}.{name}_mb_tokens = {used} cuts the micro-batches",
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
        check_training_data,
        check_unread_keys,
        check_quotas,
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
    "env": (check_environments, check_past_opponents),
    "eval": (check_eval_sampling,),
    "cluster": (*cluster_checks.MACHINE_CHECKS, cluster_checks.check_resources),
}
WARNING_CHECKS: Mapping[str, tuple[Check, ...]] = {
    "data": (warn_no_validation_data,),
    "policy": (
        policy_checks.warn_order_of_turns,
        policy_checks.warn_unused_offload,
        warn_unused_batch_sizes,
    ),
    "checkpointing": (warn_unranked_checkpoints,),
    "logger": (warn_unused_columns,),
    "cluster": (cluster_checks.warn_unused_roles, cluster_checks.warn_idle_devices),
    "loss_fn": (warn_unused_kl_in_reward,),
    "training": (warn_unused_recomputation,),
    "every section": (warn_sections_off,),
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
