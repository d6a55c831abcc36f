"""Detect the kind of a training configuration by its training section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.config.checks import cluster_checks
from strop.config.errors import ConfigError
from strop.config.load.load import LoadedConfig, load_config
from strop.config.load.yaml_source import read_config_file
from strop.config.schema.run_config import TRAINING_RUNS, GrpoRunConfig, TrainingRunConfig

MODEL_KEY, PLACEHOLDER_MODEL = "policy.model_name", "none"  # the schema requires a model


def load_any_kind(path: Path | None, overrides: Sequence[str] = ()) -> LoadedConfig[TrainingRunConfig]:
    """Load a training configuration of any kind. Without a file, check only what concerns the machines. Raises ConfigError."""
    values = dict(read_config_file(path).values) if path is not None else {}
    sections = [*values, *(override.lstrip("~+").split(".")[0] for override in overrides)]
    root = next((TRAINING_RUNS[section] for section in sections if section in TRAINING_RUNS), GrpoRunConfig)
    if path is not None:
        return load_config(path, overrides, root=root)
    placeholder = (
        [] if any(override.startswith(f"{MODEL_KEY}=") for override in overrides) else [f"{MODEL_KEY}={PLACEHOLDER_MODEL}"]
    )
    loaded = load_config(None, [*overrides, *placeholder], root=root, check=False)
    problems = [problem for check in cluster_checks.CLUSTER_ERROR_CHECKS for problem in check(loaded.config)]
    if problems:
        raise ConfigError(problems)
    return loaded
