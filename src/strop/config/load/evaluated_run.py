"""Reads a run's configuration again to evaluate one of its checkpoints in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.base_config import iter_sections
from strop.config.load.auto_backend import resolve_auto_backend
from strop.config.load.evaluation_keys import nest, translate_overrides, translate_values
from strop.config.load.load import load_config
from strop.config.schema.graders import assign_graders
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.source import yaml_text
from strop.config.source.yaml_source import OVERRIDE, get_at, merge_sections, read_config_file
from strop.data.builtin_dataset import Purpose
from strop.data.data_config import split_names
from strop.data.prompt_template import AUTO_PROMPT
from strop.problems import ConfigError, Problem

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
