"""What single keys cannot show: combinations that cannot work, or that do something else than they seem to (law 8).

Each check is one small function that yields Problems; the lists at the end say which apply.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from strop.config.data import DataEntryConfig
from strop.config.errors import Problem
from strop.config.generation import VllmConfig
from strop.config.model import Model, targets_of
from strop.config.schema import EvalRunConfig, GrpoRunConfig, environment_of, generation_of
from strop.config.unsupported import BOTH_UNSUPPORTED, GRPO_UNSUPPORTED

Problems = Iterator[Problem]

# What checkpointing.metric_name may rank by, after train: or val:. A name with a slash is an environment's or an algorithm's own.
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


# --- groups, batches and loss ---------------------------------------------------------------------------------------------


def group_size(config: GrpoRunConfig) -> Problems:
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
            "found 1, but a leave-one-out baseline is the mean of the other rollouts of the group, and there are none",
            "Set it to 2 or more, or grpo.use_leave_one_out_baseline=false.",
        )
    elif grpo.minus_baseline is not False:
        yield Problem(
            key,
            "found 1, but a rollout minus the mean of its group of one is always 0, so nothing would be learned",
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
            "found 1, but dynamic sampling drops groups whose rewards are all equal: every group of one",
            "Set it to 2 or more, or grpo.use_dynamic_sampling=false.",
        )


def global_batch(config: GrpoRunConfig) -> Problems:
    size, per_step, group = (
        config.policy.train_global_batch_size,
        config.grpo.rollouts_per_step,
        config.grpo.num_generations_per_prompt,
    )
    if size is None or (per_step % size == 0 and size % group == 0):
        return
    fitting = [steps for steps in range(1, config.grpo.num_prompts_per_step + 1) if config.grpo.num_prompts_per_step % steps == 0]
    sizes = ", ".join(str(per_step // steps) for steps in fitting[:6])
    yield Problem(
        "policy.train_global_batch_size",
        f"found {size}, but a step has {config.grpo.num_prompts_per_step} prompts x {group} generations = {per_step} rollouts, "
        "which must be cut into equal optimizer steps of whole groups",
        f"Set it to null (one optimizer step), or to one of {sizes}.",
    )


def on_policy_ratio(config: GrpoRunConfig) -> Problems:
    if not config.loss_fn.force_on_policy_ratio:
        return
    size, fix = config.policy.train_global_batch_size, "Set loss_fn.force_on_policy_ratio=false, or make it one."
    if config.grpo.update_epochs > 1 or (size is not None and size != config.grpo.rollouts_per_step):
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            "found true, but a batch makes several optimizer steps: from the second on the ratio is not 1",
            fix,
        )
    if config.grpo.max_staleness > 0:
        yield Problem(
            "loss_fn.force_on_policy_ratio",
            "found true, but with grpo.async_grpo rollouts come from older weights: the ratio is not 1",
            "Set loss_fn.force_on_policy_ratio=false, or grpo.async_grpo.enabled=false.",
        )


def aggregation(config: GrpoRunConfig) -> Problems:
    loss = config.loss_fn
    how = loss.resolved_aggregation or ("token_mean" if config.algorithm.name == "grpo" else None)
    if how == "constant_length" and loss.constant_length is None:
        yield Problem(
            "loss_fn.constant_length",
            "found null, but loss_fn.aggregation is constant_length, which divides by it",
            "Set it, for instance to ${policy.generation.max_new_tokens}.",
        )
    if loss.sequence_level_importance_ratios and how == "token_mean":
        yield Problem(
            "loss_fn.sequence_level_importance_ratios",
            "found true, but a ratio per sequence and a mean over tokens weigh long sequences twice",
            "Set loss_fn.token_level_loss=false (GSPO).",
        )


def ranges(config: GrpoRunConfig) -> Problems:
    scaling, grpo = config.grpo.reward_scaling, config.grpo
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        yield Problem(
            "grpo.reward_scaling.source_max",
            f"found {scaling.source_max}, not above source_min = {scaling.source_min}",
            "Set a range with some width.",
        )
    low, high = grpo.advantage_clip_low, grpo.advantage_clip_high
    if low is not None and high is not None and low > high:
        yield Problem(
            "grpo.advantage_clip_low", f"found {low}, above advantage_clip_high = {high}", "Set it below, or either to null."
        )


def early_stop(config: GrpoRunConfig) -> Problems:
    grpo = config.grpo
    ends = [name for name in ("threshold", "patience") if getattr(grpo, f"stop_at_validation_{name}") is not None]
    if grpo.stop_at_validation_metric is None and ends:
        yield Problem(
            "grpo.stop_at_validation_metric",
            f"found null, but grpo.stop_at_validation_{ends[0]} is set",
            "Set both, or both to null.",
        )
    elif grpo.stop_at_validation_metric is not None and not ends:
        yield Problem(
            "grpo.stop_at_validation_threshold",
            "found null, but grpo.stop_at_validation_metric is set",
            "Set it, or grpo.stop_at_validation_patience, or all three to null.",
        )


def learning_rate(config: GrpoRunConfig) -> Problems:
    if "lr" not in config.policy.optimizer.kwargs:
        yield Problem(
            "policy.optimizer.kwargs",
            "there is no lr in it, and the optimizer's own default is far too large or missing",
            "Set policy.optimizer.kwargs.lr, for instance to 5e-6.",
        )


# --- lengths ---------------------------------------------------------------------------------------------------------------


def grpo_lengths(config: GrpoRunConfig) -> Problems:
    total = config.policy.max_total_sequence_length
    yield from _at_most(
        "policy.generation.max_new_tokens", config.policy.generation.max_new_tokens, "policy.max_total_sequence_length", total
    )
    yield from _at_most("data.max_input_seq_length", config.data.max_input_seq_length, "policy.max_total_sequence_length", total)


def eval_lengths(config: EvalRunConfig) -> Problems:
    total = config.generation.max_total_sequence_length
    yield from _at_most("generation.max_new_tokens", config.generation.max_new_tokens, "generation.vllm_cfg.max_model_len", total)
    yield from _at_most("data.max_input_seq_length", config.data.max_input_seq_length, "generation.vllm_cfg.max_model_len", total)


def _at_most(key: str, value: int, other: str, limit: int) -> Problems:
    if value > limit:
        yield Problem(
            key,
            f"found {value}, more than {other} = {limit}: prompt and completion together would not fit",
            f"Lower it, or raise {other}.",
        )


def token_budget(config: GrpoRunConfig) -> Problems:
    packing, total = config.policy.sequence_packing, config.policy.max_total_sequence_length
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        if packing.enabled and (budget := getattr(packing, name)) < total:
            yield Problem(
                f"policy.sequence_packing.{name}",
                f"found {budget}, but one rollout may have policy.max_total_sequence_length = {total} tokens",
                f"Set it to {total} or more.",
            )


# --- data and environments --------------------------------------------------------------------------------------------------


def entries_of(config: GrpoRunConfig | EvalRunConfig) -> list[tuple[str, DataEntryConfig]]:
    """(dotted key, entry) of every source of tasks."""
    if isinstance(config, EvalRunConfig):
        return [("data", config.data)]
    listed = []
    for name, entries in (("train", config.data.train), ("validation", config.data.validation or ())):
        listed += [(f"data.{name}" + (f".{index}" if len(entries) > 1 else ""), entry) for index, entry in enumerate(entries)]
    return listed


def training_data(config: GrpoRunConfig) -> Problems:
    if not config.data.train:
        yield Problem(
            "data.train",
            "there is nothing to train on",
            "Set data.train.dataset_name, or data.train.env_name for an environment that generates its tasks.",
        )


def environments(config: GrpoRunConfig | EvalRunConfig) -> Problems:
    aliases = ", ".join(config.env) or "nothing"
    for key, entry in entries_of(config):
        alias = environment_of(config, entry)
        if alias is None:
            yield Problem(
                f"{key}.env_name",
                f"found null, but env has {aliases}, so it is open who scores these tasks",
                "Name one of the aliases in env.",
            )
        elif alias not in config.env:
            yield Problem(
                f"{key}.env_name", f"found {alias!r}, but env has {aliases}", f"Add env.{alias}={{}}, or name one that is there."
            )


def files(config: GrpoRunConfig | EvalRunConfig) -> Problems:
    for key, entry in entries_of(config):
        for name in ("prompt_file", "system_prompt_file"):
            yield from _file_there(f"{key}.{name}", getattr(entry, name))
        if entry.is_file:
            yield from _file_there(f"{key}.dataset_name", entry.dataset_name)


def _file_there(key: str, name: str | None) -> Problems:
    if name is not None and not Path(name).is_file():
        where = "" if Path(name).is_absolute() else f" in the working directory {Path.cwd()}"
        yield Problem(
            key,
            f"there is no file {name}{where}",
            "Give the path of a file that is there, absolute or from the working directory.",
        )


def system_prompts(config: GrpoRunConfig | EvalRunConfig) -> Problems:
    for key, entry in entries_of(config):
        if entry.system_prompt is not None and entry.system_prompt_file is not None:
            yield Problem(f"{key}.system_prompt", "both system_prompt and system_prompt_file are set", "Set one of them to null.")


def sampling(config: EvalRunConfig) -> Problems:
    samples = config.eval.num_tests_per_prompt
    if samples > 1 and config.generation.temperature == 0:
        yield Problem(
            "eval.num_tests_per_prompt",
            f"found {samples}, but generation.temperature is 0: all samples of a task would be the same",
            "Set generation.temperature above 0, or one sample.",
        )
    if config.eval.k_value > samples:
        yield Problem(
            "eval.k_value",
            f"found {config.eval.k_value}, but there are only eval.num_tests_per_prompt = {samples} samples of a task",
            "Lower it, or take more samples.",
        )


# --- saving and logging -----------------------------------------------------------------------------------------------------


def checkpoint_metric(config: GrpoRunConfig) -> Problems:
    name = config.checkpointing.metric_name
    if not config.checkpointing.enabled or name is None:
        return
    kind, _, metric = name.partition(":")
    known = {"train": TRAIN_METRICS, "val": VALIDATION_METRICS}.get(kind, ())
    if not metric or not known or (metric not in known and "/" not in metric):
        choices = ", ".join([f"train:{one}" for one in TRAIN_METRICS] + [f"val:{one}" for one in VALIDATION_METRICS])
        yield Problem(
            "checkpointing.metric_name",
            f"found {name!r}, which no metric is called",
            f"Set null (keep the newest), train:group/name, val:group/name, or one of {choices}.",
        )


def trackers(config: GrpoRunConfig) -> Problems:
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboard")):
        if getattr(config.logger, f"{name}_enabled") and not installed(package):
            yield Problem(
                f"logger.{name}_enabled",
                f"found true, but the package {package} is not installed",
                f"Run pip install 'strop[{name}]', or set logger.{name}_enabled=false.",
            )


def installed(package: str) -> bool:
    """Whether a package can be imported; a mere folder of that name, such as wandb's own run folder, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


