"""Checks everything that a configuration names before anything is loaded: algorithm, layout, models, data, environments and
optimizers.

``--dry-run`` prints the result, and a run refuses the same configurations. torch is imported last, and only for optimizers or
schedulers with unknown arguments.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.base_config import BaseConfig, KeyPath
from strop.checkpointing.saved_model import list_steps
from strop.config import EvalRunConfig, LoadedConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.cluster_checks import count_devices
from strop.config.schema.run_config import generation_section, iter_model_names
from strop.config.source.yaml_source import ConfigSource, get_at
from strop.environments.handle import EnvironmentHandle
from strop.models.rank_shards import find_shards
from strop.packages import are_assumed
from strop.problems import COMMAND_LINE, ConfigError, Problem
from strop.runs.dry_run.assumed_cluster import format_placement
from strop.runs.dry_run.examined_models import (
    find_conversation_problems,
    find_network_problems,
    find_optimizer_problems,
    find_size_problems,
    find_template_problems,
)
from strop.runs.local_device import find_folder_problems
from strop.runs.run_algorithm import make_run_algorithm
from strop.user_code import find_near_paths

log = logging.getLogger(__name__)

ADAPTERS_FILE = "adapter_config.json"


HUB_MODEL = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)


def find_model_problems(config: BaseConfig) -> Iterator[Problem]:
    """Yield a problem for each key that names a folder without a model."""
    reported: set[str] = set()
    for key, name in iter_model_names(config):
        if is_elsewhere(name):
            continue
        reason = explain_missing_model(name) or (None if isinstance(config, EvalRunConfig) else _explain_shards(name))
        if name not in reported and reason:
            reported.add(name)
            yield Problem(key, reason, "Set it to a folder with a model, or to OWNER/NAME of the hub.")


def list_models_elsewhere(config: BaseConfig) -> list[str]:
    """Return a note for each model in a folder that is assumed to exist on the run's machines."""
    return [
        f"{key}: {name} is not on this machine: it was not examined"
        for key, name in iter_model_names(config)
        if is_elsewhere(name)
    ]


def is_elsewhere(name: str) -> bool:
    return are_assumed() and Path(name).is_absolute() and not Path(name).exists()


def explain_missing_model(name: str) -> str | None:
    """Explain why a name does not refer to a model; None if it may."""
    try:
        path = Path(os.path.expanduser(name))
        if path.is_dir():
            return _explain_folder(path)
        if path.is_file():
            return f"{name:.300} is a file, and a model is a folder"
    except (OSError, ValueError, RuntimeError) as error:
        return f"{name!r:.300} cannot be the path of a model: {error!s:.300}"
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        where = "" if path.is_absolute() else f" in the working directory {Path.cwd()}"
        near = find_near_paths(path)
        return f"there is no folder {name:.300}{where}" + (f"; did you mean {near[0]}?" if near else "")
    if not HUB_MODEL.fullmatch(name):
        hint = "; ${oc.env:NAME} reads an environment variable" if "$" in name else ""
        return f"{name!r:.300} is neither a folder nor a name that the hub can have{hint}"
    return None


def _explain_folder(path: Path) -> str | None:
    if any(path.glob("*.gguf")) or (path / ADAPTERS_FILE).exists() or find_shards(path) is not None:
        return None
    file = path / "config.json"
    if not file.exists():
        steps = sorted(path.glob("step_*/policy/weights"))
        inside = f"; the weights of a run are in {steps[-1]}" if steps else ""
        return f"the folder {path} has no model (no config.json, no .gguf file){inside}"
    try:
        values = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return f"{file} cannot be read: {error!s:.300}"
    if not isinstance(values, dict) or not (values.get("model_type") or values.get("architectures")):
        return f"{file} names no model_type, so the folder is not a model's"
    return None


def _explain_shards(name: str) -> str | None:
    """Return how to convert a folder of checkpoint shards into a model; only an evaluation reads shards directly."""
    if find_shards(Path(name).expanduser()) is None:
        return None
    from strop.models.loading import ModelNotFound, locate_model  # imports Transformers

    try:
        locate_model(name)
    except ModelNotFound as error:
        return str(error).removeprefix("policy.model_name: ")
    return None


