"""Checks about data and its environments that need more than one section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.base_config import default_of, iter_sections
from strop.config.checks.device_counts import count_devices
from strop.config.schema.run_config import (
    DpoRunConfig,
    EvalRunConfig,
    RecordedRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
    environment_alias,
)
from strop.data.data_config import DataEntryConfig, DefaultEntryConfig, EvalDataConfig, EvalSetConfig, entry_keys
from strop.problems import Problem

Problems = Iterator[Problem]

OF_PAIRS = ("chosen_key", "rejected_key", "label_key", "margin_key")
OF_RAW_TEXT = ("text_key", "characters_per_sample")
OF_ROWS = ("subset", "split", "revision", "input_key", "output_key", "messages_key", "image_key", "media_data_dir")
READ_BY_OTHERS: Mapping[str, tuple[str, ...]] = {  # keys of an entry that only other kinds of run read
    **dict.fromkeys(("grpo", "ppo", "distillation"), (*OF_PAIRS, *OF_RAW_TEXT, "system_key", "tool_key")),
    "sft": OF_PAIRS,
    "dpo": OF_RAW_TEXT,
    "rm": (*OF_RAW_TEXT, "label_key"),
}


def check_training_data(config: TrainingRunConfig) -> Problems:
    if not config.data.train:
        yield Problem(
            "data.train",
            "there is nothing to train on",
            "Set data.train.dataset_name."
            if isinstance(config, RecordedRunConfig)
            else "Set data.train.dataset_name, or data.train.env_name for an environment that generates its tasks.",
        )


def check_unread_keys(config: TrainingRunConfig) -> Problems:
    """Keys set for all entries in data.default are not checked, because others may read them."""
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
    """The groups of a step are distributed over its entries."""
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
            f"the entries of data.train have {of_each} = {total} groups per step, but {key} is {wanted or 'null'}",
            f"Set {key}={total}{f', or prompts_per_step of the entries so that they add up to {wanted}' if wanted else ''}.",
        )


def check_curriculum(config: RecordedRunConfig) -> Problems:
    if config.data.curriculum.enabled:
        yield Problem(
            "data.curriculum.name",
            f"found {config.data.curriculum.name}, but a curriculum chooses tasks to sample, and {config.section} reads recorded data",
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
