"""Optimizers and learning-rate schedules by their configured names, and what a restored state must not overwrite.

An optimizer is named by its class, of torch or another package, and may have parameter groups with their own learning rate or weight
decay. A schedule is one of ``strop.learner.torch.schedules``, or a class of torch.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, SequentialLR

from strop.learner.torch.optimizer_config import OptimizerConfig, OptimizerGroupConfig, SchedulerConfig
from strop.learner.torch.schedules import make_lr_scheduler, make_schedule

NamedParameters = Sequence[tuple[str, nn.Parameter]]

# Optional packages with optimizers; if one is missing, the error names it.
OPTIONAL_PACKAGES = ("bitsandbytes", "torchao")


def make_optimizer(
    config: OptimizerConfig, named_parameters: NamedParameters, *, section: str = "policy", elsewhere: NamedParameters = ()
) -> Optimizer:
    """Create an optimizer by dotted name, such as ``torch.optim.AdamW``. Raises ValueError for an argument that it does not take.

    Defaults to the fused implementation where the optimizer has one: it reads the weights once. The parameters ``elsewhere`` are
    not updated here, but take part in forming groups, so that groups are the same on all pipeline stages.
    """
    factory = _import_class(config.name, f"{section}.optimizer.name", Optimizer)
    known = inspect.signature(factory).parameters
    _check_arguments(config.kwargs, known, "params", f"{section}.optimizer.kwargs", config.name)
    grouped = make_parameter_groups(
        named_parameters,
        config.groups,
        config.no_decay,
        decay_vectors=config.decay_vectors,
        section=section,
        elsewhere=elsewhere,
    )
    for options in grouped:
        _check_arguments(options.keys() - {"params", "param_names"}, known, "params", f"{section}.optimizer.groups", config.name)
    arguments = dict(config.kwargs)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    if "fused" in known and arguments.get("fused") is None and arguments.get("foreach") is None:
        dtypes = (torch.float32, torch.bfloat16, torch.float64)
        arguments["fused"] = all(parameter.dtype in dtypes for _, parameter in named_parameters)
    optimizer: Optimizer = factory(grouped, **arguments)
    return optimizer


def make_parameter_groups(
    named_parameters: NamedParameters,
    groups: Sequence[OptimizerGroupConfig],
    no_decay: Sequence[str],
    *,
    decay_vectors: bool = True,
    section: str = "policy",
    elsewhere: NamedParameters = (),
) -> list[dict[str, Any]]:
    """Return parameter groups as torch takes them: first the parameters without a group, then each group in order.

    A parameter belongs to the first group that matches it. Parameters that match ``no_decay`` have no weight decay, even if
    their group sets one; neither do one-dimensional parameters without ``decay_vectors``. Raises ValueError for a pattern
    without a match, and for a group whose parameters all belong to earlier groups.
    """
    names = [name for name, _ in (*named_parameters, *elsewhere)]
    _check_patterns(no_decay, names, f"{section}.optimizer.no_decay")
    for index, group in enumerate(groups):
        _check_patterns(group.match, names, f"{section}.optimizer.groups.{index}.match")
    buckets: dict[tuple[int, bool], list[tuple[str, nn.Parameter]]] = {}
    own = dict(named_parameters)
    for name, parameter in (*named_parameters, *elsewhere):
        index = next((index for index, group in enumerate(groups) if matches_any(name, group.match)), -1)
        exempt = matches_any(name, no_decay) or (parameter.ndim < 2 and not decay_vectors)
        buckets.setdefault((index, exempt), []).extend([(name, parameter)] if name in own else [])
    for index, group in enumerate(groups):
        if not {(index, False), (index, True)} & buckets.keys():
            raise ValueError(
                f"{section}.optimizer.groups.{index}: earlier groups contain every parameter matching {list(group.match)}; move this "
                "group before them, or remove it"
            )
    return [
        {
            "params": [parameter for _, parameter in members],
            "param_names": [name for name, _ in members],
            **(_group_options(groups[index]) if index >= 0 else {}),
            **({"weight_decay": 0.0} if exempt else {}),
        }
        for (index, exempt), members in sorted(buckets.items(), key=lambda item: item[0])
    ]


def _group_options(group: OptimizerGroupConfig) -> dict[str, float]:
    options = {"lr": group.lr, "weight_decay": group.weight_decay}
    return {key: value for key, value in options.items() if value is not None}


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name contains one of the patterns; a pattern with ``*``, ``?`` or ``[`` must match the whole name."""
    return any(
        fnmatchcase(name, pattern) if any(wildcard in pattern for wildcard in "*?[") else pattern in name for pattern in patterns
    )


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], configured: Hyperparameters | None = None) -> None:
    """Restore a saved state, with the hyperparameters of ``configured``. Raises ValueError if it has other parameters or groups."""
    saved, current = state["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, current)]
    named = all("param_names" in group for group in (*saved, *current))
    if sizes[0] != sizes[1] or (named and [g["param_names"] for g in saved] != [g["param_names"] for g in current]):
        raise ValueError(
            f"the optimizer state was saved with groups of {sizes[0]} parameters, and this run has groups of {sizes[1]}"
            + (" with other names" if sizes[0] == sizes[1] else "")
            + "; set optimizer.no_decay and optimizer.groups as they were"
        )
    optimizer.load_state_dict(dict(state) if configured is None else configured.replace_in(state))


def make_scheduler(
    config: SchedulerConfig | None, optimizer: Optimizer, *, total_steps: int | None = None, section: str = "policy"
) -> LRScheduler | None:
    """Create the scheduler of one or several stages in sequence; None without a configuration.

    ``total_steps`` is the run's number of steps of the schedule, or None if unknown. A named schedule without its own ``total_steps`` ends
    there, or at the milestone where the next stage begins.
    """
    if config is None:
        return None
    milestones = list(config.milestones)
    if total_steps is not None and milestones and milestones[-1] >= total_steps:
        total_steps = None  # the last stage begins after the run has ended
    lengths = [
        None if end is None else end - begin for begin, end in zip([0, *milestones], [*milestones, total_steps], strict=True)
    ]
    schedulers = [
        _make_stage(stage.name, stage.kwargs, optimizer, length, section)
        for stage, length in zip(config.stages, lengths, strict=True)
    ]
    return schedulers[0] if len(schedulers) == 1 else SequentialLR(optimizer, schedulers, milestones)


def _make_stage(name: str, kwargs: Mapping[str, Any], optimizer: Optimizer, length: int | None, section: str) -> LRScheduler:
    if "." not in name:
        return make_lr_scheduler(make_schedule(name, kwargs, total_steps=length, section=section), optimizer)
    factory = _import_class(name, f"{section}.scheduler.name", LRScheduler)
    _check_arguments(kwargs, inspect.signature(factory).parameters, "optimizer", f"{section}.scheduler.kwargs", name)
    scheduler: LRScheduler = factory(optimizer, **kwargs)
    return scheduler


def _check_arguments(arguments: Any, known: Mapping[str, Any], first: str, key: str, name: str) -> None:
    """Raises ValueError for an argument that ``name`` does not take, and for ``first``, which Strop passes."""
    for argument in sorted(arguments):
        if argument not in known or argument == first:
            raise ValueError(f"{key}.{argument}: {name} takes {sorted(set(known) - {first})}")


def _check_patterns(patterns: Sequence[str], names: Sequence[str], key: str) -> None:
    for pattern in patterns:
        if not any(matches_any(name, [pattern]) for name in names):
            raise ValueError(
                f"{key}: {pattern!r} matches none of the {len(names)} trained parameters, such as "
                f"{', '.join(names[:3])}; correct it, or remove it"
            )


def _import_class(name: str, key: str, base: type) -> Any:
    module, _, attribute = name.rpartition(".")
    package = module.partition(".")[0]
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        if package in OPTIONAL_PACKAGES and getattr(error, "name", None) == package:
            raise ValueError(
                f"{key}: {name} needs the package {package}, which is not installed; run pip install {package}"
            ) from error
        raise ValueError(f"{key}: {name!r} does not name a class ({error}); write it like torch.optim.AdamW") from error
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"{key}: {name} is not a {base.__name__}")
    return cls


