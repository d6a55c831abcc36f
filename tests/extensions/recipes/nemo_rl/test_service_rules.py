"""The section `logger` of a NeMo-RL recipe: services have the same keys; what it hands to their packages has a counterpart or is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop import packages
from strop.config import ConfigError, LoadedConfig, load_config
from strop.config.schema.run_config import GrpoRunConfig
from strop.extensions.recipes.difference import Effect
from strop.runs.lifecycle import make_services

RECIPE = """
defaults: base.yaml
logger:
  log_dir: logs/dev
  num_val_samples_to_print: 0
  wandb_enabled: true
  swanlab_enabled: true
  tensorboard_enabled: true
  mlflow_enabled: true
  monitor_gpus: true
  wandb: {project: grpo-dev, name: first, entity: team, tags: [a], group: seeds, id: abc, resume: allow, save_code: true}
  swanlab: {project: grpo-dev, experiment_name: first, description: why, workspace: team, logdir: x}
  tensorboard: {log_dir: tb_logs}
  mlflow: {experiment_name: null, run_name: first, tracking_uri: "http://localhost:5000", artifact_location: null, run_id: null}
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedConfig[Any]:
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    (tmp_path / "base.yaml").write_text("policy: {model_name: m}\ndata: {train: {env_name: arithmetic}}\nenv: {arithmetic: {}}\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return load_config(tmp_path / "recipe.yaml", [f"logger.log_dir={tmp_path}"], root=GrpoRunConfig, check=False)


def test_every_service_of_a_recipe_is_on_under_its_names(recipe: LoadedConfig[Any]) -> None:
    logger = recipe.config.logger
    assert logger.services == ("tensorboard", "wandb", "mlflow", "swanlab")
    assert (logger.wandb.project, logger.wandb.name, logger.wandb.entity, logger.wandb.group) == (
        "grpo-dev",
        "first",
        "team",
        "seeds",
    )
    assert (logger.swanlab.project, logger.swanlab.name, logger.swanlab.notes) == ("grpo-dev", "first", "why")
    assert (logger.mlflow.run_name, logger.mlflow.tracking_uri) == ("first", "http://localhost:5000")
    assert logger.mlflow.experiment_name is None and logger.tensorboard.log_dir == "tb_logs"


def test_arguments_of_a_service_that_have_no_meaning_here_are_named(recipe: LoadedConfig[Any]) -> None:
    named = {each.key: each.effect for each in recipe.differences}
    for key in ("wandb.id", "wandb.resume", "wandb.save_code", "swanlab.logdir"):
        assert named[f"logger.{key}"] is Effect.UNUSED
    assert named["logger.swanlab.experiment_name"] is Effect.RENAMED


def test_projects_that_a_recipe_leaves_open_are_those_of_the_environment(
    recipe: LoadedConfig[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {f"{name}_enabled": False for name in ("wandb", "swanlab", "tensorboard")}
    config = replace(recipe.config, logger=replace(recipe.config.logger, **off))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from-outside")
    (tracker,) = make_services(config)
    assert vars(tracker)["_experiment"] == "from-outside"
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    (tracker,) = make_services(config)
    assert vars(tracker)["_experiment"] == "strop"


def test_a_project_that_swanlab_would_not_take_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "is_installed", lambda name: True)
    base = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "logger.swanlab.project=my project"]
    with pytest.raises(ConfigError, match=r"logger\.swanlab\.project: found 'my project', but SwanLab takes at most 100 letters"):
        load_config(None, [*base, "logger.swanlab_enabled=true"], root=GrpoRunConfig)
