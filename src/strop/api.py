"""Train, evaluate and compare from Python, with the same configuration and objects as the command line."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from strop import plugins
from strop.data.sources.in_memory import check_rows
from strop.results import Evaluation, Run
from strop.safety.exits import run_coroutine
from strop.user_code import remember_code

if TYPE_CHECKING:
    import datasets

    from strop.algorithms.base import Algorithm
    from strop.config import LoadedConfig, TrainingRunConfig
    from strop.environments.base import Environment
    from strop.environments.environment_config import EnvironmentConfig

Settings: TypeAlias = "Mapping[str, Any]"
Data: TypeAlias = "str | Path | Sequence[Mapping[str, Any]] | datasets.Dataset | Settings"
Reward: TypeAlias = "Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | Mapping[str, Any]"
T = TypeVar("T")

ALIAS = "task"  # the environment described by ``reward`` or ``environment``


def train(
    algorithm: str | Algorithm = "grpo",
    *,
    model: str | Path | None = None,
    data: Data | None = None,
    validation: Data | None = None,
    reward: Reward | None = None,
    environment: str | type[Environment[Any]] | None = None,
    folder: str | Path | None = None,
    resume: Literal["auto", "must", "never", "previous"] | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Run:
    """Train a model, and return the finished run.

    Works in scripts and in notebooks. The settings are those of the YAML files, as nested dicts or by their dotted keys::

        strop.train("grpo", model="Qwen/Qwen2.5-0.5B-Instruct", data=rows, reward=correct, grpo={"max_num_steps": 20})
        strop.train("dpo", model=..., data="pairs.jsonl", **{"policy.optimizer.kwargs.lr": 1e-6})

    Args:
        algorithm: The name of an algorithm or of a kind of run, such as grpo, dapo, sft or kto; ``file.py:Class``; or an algorithm.
        model: A hub name or a folder (``policy.model_name``).
        data: What to train on: a file, the name of a dataset, a list of dicts, a ``datasets.Dataset``, or the keys of ``data.train``.
        validation: What to validate on, in the same forms.
        reward: A function ``(task, rollout) -> float | bool``, or ``(task, rollouts) -> list[float]`` for all completions of a prompt;
            several as a list or by name; or ``file.py:function``.
        environment: An ``Environment`` class, the name of one, or ``file.py:Class``.
        folder: Where logs and checkpoints go. A folder that holds this run continues it; one with another run is refused. Default: a new
            folder in ``results``, or with ``run_name`` the folders of that name.
        resume: What to do with a run in the folder (``checkpointing.resume``).
        config: A YAML file with further settings, which the other arguments override.
        settings: Any key of the configuration.

    Raises ConfigError for settings that cannot work, before anything is loaded, ResumeError if the folder holds another run, and the
    errors of the run. RunStopped if a stop signal ends it.
    """
    from strop.algorithm_factory import name_options
    from strop.config import TRAINING_RUNS, load_config
    from strop.runs.dry_run.examine import examine_loaded
    from strop.runs.run_algorithm import find_section
    from strop.runs.train import train_as_configured

    name, options = (algorithm, {}) if isinstance(algorithm, str) else name_options(algorithm)
    section = find_section(name)
    own = {} if name in TRAINING_RUNS else {"algorithm": {"name": name}}
    given = [own, {"algorithm": options}, _folder_settings(folder, name, config, settings), *task_settings(reward, environment)]
    given += [{"policy": {"model_name": str(model)}}] if model is not None else []
    given += [{"checkpointing": {"resume": resume}}] if resume is not None else []
    scored = reward is not None or environment is not None
    data = {} if data is None and environment is not None else data  # an environment may provide its own tasks
    given += [data_settings("train", data, scored), data_settings("validation", validation, scored), nest(settings)]
    loaded: LoadedConfig[TrainingRunConfig] = load_config(config, root=TRAINING_RUNS[section], values=merge(given))
    warn(loaded)
    prepared = _with_objects(loaded.config, data, validation, reward)
    if scored:
        _check_scored(prepared)
    examine_loaded(replace(loaded, config=prepared), data=False)
    run_anywhere(train_as_configured(prepared))
    return Run(prepared.logger.log_dir)


def evaluate(
    model: str | Path | Run | None = None,
    *,
    data: Data | Sequence[str] | None = None,
    reward: Reward | None = None,
    environment: str | type[Environment[Any]] | None = None,
    samples: int | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Evaluation:
    """Evaluate a model, and return its scores and samples.

    A run, or a checkpoint of one, is evaluated on the run's validation data, as ``strop eval RUN_OR_CHECKPOINT`` does; the other
    arguments replace parts of it. A model that belongs to no run needs data and a reward or environment.

    Args:
        model: A ``Run`` or its folder, a checkpoint, a Hugging Face folder, or a hub name. The newest checkpoint of a run is evaluated.
        data, reward, environment, config, settings: As for ``train``; ``data`` are the tasks. Several names of datasets are several sets,
            with their own metrics: ``data=["AIME2025", "math500"]``.
        samples: How many samples of each task (``eval.num_tests_per_prompt``).

    Raises ConfigError for settings that cannot work, and the errors of the evaluation.
    """
    evaluation: Evaluation = plugins.load("functions", "evaluate")(
        model, data=data, reward=reward, environment=environment, samples=samples, config=config, settings=settings
    )
    return evaluation


def compare(
    a: str | Path | Run | Evaluation,
    b: str | Path | Run | Evaluation,
    *,
    metric: str = "accuracy",
    margin: float | None = None,
    level: float = 0.95,
    step: int | None = None,
    config: str | Path | None = None,
    **settings: Any,
) -> Any:
    """Return the ``Comparison`` (docs/compare.md) of ``b`` with ``a`` on the same tasks, as ``strop compare`` makes it.

    Args:
        a, b: What ``evaluate`` returned; an evaluation's file or folder; or a run, a checkpoint or a model, whose stored evaluations are
            used, or which is evaluated with the validation settings of ``a``'s run.
        metric: accuracy, avg@n, pass@k, cons@k, maj@k, reward, avg_length, truncated or errors.
        margin: A difference that does not matter, in the units of the metric.
        level: The probability that an interval holds the true difference.
        step: Which checkpoint of runs; None is the newest.
        config, settings: As for ``evaluate``; if any is given, both sides are evaluated again.

    Raises ValueError for what cannot be compared, ConfigError for settings that cannot work, and the errors of an evaluation.
    """
    if isinstance(a, Evaluation) and isinstance(b, Evaluation):
        if not a.tasks or not b.tasks:
            raise ValueError("an evaluation on recorded data has a loss and no samples to compare")
        known = None if a.identity is None and b.identity is None else (a.identity, b.identity)
        compare_evaluations = plugins.load("functions", "compare_evaluations")
        return compare_evaluations(a.tasks, b.tasks, metric=metric, level=level, margin=margin, identities=known)
    if isinstance(a, Evaluation) or isinstance(b, Evaluation):
        raise ValueError("found an Evaluation and a name; evaluate both, or give both by name")
    first, second = (str(each.folder if isinstance(each, Run) else each) for each in (a, b))
    comparison: Coroutine[Any, Any, Any] = plugins.load("functions", "compare")(
        first,
        second,
        step=step,
        config=None if config is None else Path(config),
        values=nest(settings),
        metric=metric,
        level=level,
        margin=margin,
    )
    return run_anywhere(comparison)


# --- settings -------------------------------------------------------------------------------------------------------------


def nest(settings: Settings) -> dict[str, Any]:
    """Return settings with dotted keys as nested dicts."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        tree = merge([tree, value])
    return tree


