"""Everything that speaks against a configuration: the rules of its sections, and those that need more than one section.

A rule that reads one section is a method of it (``BaseConfig.errors`` and ``warnings``). The others are functions here and in
``cluster_checks``; the annotation of ``config`` says to which kinds of run each applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, get_type_hints

from strop.base_config import BaseConfig, default_of, iter_sections
from strop.config.checks import cluster_checks, exact_checks, megatron_checks, memory_checks, quantization_checks, unused_keys
from strop.config.checks.device_counts import count_devices, plan_gpus
from strop.config.schema.run_config import (
    DistillationRunConfig,
    DpoRunConfig,
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
from strop.data.data_config import DataEntryConfig, DefaultEntryConfig, EvalDataConfig, EvalSetConfig, entry_keys
from strop.problems import Problem

Problems = Iterator[Problem]

# --- training --------------------------------------------------------------------------------------------------------------


def check_global_batch(config: RolloutRunConfig) -> Problems:
    size, training = config.policy.train_global_batch_size, config.rollout_training
    prompts, per_step, group = training.num_prompts_per_step, training.rollouts_per_step, training.num_generations_per_prompt
    if size is None or (per_step % size == 0 and size % group == 0):
        return
    fitting = [steps for steps in range(1, min(prompts, 10_000) + 1) if prompts % steps == 0]
    sizes = ", ".join(str(per_step // steps) for steps in fitting[:6])
    yield Problem(
        "policy.train_global_batch_size",
        f"found {size}, but a step has {prompts} prompts x {group} generations = {per_step} rollouts, which must split into equal "
        "optimizer steps of whole groups",
        f"Set it to null (one optimizer step), or to one of {sizes}.",
    )


def check_engine_device(config: RolloutRunConfig, device: str | None = None) -> Problems:
    """Check vLLM engines beside the learner's ``device``: by default the configured one, which may be ``auto``."""
    generation, key, device = config.policy.generation, "policy.generation", device or config.policy.device
    if generation.uses_vllm:
        yield from generation.quantization_errors(key, device)
    if generation.uses_engines:
        plan = plan_gpus(config)
        yield from generation.weight_sync.transport_errors(
            key,
            device,
            engines=generation.engine_options.num_local_engines if plan is None else len(plan.generation),
            colocated=generation.colocated.enabled,
            same_machine=plan is None or plan.on_one_machine,
        )
        if config.rollout_training.max_staleness > 0:
            yield from generation.async_errors(key, device)


def check_chosen_device(config: TrainingRunConfig, device: str) -> Problems:
    """Check what depends on the kind of device, once it is known what ``policy.device`` = auto is."""
    for key, model in list_trained_models(config):
        yield from model.fp8.float8_errors(f"{key}.fp8", device)
    if isinstance(config, RolloutRunConfig):
        yield from check_engine_device(config, device)


def check_measured_peak(config: TrainingRunConfig) -> Problems:
    if config.logger.peak_tflops == "measure" and config.policy.device.startswith("cuda"):
        yield Problem(
            "logger.peak_tflops",
            f"found measure, which measures processors, and policy.device={config.policy.device}",
            "Leave logger.peak_tflops=null for a GPU of the table of devices (docs/planning.md), or set the peak of one GPU in TFLOP/s.",
        )


