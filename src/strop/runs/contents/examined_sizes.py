"""Checks that the sizes of a run's models, tokenizers and sequences match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.config.schema.run_config import DistillationRunConfig, EvalRunConfig, TrainingRunConfig, list_trained_models
from strop.models.model_sizes import read_model_sizes, read_tokenizer_files
from strop.models.tokenizer_config import read_chat_template
from strop.problems import Problem


@dataclass(frozen=True)
class SizedModel:
    """A token-reading model of a run, with the keys that name it and limit its input."""

    key: str
    name: str
    tokenizer: str
    chat_template: str | None
    overrides: dict[str, object]
    length: int
    length_key: str

    @property
    def tokenizer_key(self) -> str:
        return f"{self.key}.model_name" if self.tokenizer == self.name else f"{self.key}.tokenizer.name"


def find_size_problems(config: TrainingRunConfig | EvalRunConfig) -> tuple[list[Problem], list[Problem]]:
    """Return the errors and warnings for every model of a run with local files."""
    errors: list[Problem] = []
    warnings: list[Problem] = []
    for model in _list_models(config):
        sizes = read_model_sizes(model.name, model.overrides)
        if sizes is None:
            continue
        try:
            template = read_chat_template(model.chat_template)
        except ValueError:  # said by the section
            continue
        tokenizer = read_tokenizer_files(model.tokenizer, template)
        found = (tokenizer, model.tokenizer_key, model.length, model.length_key)
        errors += sizes.errors(*found)
        warnings += sizes.warnings(*found)
    return list(dict.fromkeys(errors)), list(dict.fromkeys(warnings))


def _list_models(config: TrainingRunConfig | EvalRunConfig) -> Iterator[SizedModel]:
    if isinstance(config, EvalRunConfig):
        generation, tokenizer = config.generation, config.tokenizer
        length, length_key = generation.max_total_sequence_length, "generation.vllm_cfg.max_model_len"
        yield SizedModel("generation", generation.model_name, tokenizer.name, tokenizer.chat_template, {}, length, length_key)
        return
    length, length_key = config.policy.max_total_sequence_length, "policy.max_total_sequence_length"
    for key, model in list_trained_models(config):
        overrides = dict(model.hf_config_overrides or {})
        yield SizedModel(
            key, model.model_name, config.policy.tokenizer.name, model.tokenizer.chat_template, overrides, length, length_key
        )
    if isinstance(config, DistillationRunConfig):
        for key, teacher in config.all_teachers.items():
            if teacher.model_name != "self":
                yield SizedModel(key, teacher.model_name, teacher.tokenizer.name, None, {}, length, length_key)