@dataclass(frozen=True)
class Examination:
    """The result of examining a valid configuration."""

    algorithm: Algorithm | None  # None: an evaluation
    notes: tuple[str, ...]  # what was found, and what was not examined


def examine_loaded(loaded: LoadedConfig[Any], *, data: bool = True) -> Examination:
    """Examine everything that a configuration names. Raises ConfigError with all problems and their file and line."""
    try:
        return examine(loaded.config, data=data)
    except ConfigError as error:
        raise ConfigError(locate_problems(error.problems, loaded.source)) from error


def examine(config: TrainingRunConfig | EvalRunConfig, *, data: bool = True) -> Examination:
    """Examine everything that a configuration names. Raises ConfigError with all problems.

    ``data``: also examine the first rows, the environments' options and the checkpoints, which a run reads itself before it loads
    a model.
    """
    problems: list[Problem] = []
    algorithm = None
    if not isinstance(config, EvalRunConfig):
        algorithm = _collect(problems, make_run_algorithm, config)
        _collect(problems, _place, config)
    if isinstance(config, RolloutRunConfig | EvalRunConfig):
        _collect(problems, _require_engine, config)
    found = list(find_model_problems(config))
    environments: Mapping[str, EnvironmentHandle[Any]] = {}
    notes: Sequence[str] = ()
    if data:
        from strop.runs.dry_run.examined_data import examine_data  # readers of all kinds of data, which a run does not need

        rows = examine_data(config)
        found, environments, notes = [*found, *rows.problems], rows.environments, rows.notes
    problems += [problem for problem in found if not any(problem.message in other.message for other in problems)]
    problems += find_template_problems(config)
    misfits, doubts = find_size_problems(config)
    problems += misfits
    if not problems and isinstance(config, RolloutRunConfig | EvalRunConfig):
        problems += find_conversation_problems(config, environments.values())
    folders: list[Problem] = []
    if not isinstance(config, EvalRunConfig):
        folders += find_folder_problems(config) if data else ()
    elsewhere = [*list_models_elsewhere(config), *(f"{each.key}: {each.message}" for each in folders)] if are_assumed() else []
    problems += [] if are_assumed() else folders
    if not problems and not isinstance(config, EvalRunConfig):
        problems += [*find_network_problems(config), *find_optimizer_problems(config)]
    if problems:
        raise ConfigError(problems)
    checkpoints = [] if isinstance(config, EvalRunConfig) or not data else _describe_checkpoints(config)
    if isinstance(config, RolloutRunConfig):
        for message in find_single_turns(environments, config.rollout_training.max_rollout_turns, config.section):
            log.warning("%s", message)
    return Examination(algorithm, (*elsewhere, *notes, *(" ".join(str(doubt).split()) for doubt in doubts), *checkpoints))


def find_single_turns(environments: Mapping[str, EnvironmentHandle[Any]], max_turns: int, section: str) -> Iterator[str]:
    """Yield which environments need more turns of the policy than an episode may have."""
    for name, environment in environments.items():
        if max_turns == 1 and environment.traits.responds:
            why, end = "answers the policy (respond)", "every episode ends after the policy's first turn"
            if environment.traits.episode_runner:
                why, end = "runs an agent", "every request of it after the first is refused"
            elif environment.traits.has_tools:
                why = "has tools"
            yield (
                f"env.{name}: {environment.traits.title} {why}, but {section}.max_rollout_turns is 1, so {end}; set "
                f"{section}.max_rollout_turns=N to allow N turns"
            )


def _collect(problems: list[Problem], check: Callable[[Any], Any], config: TrainingRunConfig | EvalRunConfig) -> Any:
    try:
        return check(config)
    except ValueError as error:
        problems.append(Problem("", str(error)))
        return None


def _place(config: TrainingRunConfig) -> None:
    """Raise PlacementError, ValueError for a layout that cannot fit any devices."""
    if count_devices(config).uses_ray:
        format_placement(config, on_cpu=True)


