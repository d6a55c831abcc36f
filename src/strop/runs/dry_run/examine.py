"""Checks everything that a configuration names before anything is loaded: algorithm, layout, models, data, environments and
optimizers.

``--dry-run`` prints the result, and a run refuses the same configurations. torch is imported last, and only for optimizers or
schedulers with unknown arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm
from strop.checkpointing.step_folders import list_steps
from strop.config import EvalRunConfig, LoadedConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.checks.device_counts import count_devices
from strop.config.load.located import locate_problems
from strop.config.schema.run_config import generation_section
from strop.environments.handle import EnvironmentHandle
from strop.packages import are_assumed
from strop.problems import ConfigError, Problem
from strop.runs.algorithm.run_algorithm import make_run_algorithm
from strop.runs.cluster.device_plan import format_placement
from strop.runs.contents.examined_sizes import find_size_problems
from strop.runs.dry_run.examined_folders import find_folder_problems
from strop.runs.dry_run.examined_models import find_model_problems, list_models_elsewhere
from strop.runs.dry_run.examined_networks import find_network_problems
from strop.runs.dry_run.examined_optimizers import find_optimizer_problems
from strop.runs.dry_run.examined_templates import find_conversation_problems, find_template_problems

log = logging.getLogger(__name__)


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
            if environment.traits.is_agent:
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
    from strop.runs.resume.resume_plan import plan_resume  # checkpoints need torch

    try:
        plan = plan_resume(config)
    except ValueError as error:
        raise ConfigError([Problem("", str(error))]) from error
    if plan.nothing_to_do is not None:
        return [plan.nothing_to_do]
    changed = f", with {', '.join(map(str, plan.changes))}" if plan.changes else ""
    return [f"the run continues from {plan.checkpoint}{changed}"]
