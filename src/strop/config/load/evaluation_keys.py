"""Translates keys between evaluations and training runs: each is accepted where the other is expected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.base_config import fields_of
from strop.config.schema.run_config import TRAINING_RUNS
from strop.config.source.yaml_source import OVERRIDE, merge_sections
from strop.data.data_config import DataConfig
from strop.problems import COMMAND_LINE, ConfigError, Origin, Problem

SAMPLING = ("temperature", "top_p", "top_k")  # keys with separate values for validation
OF_THE_MODEL = ("device", "num_threads", "precision")  # in a run under the policy, in an evaluation under the generation
TRAINING_NAMES = {  # eval.KEY -> SECTION.KEY of a run
    "num_tests_per_prompt": "val_num_generations_per_prompt",
    "max_val_samples": "max_val_samples",
    "max_rollout_turns": "max_rollout_turns",
}


@dataclass(frozen=True)
class TranslatedOverrides:
    """Overrides under the names of one kind of configuration."""

    overrides: tuple[str, ...]
    evaluation: tuple[str, ...] = ()  # those that only an evaluation has
    notes: tuple[str, ...] = ()  # notes about translated keys


def to_training_key(key: str, section: str) -> list[str]:
    """Return the training run keys with the same meaning as an evaluation key; the key itself if it has no other name."""
    first, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    match first:
        case "eval" if rest in TRAINING_NAMES:
            return [f"{section}.{TRAINING_NAMES[rest]}"]
        case "generation" if rest in SAMPLING:
            return [f"policy.generation.val_{rest}"]
        case "generation" if rest in OF_THE_MODEL:
            return [f"policy.{rest}"]
        case "generation" if rest == "vllm_cfg.max_model_len":
            return ["policy.max_total_sequence_length", "policy.generation.vllm_cfg.max_model_len"]
        case "generation" | "tokenizer":
            return [f"policy.{key}"]
        case "data" if name and name not in fields_of(DataConfig):
            return [f"data.validation.{rest}"]
    if key in [f"policy.generation.{each}" for each in SAMPLING]:
        return [key.replace("generation.", "generation.val_")]
    return [key]


def to_evaluation_key(key: str) -> list[str]:
    """Return the evaluation keys with the same meaning as a training run key; the key itself if it has no other name."""
    first, _, rest = key.partition(".")
    if first in TRAINING_RUNS:
        known = {name: own for own, name in TRAINING_NAMES.items()} | {"seed": "seed"}
        return [f"eval.{known[rest]}"] if rest in known else [key]
    match first, rest.partition("."):
        case "policy", ("generation", _, inner):
            plain = inner.removeprefix("val_")
            return [f"generation.{plain if plain in SAMPLING else inner}"]
        case "policy", ("tokenizer", _, inner):
            return [f"tokenizer.{inner}"]
        case "policy", (name, _, "") if name in (*OF_THE_MODEL, "model_name"):
            return [f"generation.{name}"]
        case "policy", ("max_total_sequence_length", _, ""):
            return ["generation.vllm_cfg.max_model_len"]
        case "data", ("validation", _, inner) if inner:
            return [f"data.{inner}"]
    return [key]


def is_only_of_evaluation(key: str) -> bool:
    """Whether a run has no key with the same meaning."""
    return key == "generation.num_prompts_per_step" or (key.startswith("eval.") and key[5:] not in TRAINING_NAMES)


def translate_overrides(overrides: Sequence[str], *, section: str | None) -> TranslatedOverrides:
    """Translate overrides for a run with a training ``section``, or for an evaluation if it is None. Raises ConfigError."""
    kept: list[str] = []
    evaluation: list[str] = []
    notes: list[str] = []
    for text in overrides:
        match = OVERRIDE.fullmatch(text.strip())
        if match is None or (match["value"] is None and match["mark"] != "~"):
            kept.append(text)  # the loader reports what is wrong with it
            continue
        key, mark = match["key"], match["mark"] or ""
        value = "" if match["value"] is None else f"={match['value']}"
        if section is not None and key in ("generation.model_name", "policy.model_name"):
            raise ConfigError([_second_model(key, match["value"])])
        if section is not None and is_only_of_evaluation(key):
            evaluation.append(text)
            continue
        names = to_evaluation_key(key) if section is None else to_training_key(key, section)
        kept += [f"{mark}{name}{value}" for name in names]
        if names != [key]:
            notes.append(
                f"{key} is read as {' and '.join(names)}, its name in {'an evaluation' if section is None else 'the run'}"
            )
    return TranslatedOverrides(tuple(kept), tuple(evaluation), tuple(notes))


def translate_values(values: Mapping[str, Any], *, section: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate nested values. Return them, and those that only an evaluation has."""
    kept: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    for key, value in _leaves(values):
        if section is not None and key in ("generation.model_name", "policy.model_name", "tokenizer.name"):
            continue  # a file for another model, but the run determines the model
        if section is not None and is_only_of_evaluation(key):
            evaluation = merge_sections(evaluation, nest(key, value))
            continue
        for name in to_evaluation_key(key) if section is None else to_training_key(key, section):
            kept = merge_sections(kept, nest(name, value))
    return kept, evaluation


def nest(key: str, value: Any) -> dict[str, Any]:
    """``a.b`` -> ``{a: {b: value}}``"""
    for name in reversed(key.split(".")):
        value = {name: value}
    nested: dict[str, Any] = value
    return nested


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and not key.endswith(("chat_template_kwargs", "vllm_kwargs")):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _second_model(key: str, value: str | None) -> Problem:
    return Problem(
        key,
        f"found {value}, but the model is that of the run or checkpoint named first",
        f"Name one of them: strop eval {value} takes the model and, if it is a run's, its settings.",
        Origin(COMMAND_LINE),
    )
