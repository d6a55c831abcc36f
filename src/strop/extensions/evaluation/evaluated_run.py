"""Reads a run's configuration again to evaluate one of its checkpoints in one process, and translates keys between the two kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.base_config import fields_of, iter_sections
from strop.config.load.device_defaults import resolve_auto_backend
from strop.config.load.load import load_config
from strop.config.schema.evaluation_config import assign_graders
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.source import yaml_text
from strop.config.source.yaml_source import OVERRIDE, get_at, merge_sections, read_config_file
from strop.data.builtin_dataset import Purpose
from strop.data.data_config import DataConfig, split_names
from strop.data.prompt_template import AUTO_PROMPT
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


ONE_PROCESS: Mapping[str, Any] = {
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 1,
    "cluster.backend": "auto",
    "policy.generation.torch_cfg.num_engines": None,
    "policy.generation.colocated.enabled": True,
    "policy.dtensor_cfg.cpu_offload": False,
    "policy.dtensor_cfg.sequence_parallel": False,
    **{
        f"policy.dtensor_cfg.{name}_size": 1
        for name in ("tensor_parallel", "context_parallel", "expert_parallel", "dp_replicate")
    },
}
COLUMNS = (
    "_key",
    "env_name",
    "prompt_file",
    "system_prompt_file",
    "system_prompt",
)  # suffixes of keys shared by other data of a run
OTHER_DATA: Mapping[str, Any] = {  # keys that do not carry over to other data
    **dict.fromkeys(("dataset_name", "subset", "split", "revision", "size", "seed")),
    "split_validation_size": 0.0,
    "repeat": 1,
}
CHECKED = ("data.validation", "policy.generation", "env")  # sections whose checks apply to an evaluation
NAME_KEY = "data.validation.dataset_name"
NO_VALIDATION_DATA = "the run has no validation data, and its training data hold out none (split_validation_size)"


@dataclass(frozen=True)
class EvaluatedRun:
    """A run's configuration with the changes for an evaluation, and the keys that only an evaluation has."""

    config: TrainingRunConfig
    evaluation: EvalRunConfig  # only the keys that the run lacks are used
    seed: int  # of sampling
    notes: tuple[str, ...]
    purpose: Purpose = "validation"  # evaluation: of data other than the run's
    several_sets: bool = False  # with separate metrics for each


def load_evaluated_run(
    config_file: Path,
    overrides: Sequence[str] = (),
    *,
    root: Path = Path(),
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    fresh_data: bool = False,
) -> EvaluatedRun:
    """Read a run's configuration for one process, with changes under the keys of training or of an evaluation.

    Args:
        config_file: The run's ``config.yaml``.
        root: The working directory of the run, which names of files are relative to.
        file: A configuration file with further settings.
        values: Further settings from Python, nested.
        fresh_data: The data are given in Python.

    Raises ConfigError.
    """
    saved = read_config_file(config_file).values
    section = next((name for name in TRAINING_RUNS if name in saved), None)
    if section is None:
        names = ", ".join(TRAINING_RUNS)
        raise ConfigError([Problem("", f"{config_file} is not the configuration of a training run: it has none of {names}")])
    translated = translate_overrides(overrides, section=section)
    given: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for tree in (read_config_file(file).values if file is not None else {}, values or {}):
        kept, evaluation = translate_values(tree, section=section)
        given, own = merge_sections(given, kept), merge_sections(own, evaluation)
    changed = _changed_data(given, translated.overrides)
    given, kept_overrides, set_names = _take_names(given, translated.overrides)
    base = _prepare_values(saved, section, root, changed, fresh=fresh_data)
    config = load_config(
        config_file, kept_overrides, root=TRAINING_RUNS[section], values=merge_sections(base, given), check=False
    ).config
    config = resolve_auto_backend(config)
    others = "dataset_name" in changed
    if others and isinstance(config, RolloutRunConfig):
        named = [replace(entry, dataset_name=name) for entry in config.data.validation_entries[:1] for name in set_names]
        entries, env = assign_graders(named or config.data.validation_entries, config.env)
        config = replace(config, data=replace(config.data, validation=entries), env=env)
    evaluation_config = _load_own_keys(config, own, translated.evaluation)
    _check(config, evaluation_config)
    seeded = "seed" in own.get("eval", {}) or any(text.startswith("eval.seed=") for text in translated.evaluation)
    seed = evaluation_config.eval.seed if seeded else config.training.seed
    return EvaluatedRun(
        config, evaluation_config, seed, translated.notes, "evaluation" if others else "validation", bool(set_names)
    )


