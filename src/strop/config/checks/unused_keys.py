"""Warnings about keys without effect because of other keys. Each names both."""

from __future__ import annotations

from collections.abc import Iterator

from strop.base_config import BaseConfig, changed_keys, default_of, iter_sections
from strop.checkpointing.checkpointing_config import CheckpointingConfig
from strop.config.schema.run_config import RecordedRunConfig, TrainingRunConfig, list_trained_models
from strop.data.packing_config import DynamicBatchingConfig, SequencePackingConfig
from strop.generation.generation_config import ColocatedConfig
from strop.learner.model_config import ModelConfig
from strop.learner.parallel.dtensor_config import DtensorConfig
from strop.problems import Problem
from strop.trainer.training_config import AsyncConfig

Problems = Iterator[Problem]

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


def warn_unused_validation_size(config: RecordedRunConfig) -> Problems:
    training, key = config.recorded_training, f"{config.section}.val_micro_batch_size"
    if training.val_micro_batch_size != default_of(training, "val_micro_batch_size"):
        tokens = config.policy.score_tokens
        section = "sequence_packing" if config.policy.sequence_packing.enabled else "dynamic_batching"
        yield Problem(
            key,
            f"found {training.val_micro_batch_size}, which has no effect: policy.{section}.logprob_mb_tokens = {tokens} cuts the "
            "micro-batches of validation, whose result does not depend on it",
        )