def merge(trees: Sequence[Settings]) -> dict[str, Any]:
    from strop.config.source.yaml_source import merge_sections

    merged: dict[str, Any] = {}
    for tree in trees:
        merged = merge_sections(merged, tree)
    return merged


def _folder_settings(folder: str | Path | None, name: str, config: object, settings: Settings) -> Settings:
    """Return settings for the folder. Without one, use a new folder: a changed notebook cell must not continue the previous run."""
    given = nest(settings)
    named = (
        given.get("run_name") is not None
        or "log_dir" in given.get("logger", {})
        or "checkpoint_dir" in given.get("checkpointing", {})
    )
    if folder is None and (config is not None or named):
        return {}
    path = Path("results") / f"{name.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}" if folder is None else Path(folder)
    while folder is None and path.exists():
        path = path.with_name(f"{path.name}-again")
    return {"logger": {"log_dir": str(path)}, "checkpointing": {"checkpoint_dir": str(path / "checkpoints")}}


def task_settings(reward: Reward | None, environment: str | type[Environment[Any]] | None) -> list[Settings]:
    """Return the environment settings of the tasks. Functions replace their names after the configuration is loaded."""
    if reward is not None and environment is not None:
        raise ValueError("found a reward and an environment, which has its own rewards; give one of them")
    if reward is not None:
        return [{"env": {ALIAS: {"reward": "python:reward"}}}]
    if environment is not None:
        name = environment if isinstance(environment, str) else f"{environment.__module__}:{environment.__qualname__}"
        return [{"env": {ALIAS: {"type": name}}}]
    return []