def _prepare_values(saved: Mapping[str, Any], section: str, root: Path, changed: Sequence[str], *, fresh: bool) -> dict[str, Any]:
    """Return a run's values with the changes for an evaluation: one process, files relative to its folder, the data."""
    values: dict[str, Any] = {}
    for key, value in {**ONE_PROCESS, "checkpointing.enabled": False, f"{section}.val_at_start": True}.items():
        values = merge_sections(values, nest(key, value))
    if section == "dpo":
        values = merge_sections(values, nest("dpo.precompute_reference", False))
    for name in ("data", "env", "policy"):
        values = merge_sections(values, {name: _relocate(saved.get(name) or {}, root)} if saved.get(name) else {})
    data = values.get("data") or {}
    entries = _as_list(data.get("validation")) or [
        entry for entry in _as_list(data.get("train")) if entry.get("split_validation_size")
    ]
    is_other = fresh or "dataset_name" in changed
    if is_other or (changed and not entries):
        pattern = (entries or _as_list(data.get("train")) or [{}])[0]
        shared = {key: value for key, value in pattern.items() if key.endswith(COLUMNS)}
        prompt = shared.get("prompt_file") or AUTO_PROMPT  # a set that is graded as usually reported also gets its usual prompt
        entries = [{**OTHER_DATA, **shared, "prompt_file": prompt}]
    if not entries:
        raise ConfigError(
            [
                Problem(
                    "data.validation",
                    NO_VALIDATION_DATA,
                    "Name the data to evaluate on: data.dataset_name=FILE, or data.size=100.",
                )
            ]
        )
    return merge_sections(values, {"data": {"validation": entries[0] if len(entries) == 1 else entries}})


def _take_names(given: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...], list[str]]:
    """Return the values and overrides with only the first of several data set names, and all the names."""
    names: list[str] = []
    section = get_at(given, ("data", "validation"))
    if isinstance(section, Mapping) and (names := split_names(section.get("dataset_name"))):
        given = merge_sections(given, nest(NAME_KEY, names[0]))
    kept: list[str] = []
    for text in overrides:
        match = OVERRIDE.fullmatch(text.strip())
        if match and match["key"] == NAME_KEY and (found := split_names(yaml_text.parse_value(match["value"] or ""))):
            names, text = found, f"{NAME_KEY}={found[0]}"
        elif match and match["key"] == NAME_KEY:
            names = []
        kept.append(text)
    return given, tuple(kept), names


def _changed_data(given: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return the validation data keys that are set for the evaluation."""
    prefix = "data.validation."
    matches = (OVERRIDE.fullmatch(text.strip()) for text in overrides)
    typed = [match["key"].removeprefix(prefix) for match in matches if match and match["key"].startswith(prefix)]
    section = get_at(given, ("data", "validation"))
    return [*typed, *(section if isinstance(section, Mapping) else ())]


def _relocate(value: Any, root: Path) -> Any:
    """Return nested values, prefixing file names with ``root`` if they exist there but not in the current folder."""
    if isinstance(value, Mapping):
        return {key: _relocate(inner, root) for key, inner in value.items()}
    if isinstance(value, list):
        return [_relocate(inner, root) for inner in value]
    if not isinstance(value, str) or not value or "\n" in value or len(value) > 1000:
        return value
    file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
    looks_like_path = "/" in file or "." in file
    if looks_like_path and not Path(file).exists() and (root / file).exists():
        return f"{root / file}{colon}{name}"
    return value


def _as_list(entries: Any) -> list[Mapping[str, Any]]:
    return [entries] if isinstance(entries, Mapping) else list(entries or [])


def _load_own_keys(config: TrainingRunConfig, own: Mapping[str, Any], overrides: Sequence[str]) -> EvalRunConfig:
    samples = config.rollout_training.val_num_generations_per_prompt if isinstance(config, RolloutRunConfig) else 1
    required = {"generation": {"model_name": config.policy.model_name}, "eval": {"num_tests_per_prompt": samples}}
    return load_config(None, overrides, root=EvalRunConfig, values=merge_sections(required, own), check=False).config


def _check(config: TrainingRunConfig, evaluation: EvalRunConfig) -> None:
    """Raise ConfigError for settings that cannot work in an evaluation. Checks for training do not apply."""
    problems = list(evaluation.eval.errors("eval"))
    for key, section in iter_sections(config):
        if key.startswith(CHECKED) and key != "policy.generation.weight_sync":
            problems += section.errors(key)
    if problems:
        raise ConfigError(problems)