# --- odd, but it runs -------------------------------------------------------------------------------------------------------


def no_validation_data(config: GrpoRunConfig) -> Problems:
    grpo, data = config.grpo, config.data
    wanted = grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end
    if wanted and not data.validation and not any(entry.split_validation_size for entry in data.train):
        yield Problem(
            "data.validation",
            "there is no validation data, so validation is off",
            "Set data.validation, or data.train.split_validation_size; grpo.val_period=0 says that none is wanted.",
        )


def checkpoints_without_metric(config: GrpoRunConfig) -> Problems:
    saving, period = config.checkpointing, config.grpo.val_period
    ranked = saving.enabled and saving.save_period > 0 and saving.keep_top_k is not None
    if not ranked or not (saving.metric_name or "").startswith("val:"):
        return
    if period == 0:
        yield Problem(
            "checkpointing.metric_name",
            f"{saving.metric_name} is not measured during the run, as grpo.val_period is 0: the newest checkpoints are kept",
            "Set it to null, or to a metric train:NAME.",
        )
    elif saving.save_period % period:
        yield Problem(
            "checkpointing.save_period",
            f"found {saving.save_period}, no multiple of grpo.val_period = {period}: some checkpoints have no "
            f"{saving.metric_name} to be ranked by",
            f"Set it to a multiple of {period}.",
        )