def _require_engine(config: TrainingRunConfig | EvalRunConfig) -> None:
    """Raise ValueError without the engine's library. Not a rule of the section: it may start another interpreter."""
    _, generation = generation_section(config)
    if generation.uses_engines:
        generation.engine_options.require_library()


def _describe_checkpoints(config: TrainingRunConfig) -> list[str]:
    """Describe what a run would do with its existing checkpoints. Raises ConfigError for a run that it cannot continue."""
    saving = config.checkpointing
    folder = Path(saving.checkpoint_dir)
    try:
        steps = list_steps(folder) if saving.enabled else []
    except (OSError, ValueError) as error:
        message = f"{str(folder)!r:.300} cannot be a folder: {error!s:.300}"
        raise ConfigError([Problem("checkpointing.checkpoint_dir", message, "Set another.")]) from error
    if not steps and saving.resume != "must":
        return []
    if saving.resume == "never":
        return [f"{folder} holds checkpoints up to step {steps[-1]}, and checkpointing.resume is never: they move to previous_N"]
    from strop.runs.run_folders import plan_resume  # checkpoints need torch

    try:
        plan = plan_resume(config)
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from error
    if plan.nothing_to_do is not None:
        return [plan.nothing_to_do]
    changed = f", with {', '.join(map(str, plan.changes))}" if plan.changes else ""
    return [f"the run continues from {plan.checkpoint}{changed}"]


SUGGESTED = re.compile(r"; (?:did you mean|there are[: ])")  # the text after this lists suggestions, not actual values
KEY_FIRST = re.compile(r"(?P<key>[a-z_]\w*(?:\.[\w-]+)+): (?P<rest>.+)", re.DOTALL)


def locate_problems(problems: Sequence[Problem], source: ConfigSource) -> list[Problem]:
    """Return problems with the key that each concerns, and its location, if the configuration sets it."""
    return [problem if problem.origin else _locate(problem, source) for problem in problems]


def _locate(problem: Problem, source: ConfigSource) -> Problem:
    if not problem.key and (match := KEY_FIRST.fullmatch(problem.message)):
        problem = replace(problem, key=match["key"], message=match["rest"])
    path = tuple(problem.key.split(".")) if problem.key else ()
    inner = [key for key in source.origins if key[: len(path)] == path and len(key) > len(path)]
    if path not in source.origins or isinstance(get_at(source.values, path), dict | list):
        path = next(_find_named(problem.message, inner, source), path)
    return replace(problem, key=".".join(path), origin=source.find_origin(path))


def _find_named(message: str, keys: Sequence[KeyPath], source: ConfigSource) -> Iterator[KeyPath]:
    """Yield the set keys named by a message: by the whole key, by its name or by its value; most likely first."""
    message = SUGGESTED.split(message, maxsplit=1)[0]
    keys = sorted(keys, key=lambda key: source.origins[key].source != COMMAND_LINE)  # stable: otherwise in file order
    yield from (key for key in keys if len(key) > 1 and _occurs(".".join(key), message))
    yield from (key for key in keys if _occurs(f"'{key[-1]}'", message) or _occurs(f"option {key[-1]}", message))
    yield from (key for key in keys if "_" in key[-1] and _occurs(key[-1], message))
    values = {key: _find_value(get_at(source.values, key), message) for key in keys}
    yield from sorted((key for key in keys if values[key] >= 0), key=lambda key: values[key])


def _find_value(value: Any, message: str) -> int:
    """Return where a message first names a value, or each part of file.py:name; -1 if it does not."""
    if not isinstance(value, str) or len(value) < 3:
        return -1
    found = [_find(part, message) for part in value.split(":") if part]
    return found[0] if found and min(found) >= 0 else -1


def _occurs(text: str, message: str) -> bool:
    return _find(text, message) >= 0


def _find(text: str, message: str) -> int:
    found = re.search(rf"(?<![\w.]){re.escape(text)}(?![\w]|\.\w)", message)
    return found.start() if found else -1
