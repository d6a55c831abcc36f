"""Optimizers and schedules by name, as a configuration spells them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR


def make_optimizer(name: str, parameters: Sequence[nn.Parameter], kwargs: Mapping[str, Any]) -> Optimizer:
    """``torch.optim.AdamW`` and its like by dotted name. Raises ValueError naming the argument it does not take.

    Where the optimizer has a fused form and the configuration does not choose, the fused one is used: it passes over the weights once.
    """
    factory = _resolve(name, "policy.optimizer.name", Optimizer)
    known = inspect.signature(factory).parameters
    for key in kwargs:
        if key not in known:
            raise ValueError(f"policy.optimizer.kwargs.{key}: {name} takes {sorted(set(known) - {'params'})}")
    options = dict(kwargs)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if "fused" in known and options.get("fused") is None and options.get("foreach") is None:
        options["fused"] = all(parameter.dtype in (torch.float32, torch.bfloat16, torch.float64) for parameter in parameters)
    optimizer: Optimizer = factory(parameters, **options)
    return optimizer


def make_scheduler(schedule: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> LRScheduler | None:
    """``[{name, kwargs}, ..., {milestones: [...]}]`` one after another, one entry alone, or none."""
    stages = [entry for entry in schedule if "name" in entry]
    milestones = [step for entry in schedule if "milestones" in entry for step in entry["milestones"]]
    if not stages:
        return None
    if len(milestones) != len(stages) - 1:
        raise ValueError(
            f"policy.scheduler: {len(stages)} stages need {len(stages) - 1} milestones between them; found {milestones}"
        )
    built = [_stage(entry["name"], entry.get("kwargs", {}), optimizer) for entry in stages]
    return built[0] if len(built) == 1 else SequentialLR(optimizer, built, milestones)


def _stage(name: str, kwargs: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    factory = _resolve(name, "policy.scheduler.name", LRScheduler)
    known = inspect.signature(factory).parameters
    for key in kwargs:
        if key not in known:
            raise ValueError(f"policy.scheduler.kwargs.{key}: {name} takes {sorted(set(known) - {'optimizer'})}")
    scheduler: LRScheduler = factory(optimizer, **kwargs)
    return scheduler


def _resolve(name: str, key: str, base: type) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{key}: {name!r} does not name a class ({error}); write it like torch.optim.AdamW") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"{key}: {name} is not a {base.__name__}")
    return found
