"""Configuration: a typed schema, YAML loading with overrides, and errors with suggested fixes.

    load_config(path, overrides, root=GrpoRunConfig) -> LoadedConfig      dump_config(config) -> YAML      ConfigError

Imports neither torch nor transformers, so that errors are reported immediately.
"""

from strop.config.load.load import LoadedConfig, dump_config, load_config
from strop.config.schema.run_config import (
    TRAINING_RUNS,
    EvalRunConfig,
    GrpoRunConfig,
    RolloutRunConfig,
    TrainingRunConfig,
)
from strop.problems import ConfigError, Problem

__all__ = [
    "TRAINING_RUNS",
    "ConfigError",
    "EvalRunConfig",
    "GrpoRunConfig",
    "LoadedConfig",
    "Problem",
    "RolloutRunConfig",
    "TrainingRunConfig",
    "dump_config",
    "load_config",
]
