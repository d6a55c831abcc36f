"""Checks that optimizers and schedulers accept their configured arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strop.config import TrainingRunConfig
from strop.config.schema.run_config import list_trained_models
from strop.learner.model_config import ModelConfig
from strop.learner.torch.optimizer_config import KNOWN_OPTIMIZERS, KNOWN_SCHEDULERS, OptimizerConfig, ScheduleStageConfig
from strop.learner.torch.schedules import make_schedule
from strop.problems import Problem


def find_optimizer_problems(config: TrainingRunConfig) -> Iterator[Problem]:
    """Yield what a run's optimizers and schedulers reject. If their arguments are not known here, one is created for a single
    weight.
    """
    for key, model in list_trained_models(config):
        yield from _find_problems(key, model)


def _find_problems(key: str, model: ModelConfig) -> Iterator[Problem]:
    scheduler = model.scheduler
    named = [stage for stage in scheduler.stages if "." not in stage.name] if scheduler is not None else []
    try:
        for stage in named:
            make_schedule(stage.name, stage.kwargs, total_steps=1_000_000, section=key)
    except ValueError as error:
        yield Problem("", str(error))
        return
    if _is_known(model.optimizer) and all(map(_is_known_stage, scheduler.stages if scheduler is not None else ())):
        return
    import torch

    from strop.learner.torch.optimizer import make_optimizer, make_scheduler

    try:
        alone = replace(model.optimizer, groups=(), no_decay=())
        optimizer = make_optimizer(alone, [("weight", torch.nn.Parameter(torch.zeros(2, 2)))], section=key)
        make_scheduler(scheduler, optimizer, total_steps=1_000_000, section=key)
    except (ValueError, TypeError) as error:
        message = str(error)
        yield Problem("" if message.startswith(key) else f"{key}.optimizer", message)


def _is_known_stage(stage: ScheduleStageConfig) -> bool:
    """Return whether a schedule was checked here, or is a torch scheduler with known arguments within their ranges."""
    known = KNOWN_SCHEDULERS.get(stage.name)
    if "." not in stage.name or known is None:
        return known is None and "." not in stage.name
    required = {"T_max"} & set(known) <= set(stage.kwargs)
    return required and all(name in known and _is_in(value, *known[name]) for name, value in stage.kwargs.items())


def _is_in(value: object, low: float, high: float) -> bool:
    is_number = isinstance(value, int if isinstance(low, int) else int | float) and not isinstance(value, bool)
    return is_number and low <= value <= high  # type: ignore[operator]  # a number


def _is_known(optimizer: OptimizerConfig) -> bool:
    """Return whether a check of the section has covered all arguments."""
    return set(optimizer.kwargs) <= KNOWN_OPTIMIZERS.get(optimizer.name, frozenset())