def check_critic_batch(config: PpoRunConfig) -> Problems:
    """The critic trains on the policy's batches, with one optimizer step for each of the policy's."""
    policy, value = config.policy, config.value
    if value.train_global_batch_size not in (None, policy.train_global_batch_size):
        yield Problem(
            "value.train_global_batch_size",
            f"found {value.train_global_batch_size}, but the critic takes its optimizer steps with the policy, and "
            f"policy.train_global_batch_size is {policy.train_global_batch_size}",
            "Set it to null.",
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


def check_token_budget(config: TrainingRunConfig) -> Problems:
    total = config.policy.max_total_sequence_length
    for key, model in list_trained_models(config):
        packing = model.sequence_packing
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            if packing.enabled and (budget := getattr(packing, name)) != "auto" and budget < total:
                yield Problem(
                    f"{key}.sequence_packing.{name}",
                    f"found {budget}, but a single rollout may have policy.max_total_sequence_length = {total} tokens",
                    f"Set it to {total} or more.",
                )


def check_lengths(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    key, generation = generation_section(config)
    if isinstance(config, EvalRunConfig):
        other, limit = "generation.vllm_cfg.max_model_len", config.generation.max_total_sequence_length
    else:
        other, limit = "policy.max_total_sequence_length", config.policy.max_total_sequence_length
    lengths = {f"{key}.max_new_tokens": generation.max_new_tokens, "data.max_input_seq_length": config.data.max_input_seq_length}
    for name, value in lengths.items():
        if value > limit:
            yield Problem(
                name,
                f"found {value}, more than {other} = {limit}, which limits prompt and completion together",
                f"Lower it, or raise {other}.",
            )


# --- data ------------------------------------------------------------------------------------------------------------------


def check_training_data(config: TrainingRunConfig) -> Problems:
    if not config.data.train:
        yield Problem(
            "data.train",
            "there is nothing to train on",
            "Set data.train.dataset_name."
            if isinstance(config, RecordedRunConfig)
            else "Set data.train.dataset_name, or data.train.env_name for an environment that generates its tasks.",
        )


OF_PAIRS = ("chosen_key", "rejected_key", "label_key", "margin_key")
OF_RAW_TEXT = ("text_key", "characters_per_sample")
OF_ROWS = ("subset", "split", "revision", "input_key", "output_key", "messages_key", "image_key", "media_data_dir")
READ_BY_OTHERS: Mapping[str, tuple[str, ...]] = {  # keys of an entry that only other kinds of run read
    **dict.fromkeys(("grpo", "ppo", "distillation"), (*OF_PAIRS, *OF_RAW_TEXT, "system_key", "tool_key")),
    "sft": OF_PAIRS,
    "dpo": OF_RAW_TEXT,
    "rm": (*OF_RAW_TEXT, "label_key"),
}


def check_unread_keys(config: TrainingRunConfig) -> Problems:
    """What data.default sets for all entries is not asked about: others may read it."""
    parts = {"data.train": config.data.train, "data.validation": config.data.validation or ()}
    for place, entry in (
        (key, each) for part, own in parts.items() for key, each in zip(entry_keys(part, len(own)), own, strict=True)
    ):
        generated = entry.data_name is None
        reader = "a generated task" if generated else f"strop {config.section}"
        for name in dict.fromkeys((*READ_BY_OTHERS[config.section], *(OF_ROWS if generated else ()))):
            value = getattr(entry, name)
            if value not in (default_of(entry, name), getattr(config.data.default, name)):
                yield Problem(
                    f"{place}.{name}", f"found {value}, which {reader} does not read", "Remove the key, or set it to null."
                )


def check_quotas(config: TrainingRunConfig) -> Problems:
    """The groups of a step are those of its entries."""
    quotas = [entry.prompts_per_step for entry in config.data.train]
    if not quotas or None in quotas:
        return
    total, of_each = sum(quota or 0 for quota in quotas), " + ".join(map(str, quotas))
    if isinstance(config, RolloutRunConfig):
        key, wanted = f"{config.section}.num_prompts_per_step", config.rollout_training.num_prompts_per_step
    elif isinstance(config, RecordedRunConfig):
        key, wanted = "policy.train_global_batch_size", config.policy.train_global_batch_size or 0
    if total != wanted:
        yield Problem(
            f"{entry_keys('data.train', len(quotas))[0]}.prompts_per_step",
            f"the entries of data.train have {of_each} = {total} of a step, and {key} is {wanted or 'null'}",
            f"Set {key}={total}{f', or prompts_per_step of the entries so that they add up to {wanted}' if wanted else ''}.",
        )


def check_curriculum(config: RecordedRunConfig) -> Problems:
    if config.data.curriculum.enabled:
        yield Problem(
            "data.curriculum.name",
            f"found {config.data.curriculum.name}, but a curriculum chooses the tasks that are sampled, and {config.section} reads "
            "recorded data",
            "Set it to none; data.shuffle=false keeps the order of the rows.",
        )


def check_precomputed_reference(config: DpoRunConfig) -> Problems:
    streamed = [entry for entry in config.data.train if entry.streaming]
    if config.dpo.precompute_reference and streamed:
        yield Problem(
            "dpo.precompute_reference",
            f"found true, which reads all data before the first step, but {streamed[0].data_name} is streamed",
            "Set it to false: the reference then scores each step.",
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
                else "Add an environment, such as env.math={}, or a reward of your own, such as env.task.reward=rewards.py:correct.",
            )
        elif alias not in config.env:
            yield Problem(
                f"{key}.env_name", f"found {alias!r}, but env has {aliases}", f"Add env.{alias}={{}}, or set it to one of these."
            )


def _explain_unknown_set(name: str | None) -> str:
    from strop.data.builtin.all_sets import BUILTIN_DATASETS
    from strop.data.sources.dataset_class import is_dataset_class
    from strop.data.sources.records import DataError
    from strop.data.sources.source import check_hub_name, is_local
    from strop.data.sources.streaming.file_shards import is_pattern

    if name is None or name in BUILTIN_DATASETS or is_local(name) or is_pattern(name) or is_dataset_class(name):
        return ""
    try:
        check_hub_name(name)
    except DataError as error:
        return str(error)
    return ""


def check_past_opponents(config: RolloutRunConfig | EvalRunConfig) -> Problems:
    """Earlier selves of the policy are kept in the learner's process, by a run that trains."""
    for alias, section in config.env.items():
        if section.type_of(alias) != "two_player" or section.options.get("opponent") != "past":
            continue
        if isinstance(config, EvalRunConfig):
            yield Problem(
                f"env.{alias}.opponent",
                "found past, but a model that is evaluated has no earlier selves",
                "Set it to self, or to endpoint with an earlier checkpoint that strop serve serves.",
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


def warn_unused_offload(config: RolloutRunConfig) -> Problems:
    alternates = config.rollout_training.max_staleness == 0 or not config.policy.generation.uses_engines
    if config.policy.offload is True and config.policy.generation.colocated.enabled and not alternates:
        yield Problem("policy.offload", "it has no effect: asynchronous training samples while the learner trains")


def warn_unused_routes(config: TrainingRunConfig) -> Problems:
    if not config.logger.routes:
        return
    if not config.policy.router_replay.enabled:
        yield Problem("logger.routes", "it has no effect: policy.router_replay.enabled is false, so no experts are recorded")
    elif config.logger.rollouts == "none":
        yield Problem("logger.routes", "it has no effect: logger.rollouts is none, so no rollouts are stored")


def warn_unused_kl_in_reward(config: GrpoRunConfig | PpoRunConfig) -> Problems:
    loss, algorithm = config.loss_fn, config.algorithm
    no_default_kl = algorithm.name in ("grpo", "ppo") and "kl" not in algorithm.kwargs
    if loss.use_kl_in_reward and (
        loss.reference_policy_kl_penalty == 0 or (loss.reference_policy_kl_penalty is None and no_default_kl)
    ):
        yield Problem("loss_fn.use_kl_in_reward", "it has no effect: loss_fn.reference_policy_kl_penalty is 0")


Check = Callable[[Any], Problems]

ERROR_CHECKS: tuple[Check, ...] = (
    check_training_data,
    check_unread_keys,
    check_global_batch,
    check_critic_batch,
    check_engine_device,
    check_measured_peak,
    check_teachers,
    check_token_budget,
    check_lengths,
    check_quotas,
    check_curriculum,
    check_precomputed_reference,
    check_environments,
    check_past_opponents,
    check_eval_sampling,
    exact_checks.check_one_process,
    exact_checks.check_order_of_events,
    quantization_checks.check_adapters_of_other_processes,
    memory_checks.check_measured_budget,
    *cluster_checks.ERROR_CHECKS,
    *megatron_checks.ERROR_CHECKS,
)
WARNING_CHECKS: tuple[Check, ...] = (
    exact_checks.warn_order_of_turns,
    warn_no_validation_data,
    warn_unranked_checkpoints,
    warn_unused_recomputation,
    warn_unused_offload,
    warn_unused_routes,
    warn_unused_kl_in_reward,
    cluster_checks.warn_unused_roles,
    megatron_checks.warn_torch_keys,
    cluster_checks.warn_idle_devices,
    unused_keys.warn_sections_off,
    unused_keys.warn_unused_batch_sizes,
    unused_keys.warn_unused_validation_size,
)


def find_errors(config: BaseConfig) -> list[Problem]:
    """Return the errors of a configuration; empty if the run can work."""
    return [problem for key, section in iter_sections(config) for problem in section.errors(key)] + _run(ERROR_CHECKS, config)


def find_warnings(config: BaseConfig) -> list[Problem]:
    """Return warnings: settings that work, but perhaps not as intended."""
    return [problem for key, section in iter_sections(config) for problem in section.warnings(key)] + _run(WARNING_CHECKS, config)


def _run(checks: tuple[Check, ...], config: BaseConfig) -> list[Problem]:
    applicable = [check for check in checks if isinstance(config, _asked_of(check))]
    return [problem for check in applicable for problem in check(config)]


@cache
def _asked_of(check: Check) -> Any:
    """Return the kind of run that a check is about."""
    return get_type_hints(check)["config"]