@dataclass(frozen=True, eq=False)
class Hyperparameters:
    """Options of each parameter group (learning rate, weight decay, betas, ...) and the schedule, before the first step.

    A saved state has the hyperparameters of the run that saved it; a resumed run uses its own configuration.
    """

    groups: list[dict[str, Any]]
    schedule: Mapping[str, Any] | None

    @classmethod
    def of(cls, optimizer: Optimizer, scheduler: LRScheduler | None) -> Hyperparameters:
        """Copy the hyperparameters of an optimizer and a scheduler before their first step."""
        options = {*inspect.signature(type(optimizer)).parameters, "initial_lr"} - {"params"}  # other keys are state
        groups = [{key: value for key, value in group.items() if key in options} for group in optimizer.param_groups]
        return cls(copy.deepcopy(groups), None if scheduler is None else copy.deepcopy(scheduler.state_dict()))

    def replace_in(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state of the optimizer with these options in its groups."""
        groups = [{**saved, **own} for saved, own in zip(state["param_groups"], copy.deepcopy(self.groups), strict=True)]
        return {**state, "param_groups": groups}

    def advance(self, scheduler: LRScheduler, steps: int) -> None:
        """Set the scheduler and its optimizer to their state after ``steps`` steps, as if this schedule had been used from the
        start.

        The groups of the optimizer must have these options.
        """
        assert self.schedule is not None
        scheduler.load_state_dict(dict(copy.deepcopy(self.schedule)))
        for group, own in zip(scheduler.optimizer.param_groups, self.groups, strict=True):
            group["lr"] = copy.deepcopy(own["lr"])
        with warnings.catch_warnings(action="ignore"):  # no optimizer step precedes these
            for _ in range(steps):
                scheduler.step()


def count_schedule_steps(schedule: Mapping[str, Any] | None, optimizer: Mapping[str, Any]) -> int:
    """Return the number of steps of a saved schedule; without one, the number counted by the optimizer, if it does."""
    if schedule is not None:
        return int(schedule["last_epoch"])
    return max((int(values["step"]) for values in optimizer["state"].values() if "step" in values), default=0)


@dataclass(frozen=True)
class ScheduleUnit:
    """The unit of a schedule step: a pass over a batch (``batch``), or an ``optimizer_step``, of which a pass makes several."""

    name: Literal["batch", "optimizer_step"] = "optimizer_step"
    steps_per_batch: int = 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps between two steps of the schedule."""
        return self.steps_per_batch if self.name == "batch" else 1

    def count_steps(self, optimizer_steps: int) -> int:
        """Return the number of schedule steps in this many optimizer steps."""
        return optimizer_steps // self.optimizer_steps

    def convert(self, steps: int, saved: Mapping[str, Any] | None) -> int:
        """Convert ``steps``, counted in the unit of ``saved`` (the ``state_dict`` of another one), to this unit.

        Without ``saved`` they are optimizer steps. Batches stay batches even if the number of optimizer steps per batch has
        changed.
        """
        other = ScheduleUnit(**saved) if saved is not None else ScheduleUnit()
        return steps if other.name == self.name else self.count_steps(steps * other.optimizer_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "steps_per_batch": self.steps_per_batch}
