"""``strop.evaluate``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.api import (
    Data,
    Reward,
    Settings,
    data_settings,
    is_rows,
    merge,
    nest,
    run_anywhere,
    task_settings,
    warn,
    with_reward,
)
from strop.checkpointing.saved_model import SavedModel, find_saved_model
from strop.config import EvalRunConfig, LoadedConfig, RolloutRunConfig, load_config
from strop.environments.base import Environment
from strop.extensions.evaluation.evaluate import CheckpointEvaluation, evaluate_any
from strop.extensions.evaluation.evaluated_run import load_evaluated_run
from strop.results import Evaluation, Run
from strop.runs.dry_run.examine import examine_loaded


def evaluate_model(
    model: str | Path | Run | None,
    *,
    data: Data | Sequence[str] | None,
    reward: Reward | None,
    environment: str | type[Environment[Any]] | None,
    samples: int | None,
    config: str | Path | None,
    settings: Settings,
) -> Evaluation:
    """Evaluate as ``strop.evaluate`` describes."""
    found = None if model is None else find_saved_model(model.folder if isinstance(model, Run) else model)
    own = {} if samples is None else {"eval": {"num_tests_per_prompt": samples}}
    given = merge([own, nest(settings)])
    if found is None or found.config_file is None:
        evaluation: Any = _prepare_model_evaluation(found, data, reward, environment, config, given)
    else:
        evaluation = _prepare_run_evaluation(found, data, reward, environment, config, given)
    report = run_anywhere(evaluate_any(evaluation))
    rows = [{"task": task["task"], "set": task.get("set"), **sample} for task in report.tasks for sample in task["samples"]]
    intervals = {name: (interval.low, interval.high) for name, interval in report.intervals.items()}
    return Evaluation(report.metrics, rows, report.standard_errors, intervals, report.stored, report.tasks, report.identity)


def _prepare_model_evaluation(
    model: SavedModel | None,
    data: Data | Sequence[str] | None,
    reward: Reward | None,
    environment: str | type[Environment[Any]] | None,
    config: str | Path | None,
    settings: Settings,
) -> EvalRunConfig:
    scored = reward is not None or environment is not None
    given = [*task_settings(reward, environment), data_settings(None, {} if data is None and scored else data, scored)]
    given += [{"generation": {"model_name": model.weights}}] if model is not None else []
    loaded: LoadedConfig[EvalRunConfig] = load_config(config, root=EvalRunConfig, values=merge([*given, settings]))
    warn(loaded)
    prepared = loaded.config
    if is_rows(data):
        prepared = replace(prepared, data=prepared.data.with_rows(data))
    prepared = replace(prepared, env=with_reward(prepared.env, reward))
    examine_loaded(replace(loaded, config=prepared), data=False)
    return prepared


def _prepare_run_evaluation(
    model: SavedModel,
    data: Data | Sequence[str] | None,
    reward: Reward | None,
    environment: str | type[Environment[Any]] | None,
    config: str | Path | None,
    settings: Settings,
) -> CheckpointEvaluation:
    assert model.config_file is not None
    scored = reward is not None or environment is not None
    entry = data_settings("validation", {} if data is None and scored else data, scored)
    run = load_evaluated_run(
        model.config_file,
        root=model.run_root,
        file=None if config is None else Path(config),
        values=merge([*task_settings(reward, environment), entry, settings]),
        fresh_data=is_rows(data),
    )
    prepared = run.config
    if is_rows(data):
        validation = prepared.data.validation_entries[0].with_rows(data)
        prepared = replace(prepared, data=replace(prepared.data, validation=(validation,)))
    if isinstance(prepared, RolloutRunConfig):
        prepared = replace(prepared, env=with_reward(prepared.env, reward))
    return CheckpointEvaluation(model, replace(run, config=prepared))