def unread_batch_size(config: GrpoRunConfig) -> Problems:
    if config.policy.generation_batch_size is not None:
        yield Problem(
            "policy.generation_batch_size",
            "it changes nothing: the engine batches continuously",
            "policy.generation.torch_cfg.max_num_seqs bounds how many sequences run together.",
        )


def unread_vllm_options(config: GrpoRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_of(config)
    changed = [
        f"{key}.vllm_cfg.{name}"
        for name, field in VllmConfig.model_fields.items()
        if not targets_of(field)
        and name not in ("gpu_memory_utilization", "enforce_eager", "async_engine")
        and getattr(generation.vllm_cfg, name) != field.default
    ] + ([f"{key}.vllm_kwargs"] if generation.vllm_kwargs else [])
    if changed and generation.backend in ("auto", "torch"):
        yield Problem(
            changed[0],
            f"the torch engine does not read {', '.join(changed)}",
            "They are for generation.backend vllm, which is not in this version.",
        )


def kl_in_reward_of_weight_zero(config: GrpoRunConfig) -> Problems:
    if config.loss_fn.use_kl_in_reward and config.loss_fn.reference_policy_kl_penalty == 0:
        yield Problem("loss_fn.use_kl_in_reward", "it changes nothing: loss_fn.reference_policy_kl_penalty is 0")


def one_device(config: GrpoRunConfig | EvalRunConfig) -> Problems:
    if config.cluster.gpus_per_node > 1:
        yield Problem(
            "cluster.gpus_per_node",
            f"found {config.cluster.gpus_per_node}, but this version uses one device: the others stay idle",
        )


Check = Callable[[Any], Problems]

BOTH_REFUSALS: tuple[Check, ...] = (environments, files, system_prompts, *BOTH_UNSUPPORTED)
GRPO_REFUSALS: tuple[Check, ...] = (
    group_size,
    global_batch,
    on_policy_ratio,
    aggregation,
    ranges,
    early_stop,
    learning_rate,
    grpo_lengths,
    token_budget,
    training_data,
    checkpoint_metric,
    trackers,
    *GRPO_UNSUPPORTED,
)
EVAL_REFUSALS: tuple[Check, ...] = (eval_lengths, sampling)
BOTH_WARNINGS: tuple[Check, ...] = (unread_vllm_options, one_device)
GRPO_WARNINGS: tuple[Check, ...] = (
    no_validation_data,
    checkpoints_without_metric,
    unread_batch_size,
    kl_in_reward_of_weight_zero,
)


def refusals(config: Model) -> list[Problem]:
    """Why a run with this configuration cannot work; empty if it can."""
    own = GRPO_REFUSALS if isinstance(config, GrpoRunConfig) else EVAL_REFUSALS
    return _run(own + BOTH_REFUSALS, config)


def warnings(config: Model) -> list[Problem]:
    """What runs, but perhaps not as meant."""
    own = GRPO_WARNINGS if isinstance(config, GrpoRunConfig) else ()
    return _run(own + BOTH_WARNINGS, config)


def _run(checks: Sequence[Check], config: Model) -> list[Problem]:
    return [problem for check in checks for problem in check(config)] if isinstance(config, GrpoRunConfig | EvalRunConfig) else []
