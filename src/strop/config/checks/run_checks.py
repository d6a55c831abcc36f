"""Checks across keys: combinations that cannot work, or that do something else than they seem to (law 8).

Each check is a function that yields Problems; the tables at the end say to which kinds of run it applies.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.base_config import BaseConfig
from strop.config.checks import cluster_checks, engine_checks
from strop.config.checks.unsupported import COMMON_UNSUPPORTED_CHECKS, TRAINING_UNSUPPORTED_CHECKS
from strop.config.schema.run_config import (
    DistillationRunConfig,
    EvalRunConfig,
    GrpoRunConfig,
    PpoRunConfig,
    RecordedRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    environment_alias,
    generation_section,
    list_trained_models,
)
from strop.data.data_config import DataEntryConfig
from strop.problems import Problem

Problems = Iterator[Problem]

# Metrics that checkpointing.metric_name may name after train: or val:. A name with a slash is a metric of an environment or algorithm.
TRAIN_METRICS = (
    "reward",
    "loss",
    "grad_norm",
    "entropy",
    "kl_penalty",
    "token_mult_prob_error",
    "gen_kl_error",
    "mean_gen_tokens_per_sample",
)
VALIDATION_METRICS = ("accuracy", "reward", "avg_length")
RECORDED_METRICS = (
    "loss",
    "accuracy",
    "margin",
    "nll",
    # NeMo-RL's names of loss:
    "val_loss",
    "validation-default_loss",
)


# --- groups, batches and loss ---------------------------------------------------------------------------------------------


def check_group_size(config: GrpoRunConfig) -> Problems:
    grpo, key = config.grpo, "grpo.num_generations_per_prompt"
    if (
        grpo.num_generations_per_prompt > 1
        or config.algorithm.name != "grpo"
        or grpo.adv_estimator.name
        or config.algorithm.kwargs
    ):
        return
    if grpo.use_leave_one_out_baseline:
        yield Problem(
            key,
            "found 1, but a leave-one-out baseline is the mean of the other rollouts of the group, and a group of one has none",
            "Set it to 2 or more, or grpo.use_leave_one_out_baseline=false.",
        )
    elif grpo.minus_baseline is not False:
        yield Problem(
            key,
            "found 1, but a reward minus the mean of a group of one is always 0, so there is nothing to learn",
            "Set it to 2 or more, or grpo.minus_baseline=false and grpo.normalize_rewards=false.",
        )
    elif grpo.normalize_rewards is not False:
        yield Problem(
            key,
            "found 1, but a group of one has no standard deviation to normalise by",
            "Set it to 2 or more, or grpo.normalize_rewards=false.",
        )
    if grpo.use_dynamic_sampling:
        yield Problem(
            key,
            "found 1, but dynamic sampling drops groups with equal rewards: every group of one",
            "Set it to 2 or more, or grpo.use_dynamic_sampling=false.",
        )


def check_global_batch(config: RolloutRunConfig) -> Problems:
    size, per_step, group = (
        config.policy.train_global_batch_size,
        config.rollout_training.rollouts_per_step,
        config.rollout_training.num_generations_per_prompt,
    )
    if size is None or (per_step % size == 0 and size % group == 0):
        return
    fitting = [
        steps
        for steps in range(1, config.rollout_training.num_prompts_per_step + 1)
        if config.rollout_training.num_prompts_per_step % steps == 0
    ]
    sizes = ", ".join(str(per_step // steps) for steps in fitting[:6])
    yield Problem(
        "policy.train_global_batch_size",
        f"found {size}, but a step has {config.rollout_training.num_prompts_per_step} prompts x {group} generations = {per_step} rollouts, "
        "which must split into equal optimizer steps of whole groups",
        f"Set it to null (one optimizer step), or to one of {sizes}.",
    )


def check_on_policy_ratio(config: GrpoRunConfig | PpoRunConfig) -> Problems:
    if not config.loss_fn.force_on_policy_ratio:
        return
    size, fix = (
        config.policy.train_global_batch_size,
        "Set loss_fn.force_on_policy_ratio=false, or make one optimizer step per batch.",
    )
    if config.rollout_training.epochs_per_batch > 1 or (size is not None and size != config.rollout_training.rollouts_per_step):
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            "found true, but a batch makes several optimizer steps, and from the second on the ratio is not 1",
            fix,
        )
    if config.rollout_training.max_staleness > 0:
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            f"found true, but with {config.section}.async_{config.section} rollouts come from older weights, so the ratio is not 1",
            f"Set loss_fn.force_on_policy_ratio=false, or {config.section}.async_{config.section}.enabled=false.",
        )


def check_async(config: RolloutRunConfig) -> Problems:
    """Check the keys of the order in which groups are trained on."""
    section, key = config.rollout_training.async_config, f"{config.section}.async_{config.section}"
    if section.window is not None and section.order != "windowed":
        yield Problem(
            f"{key}.window",
            f"found {section.window}, but {key}.order is {section.order}, which has no window",
            f"Set {key}.order=windowed, or {key}.window=null.",
        )
    least, most = config.rollout_training.num_prompts_per_step, max_slots(config)
    if section.slots is not None and section.slots < least:
        yield Problem(
            f"{key}.slots",
            f"found {section.slots}, but a step has {least} groups, which all occupy slots until it is trained",
            f"Set it to {least} or more, above {least} to sample while the learner trains, or to null.",
        )
    if section.slots is not None and section.slots > most and section.order != "drop_too_old":
        yield Problem(
            f"{key}.slots",
            f"found {section.slots}, but with {key}.order={section.order} the run would train on rollouts older than "
            f"{key}.max_trajectory_age_steps={section.max_trajectory_age_steps}",
            f"Set it to {most} or less, or to null; or {key}.order=drop_too_old, which drops groups that are too old.",
        )


def max_slots(config: RolloutRunConfig) -> int:
    """Return the most groups that may be in flight without one getting too old."""
    return (config.rollout_training.async_config.max_trajectory_age_steps + 1) * config.rollout_training.num_prompts_per_step


def check_aggregation(config: GrpoRunConfig | PpoRunConfig) -> Problems:
    loss = config.loss_fn
    aggregation = loss.resolved_aggregation or ("token_mean" if config.algorithm.name == "grpo" else None)
    if aggregation == "constant_length" and loss.constant_length is None:
        yield Problem(
            "loss_fn.constant_length",
            "found null, but loss_fn.aggregation is constant_length, which divides by it",
            "Set it, for instance to ${policy.generation.max_new_tokens}.",
        )
    if loss.sequence_level_importance_ratios and aggregation == "token_mean":
        yield Problem(
            "loss_fn.sequence_level_importance_ratios",
            "found true, but a ratio per sequence and a mean over tokens weigh long sequences twice",
            "Set loss_fn.token_level_loss=false (GSPO).",
        )


def check_ranges(config: RolloutRunConfig) -> Problems:
    scaling, key = config.rollout_training.reward_scaling, config.section
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield Problem(
            f"{key}.reward_scaling.source_max",
            f"found {scaling.source_max}, which is not above source_min = {scaling.source_min}",
            "Set it above source_min.",
        )
    if not isinstance(config, GrpoRunConfig | PpoRunConfig):
        return
    training = config.grpo if isinstance(config, GrpoRunConfig) else config.ppo
    low, high = training.advantage_clip_low, training.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Problem(
            f"{key}.advantage_clip_low",
            f"found {low}, above advantage_clip_high = {high}",
            "Lower it, or set one of them to null.",
        )


def check_early_stop(config: TrainingRunConfig) -> Problems:
    training, key = config.training, f"{config.section}.stop_at_validation"
    ends = [name for name in ("threshold", "patience") if getattr(training, f"stop_at_validation_{name}") is not None]
    if training.stop_at_validation_metric is None and ends:
        yield Problem(f"{key}_metric", f"found null, but {key}_{ends[0]} is set", "Set both, or both to null.")
    elif training.stop_at_validation_metric is not None and not ends:
        yield Problem(
            f"{key}_threshold", f"found null, but {key}_metric is set", f"Set it, or {key}_patience, or all three to null."
        )


def check_learning_rate(config: TrainingRunConfig) -> Problems:
    for key, section in list_trained_models(config):
        if "lr" not in section.optimizer.kwargs:
            yield Problem(
                f"{key}.optimizer.kwargs",
                "it has no lr, and the optimizer's default is far too large or missing",
                f"Set {key}.optimizer.kwargs.lr, for instance to 5e-6.",
            )


def check_peft_installed(config: TrainingRunConfig) -> Problems:
    for key, model in list_trained_models(config):
        if model.dtensor_cfg.lora_cfg.enabled and not is_installed("peft"):
            yield Problem(
                f"{key}.dtensor_cfg.lora_cfg.enabled",
                "found true, but the package peft is not installed",
                f"Run pip install 'strop[lora]', or set {key}.dtensor_cfg.lora_cfg.enabled=false.",
            )


def check_critic(config: PpoRunConfig) -> Problems:
    """The critic trains on the policy's batches, with one optimizer step for each of the policy's."""
    policy, value = config.policy, config.value
    if value.train_global_batch_size not in (None, policy.train_global_batch_size):
        yield Problem(
            "value.train_global_batch_size",
            f"found {value.train_global_batch_size}, but the critic takes its optimizer steps with the policy, and "
            f"policy.train_global_batch_size is {policy.train_global_batch_size}",
            "Set it to null.",
        )
    if value.head_only and value.dtensor_cfg.lora_cfg.enabled:
        yield Problem(
            "value.dtensor_cfg.lora_cfg.enabled",
            "found true, but with value.head_only the critic is one linear layer, which has no adapters",
            "Set it to false, or value.head_only=false.",
        )


# --- lengths ---------------------------------------------------------------------------------------------------------------


def check_adapter_dropout(config: RolloutRunConfig) -> Problems:
    lora = config.policy.dtensor_cfg.lora_cfg
    if lora.enabled and lora.dropout:
        yield Problem(
            "policy.dtensor_cfg.lora_cfg.dropout",
            f"found {lora.dropout}, but rollouts are sampled without dropout, so the trained policy would differ from the one that "
            "sampled, with other masks at every step",
            "Set it to 0; adapter dropout is for recorded data (strop sft, dpo and rm).",
        )


def check_rollout_lengths(config: RolloutRunConfig) -> Problems:
    total = config.policy.max_total_sequence_length
    yield from _check_at_most(
        "policy.generation.max_new_tokens", config.policy.generation.max_new_tokens, "policy.max_total_sequence_length", total
    )
    yield from _check_at_most(
        "data.max_input_seq_length", config.data.max_input_seq_length, "policy.max_total_sequence_length", total
    )


def check_eval_lengths(config: EvalRunConfig) -> Problems:
    total = config.generation.max_total_sequence_length
    yield from _check_at_most(
        "generation.max_new_tokens", config.generation.max_new_tokens, "generation.vllm_cfg.max_model_len", total
    )
    yield from _check_at_most(
        "data.max_input_seq_length", config.data.max_input_seq_length, "generation.vllm_cfg.max_model_len", total
    )


def _check_at_most(key: str, value: int, other: str, limit: int) -> Problems:
    if value > limit:
        yield Problem(
            key,
            f"found {value}, more than {other} = {limit}, which limits prompt and completion together",
            f"Lower it, or raise {other}.",
        )


def check_token_budget(config: TrainingRunConfig) -> Problems:
    total = config.policy.max_total_sequence_length
    for key, model in list_trained_models(config):
        packing = model.sequence_packing
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            if packing.enabled and (budget := getattr(packing, name)) < total:
                yield Problem(
                    f"{key}.sequence_packing.{name}",
                    f"found {budget}, but a single rollout may have policy.max_total_sequence_length = {total} tokens",
                    f"Set it to {total} or more.",
                )


# --- data and environments --------------------------------------------------------------------------------------------------


def data_entries(config: TrainingRunConfig | EvalRunConfig) -> list[tuple[str, DataEntryConfig]]:
    """Return (dotted key, entry) of every source of tasks."""
    if isinstance(config, EvalRunConfig):
        return [("data", config.data)]
    listed = []
    for name, entries in (("train", config.data.train), ("validation", config.data.validation or ())):
        listed += [(f"data.{name}" + (f".{index}" if len(entries) > 1 else ""), entry) for index, entry in enumerate(entries)]
    return listed


def check_training_data(config: TrainingRunConfig) -> Problems:
    if not config.data.train:
        yield Problem(
            "data.train",
            "there is nothing to train on",
            "Set data.train.dataset_name."
            if isinstance(config, RecordedRunConfig)
            else "Set data.train.dataset_name, or data.train.env_name for an environment that generates its tasks.",
        )


def check_environments(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    aliases = ", ".join(config.env) or "nothing"
    for key, entry in data_entries(config):
        alias = environment_alias(config, entry)
        if alias is None:
            yield Problem(
                f"{key}.env_name",
                f"found null, but env has {aliases}, so the environment that scores these tasks is ambiguous",
                "Set it to one of the aliases in env.",
            )
        elif alias not in config.env:
            yield Problem(
                f"{key}.env_name", f"found {alias!r}, but env has {aliases}", f"Add env.{alias}={{}}, or set it to one of these."
            )


def check_files(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    for key, entry in data_entries(config):
        for name in ("prompt_file", "system_prompt_file"):
            yield from _check_file_exists(f"{key}.{name}", getattr(entry, name))
        if entry.is_file:
            yield from _check_file_exists(f"{key}.dataset_name", entry.dataset_name)


def _check_file_exists(key: str, name: str | None) -> Problems:
    if name is not None and not Path(name).is_file():
        where = "" if Path(name).is_absolute() else f" in the working directory {Path.cwd()}"
        yield Problem(
            key,
            f"there is no file {name}{where}",
            "Set the path of an existing file, absolute or relative to the working directory.",
        )


def check_system_prompts(config: TrainingRunConfig | EvalRunConfig) -> Problems:
    for key, entry in data_entries(config):
        if entry.system_prompt is not None and entry.system_prompt_file is not None:
            yield Problem(f"{key}.system_prompt", "both system_prompt and system_prompt_file are set", "Set one of them to null.")


def check_eval_sampling(config: EvalRunConfig) -> Problems:
    samples = config.eval.num_tests_per_prompt
    if samples > 1 and config.generation.temperature == 0:
        yield Problem(
            "eval.num_tests_per_prompt",
            f"found {samples}, but generation.temperature is 0, so all samples of a task would be equal",
            "Set generation.temperature above 0, or it to 1.",
        )
    if config.eval.k_value > samples:
        yield Problem(
            "eval.k_value",
            f"found {config.eval.k_value}, but there are only eval.num_tests_per_prompt = {samples} samples of a task",
            "Lower it, or raise eval.num_tests_per_prompt.",
        )


# --- saving and logging -----------------------------------------------------------------------------------------------------


def check_checkpoint_metric(config: TrainingRunConfig) -> Problems:
    name = config.checkpointing.metric_name
    if not config.checkpointing.enabled or name is None:
        return
    kind, _, metric = name.partition(":")
    validation_metrics = RECORDED_METRICS if isinstance(config, RecordedRunConfig) else VALIDATION_METRICS
    known = {"train": TRAIN_METRICS, "val": validation_metrics}.get(kind, ())
    if not metric or not known or (metric not in known and "/" not in metric):
        choices = ", ".join(
            [f"train:{metric_name}" for metric_name in TRAIN_METRICS]
            + [f"val:{metric_name}" for metric_name in validation_metrics]
        )
        yield Problem(
            "checkpointing.metric_name",
            f"found {name!r}, which is not the name of a metric",
            f"Set null (keep the newest), train:group/name, val:group/name, or one of {choices}.",
        )


def check_trackers(config: TrainingRunConfig) -> Problems:
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboard")):
        if getattr(config.logger, f"{name}_enabled") and not is_installed(package):
            yield Problem(
                f"logger.{name}_enabled",
                f"found true, but the package {package} is not installed",
                f"Run pip install 'strop[{name}]', or set logger.{name}_enabled=false.",
            )


def check_vllm_installed(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    if engine_checks.uses_vllm(config) and not is_installed("vllm"):
        key, _ = generation_section(config)
        yield Problem(
            f"{key}.backend",
            "found vllm, but vLLM is not installed",
            f"`make setup-vllm` installs it, `pip install vllm` on a machine with a GPU; or set {key}.backend=torch.",
        )


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder of that name, such as wandb's run folder, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


# --- warnings --------------------------------------------------------------------------------------------------------------


def warn_no_validation_data(config: TrainingRunConfig) -> Problems:
    training, data, key = config.training, config.data, config.section
    validates = training.val_period > 0 or training.val_at_start or training.val_at_end
    if validates and not data.validation and not any(entry.split_validation_size for entry in data.train):
        yield Problem(
            "data.validation",
            "there is no validation data, so validation is off",
            f"Set data.validation or data.train.split_validation_size, or {key}.val_period=0 to train without validation.",
        )


def check_save_deadline(config: TrainingRunConfig) -> Problems:
    saving = config.checkpointing
    if saving.checkpoint_must_save_by is None or saving.saving_enabled:
        return
    off = "enabled" if not saving.enabled else "save_period"
    yield Problem(
        "checkpointing.checkpoint_must_save_by",
        f"found {saving.checkpoint_must_save_by}, but no checkpoints are saved: checkpointing.{off} is {getattr(saving, off)}",
        f"Set it to null, or set checkpointing.{off} so that checkpoints are saved.",
    )


def warn_unranked_checkpoints(config: TrainingRunConfig) -> Problems:
    saving, period = config.checkpointing, config.training.val_period
    ranked = saving.enabled and saving.save_period > 0 and saving.keep_top_k is not None
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


def warn_unused_batch_size(config: TrainingRunConfig) -> Problems:
    if config.policy.generation_batch_size is not None:
        yield Problem(
            "policy.generation_batch_size",
            "it has no effect: the engine batches continuously",
            "policy.generation.torch_cfg.max_num_seqs limits how many sequences run together.",
        )


def warn_unused_async_keys(config: RolloutRunConfig) -> Problems:
    section, key = config.rollout_training.async_config, f"{config.section}.async_{config.section}"
    if not section.enabled:
        return
    if section.max_trajectory_age_steps == 0:
        yield Problem(f"{key}.enabled", f"it has no effect: {key}.max_trajectory_age_steps=0 is synchronous training")
        return
    if section.recompute_kv_cache_after_weight_updates and not section.in_flight_weight_updates:
        yield Problem(
            f"{key}.recompute_kv_cache_after_weight_updates",
            f"it has no effect: with {key}.in_flight_weight_updates=false no rollout is running when weights are published",
        )
    if section.recompute_kv_cache_after_weight_updates and config.policy.generation.backend in ("auto", "torch"):
        yield Problem(
            f"{key}.recompute_kv_cache_after_weight_updates",
            "it has no effect: the torch engine finishes running requests before weights change",
        )
    full = section.slots is None or section.slots >= max_slots(config)
    if section.order == "windowed" and full and not config.rollout_training.use_dynamic_sampling:
        yield Problem(
            f"{key}.slots",
            f"found {section.slots or 'null'}: with all slots in use each group is due when its turn comes, so that none can be overtaken "
            "unless others were dropped, and windowed is the same as fifo",
            f"Set it lower, for instance to {max(max_slots(config) - config.rollout_training.num_prompts_per_step // 2, 1)}.",
        )
    if section.order != "fifo" and not section.in_flight_weight_updates:
        yield Problem(
            f"{key}.order",
            f"found {section.order}, which saves little time: with {key}.in_flight_weight_updates=false all groups in flight, also slow "
            "ones, finish before weights are published",
            f"Set {key}.in_flight_weight_updates=true, or {key}.order=fifo, which makes runs reproducible.",
        )


def warn_unused_kl_in_reward(config: GrpoRunConfig | PpoRunConfig) -> Problems:
    loss, algorithm = config.loss_fn, config.algorithm
    no_default_kl = algorithm.name in ("grpo", "ppo") and "kl" not in algorithm.kwargs
    if loss.use_kl_in_reward and (
        loss.reference_policy_kl_penalty == 0 or (loss.reference_policy_kl_penalty is None and no_default_kl)
    ):
        yield Problem("loss_fn.use_kl_in_reward", "it has no effect: loss_fn.reference_policy_kl_penalty is 0")


def warn_idle_devices(config: EvalRunConfig) -> Problems:
    configured, used = config.cluster.gpus_per_node, engine_checks.count_gpus(generation_section(config)[1])
    if configured > max(1, used):
        devices = "one device" if used <= 1 else f"{used} devices with these engines"
        yield Problem("cluster.gpus_per_node", f"found {configured}, but this version uses {devices}; the others stay idle")


Check = Callable[[Any], Problems]

# (kinds of run, checks): the checks of every kind that a configuration is an instance of apply.
ERROR_CHECKS: tuple[tuple[Any, tuple[Check, ...]], ...] = (
    (GrpoRunConfig, (check_group_size,)),
    (RolloutRunConfig, (check_global_batch, check_async)),
    ((GrpoRunConfig, PpoRunConfig), (check_on_policy_ratio, check_aggregation)),
    (RolloutRunConfig, (check_ranges,)),
    (TrainingRunConfig, (check_early_stop, check_learning_rate, check_peft_installed)),
    (PpoRunConfig, (check_critic,)),
    (DistillationRunConfig, cluster_checks.DISTILLATION_ERROR_CHECKS),
    (RolloutRunConfig, (check_rollout_lengths, check_adapter_dropout, *engine_checks.ROLLOUT_ERROR_CHECKS)),
    (
        TrainingRunConfig,
        (
            check_token_budget,
            check_training_data,
            check_checkpoint_metric,
            check_save_deadline,
            check_trackers,
            *TRAINING_UNSUPPORTED_CHECKS,
            *cluster_checks.CLUSTER_ERROR_CHECKS,
        ),
    ),
    (EvalRunConfig, (check_eval_lengths, check_eval_sampling, cluster_checks.check_single_machine)),
    ((RolloutRunConfig, EvalRunConfig), (check_environments, check_vllm_installed, *engine_checks.SAMPLING_ERROR_CHECKS)),
    (BaseConfig, (check_files, check_system_prompts, *COMMON_UNSUPPORTED_CHECKS)),
)
WARNING_CHECKS: tuple[tuple[Any, tuple[Check, ...]], ...] = (
    (TrainingRunConfig, (warn_no_validation_data, warn_unranked_checkpoints, warn_unused_batch_size)),
    (RolloutRunConfig, (warn_unused_async_keys, *engine_checks.ROLLOUT_WARNING_CHECKS)),
    (RecordedRunConfig, (engine_checks.warn_unused_generation,)),
    (EvalRunConfig, (engine_checks.warn_unused_weight_sync,)),
    ((RolloutRunConfig, EvalRunConfig), engine_checks.SAMPLING_WARNING_CHECKS),
    ((GrpoRunConfig, PpoRunConfig), (warn_unused_kl_in_reward,)),
    (EvalRunConfig, (warn_idle_devices,)),
    (TrainingRunConfig, cluster_checks.CLUSTER_WARNING_CHECKS),
)


def find_errors(config: BaseConfig) -> list[Problem]:
    """Return the errors of a configuration; empty if the run can work."""
    return _run_checks(ERROR_CHECKS, config)


def find_warnings(config: BaseConfig) -> list[Problem]:
    """Return warnings: settings that work, but perhaps not as intended."""
    return _run_checks(WARNING_CHECKS, config)


def _run_checks(checks: Sequence[tuple[Any, tuple[Check, ...]]], config: BaseConfig) -> list[Problem]:
    if not isinstance(config, TrainingRunConfig | EvalRunConfig):
        return []
    applicable = [check for kinds, group in checks if isinstance(config, kinds) for check in group]
    return [problem for check in applicable for problem in check(config)]