def data_settings(part: str | None, data: Data | Sequence[str] | None, scored: bool) -> Settings:
    """Return the keys of a data entry. ``scored``: it is scored by the call's reward or environment."""
    if data is None:
        return {}
    is_rows(data)
    names = _list_names(data)
    entry: Any = dict(data) if isinstance(data, Mapping) else {"dataset_name": str(data)} if isinstance(data, str | Path) else {}
    entry = {"dataset_name": names} if names else entry
    entry = {"env_name": ALIAS, **entry} if scored else entry
    return {"data": entry if part is None else {part: entry}}


def _check_scored(config: TrainingRunConfig) -> None:
    """Raise ValueError if no training data uses the call's reward or environment."""
    from strop.config.schema.run_config import RolloutRunConfig, environment_alias

    assert isinstance(config, RolloutRunConfig)
    names = {environment_alias(config, entry) for entry in config.data.train}
    if ALIAS not in names:
        raise ValueError(
            f"the reward would not be used: data.train.env_name is {', '.join(sorted(map(str, names)))} in the file; give data too, or "
            f'"data.train.env_name": "{ALIAS}"'
        )


def is_rows(data: Data | Sequence[str] | None) -> bool:
    """Whether data is in memory. Raises DataError for an unsupported object."""
    splits = type(data).__name__ in ("DatasetDict", "IterableDatasetDict")  # mappings, and no settings
    if data is None or (isinstance(data, str | Path | Mapping) and not splits) or _list_names(data):
        return False
    check_rows(data, streamed=True)
    return True


def _list_names(data: Data | Sequence[str] | None) -> list[str]:
    """Return the names of several data sets; empty for anything else."""
    listed = list(data) if isinstance(data, list | tuple) else []
    return [str(name) for name in listed] if all(isinstance(name, str | Path) for name in listed) else []


def _with_objects(
    config: TrainingRunConfig, data: Data | None, validation: Data | None, reward: Reward | None
) -> TrainingRunConfig:
    """Put in-memory data and functions, which a file cannot hold, into a loaded configuration."""
    section = config.data
    if is_rows(data):
        section = replace(section, train=(section.train[0].with_rows(data),))
    if is_rows(validation):
        assert section.validation  # the entry that ``_data_settings`` made
        section = replace(section, validation=(section.validation[0].with_rows(validation),))
    changes: dict[str, Any] = {"data": section}
    if reward is not None:
        changes["env"] = with_reward(config.env, reward)  # type: ignore[attr-defined]
    return replace(config, **changes)


def with_reward(env: Mapping[str, EnvironmentConfig], reward: Reward | None) -> dict[str, EnvironmentConfig]:
    if reward is None:
        return dict(env)
    key = "reward" if callable(reward) or isinstance(reward, str) else "rewards"
    given: Any = [reward] if key == "reward" else reward.values() if isinstance(reward, Mapping) else reward
    for each in given:
        if callable(each):
            remember_code(each)
    options = {name: value for name, value in env[ALIAS].options.items() if name != "reward"}
    return {**env, ALIAS: replace(env[ALIAS], options={**options, key: reward})}


# --- running --------------------------------------------------------------------------------------------------------------


def warn(loaded: LoadedConfig[Any]) -> None:
    for problem in loaded.warnings:
        warnings.warn(str(problem), stacklevel=3)


def run_anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion, in another thread if an event loop is already running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_coroutine(work)
    value: T = _Background(work).result()
    return value


class _Background:
    """A coroutine in the event loop of another thread. An interrupt cancels it, and is raised again once it has ended."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._outcome: Future[Any] = Future()
        self._cancel: Callable[[], object] = lambda: None
        threading.Thread(target=self._target, name="strop-run").start()

    def _target(self) -> None:
        try:
            self._outcome.set_result(run_coroutine(self._main()))
        except BaseException as error:
            self._outcome.set_exception(error)

    async def _main(self) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        return await self._work

    def result(self) -> Any:
        try:
            return self._outcome.result()
        except KeyboardInterrupt:
            self._cancel()
            wait([self._outcome])  # the run closes its engines first
            raise
