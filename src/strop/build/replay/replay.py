"""Replay a step as it was, and under other settings, and compare the two."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from strop.build.replay.replay_plan import ReplayPlan, Weights, plan_replay
from strop.build.replay.replayed_run import open_replayed_run
from strop.build.replay.replayed_step import MovedRollout, ReplayedStep, replay_step
from strop.safety.remote_code import trust_remote_code
from strop.storage.atomic_file import atomic_write
from strop.storage.json_values import clean_json

REPLAYS_FOLDER = "replays"  # in the log folder of the run
LISTED = 10  # rollouts that moved most


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """How the metrics of the step as it was compare with those that the run logged."""

    compared: int
    different: Mapping[str, tuple[float, float]]  # name -> (logged, replayed)
    not_compared: Sequence[str]  # logged by the run and not computed by a replay: times, validation, weights sent


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """A step under some settings."""

    loss: float | None
    grad_norm: float | None
    tokens: int  # that count in the loss
    clipped_tokens: int | None
    metrics: Mapping[str, float]
    moved_most: Sequence[MovedRollout]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a replay found."""

    run: str  # its log folder
    step: int
    weights: str  # with which the step begins: step_N, or the initial model
    exact: bool  # whether these are the weights that it began with
    overrides: Sequence[str]
    reproduction: Reproduction
    as_it_was: StepOutcome
    changed: StepOutcome | None = None  # with the overrides; None without any
    gradient_cosine: float | None = None  # of the gradients of the first optimizer step, which begins with the same weights
    change_cosine: float | None = None  # of what the whole step changes in the weights
    change_ratio: float | None = None  # norm of that change with the overrides / as it was
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON holds it; numbers that are not finite are None."""
        found: dict[str, Any] = clean_json(
            {**asdict(self), "gradient_degrees": _degrees(self.gradient_cosine), "change_degrees": _degrees(self.change_cosine)}
        )
        return found


async def replay(folder: Path, step: int, overrides: Sequence[str] = (), *, weights: Weights = "exact") -> ReplayResult:
    """Replay a step of the run in ``folder``. Nothing of the run is changed.

    Raises ReplayError, which says which steps can be replayed, ConfigError, CheckpointError, ModelNotFound.
    """
    plan = plan_replay(folder, step, weights)
    configured = plan.load(())
    changed_config = plan.load(overrides) if overrides else None  # mistakes are found before a model is loaded
    with trust_remote_code(configured[0].policy.trust_remote_code):
        async with open_replayed_run(plan, *configured) as (run, stored):
            base = await replay_step(run, stored)
        changed = None
        if changed_config is not None:
            async with open_replayed_run(plan, *changed_config) as (run, stored):
                changed = await replay_step(run, stored)
    return _compare(plan, overrides, base, changed)


def store_replay(folder: Path, result: ReplayResult) -> Path:
    """Write a result to the log folder of its run, beside those of earlier replays, and return the file."""
    target = folder / REPLAYS_FOLDER
    target.mkdir(exist_ok=True)
    number = 1 + max((int(path.stem.rpartition("_")[2]) for path in target.glob("step_*_*.json")), default=0)
    path = target / f"step_{result.step:06d}_{number:03d}.json"
    with atomic_write(path) as draft:
        draft.write_text(json.dumps(result.to_dict(), allow_nan=False), encoding="utf-8")
    return path


def _compare(plan: ReplayPlan, overrides: Sequence[str], base: ReplayedStep, changed: ReplayedStep | None) -> ReplayResult:
    known = {name: value for name, value in plan.logged.items() if name in base.metrics}
    different = {name: (value, base.metrics[name]) for name, value in known.items() if not _same(value, base.metrics[name])}
    return ReplayResult(
        run=str(plan.folder),
        step=plan.step,
        weights=plan.source,
        exact=plan.exact,
        overrides=tuple(overrides),
        reproduction=Reproduction(
            compared=len(known), different=different, not_compared=sorted(set(plan.logged) - set(base.metrics))
        ),
        as_it_was=_summarize(base),
        changed=None if changed is None else _summarize(changed),
        gradient_cosine=None if changed is None else _cosine(base.gradient, changed.gradient),
        change_cosine=None if changed is None else _cosine(base.change, changed.change),
        change_ratio=None if changed is None else _ratio(changed.change, base.change),
    )


def _summarize(step: ReplayedStep) -> StepOutcome:
    return StepOutcome(
        loss=step.metrics.get("train/loss"),
        grad_norm=step.metrics.get("train/grad_norm"),
        tokens=step.tokens,
        clipped_tokens=step.clipped_tokens,
        metrics=step.metrics,
        moved_most=sorted(step.rollouts, key=lambda rollout: -abs(rollout.moved))[:LISTED],
    )


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _cosine(first: Tensor, second: Tensor) -> float | None:
    """Return the cosine of the angle between two vectors; None if one is zero, or they are of other parameters."""
    if first.shape != second.shape:
        return None
    product = float(first.double().norm() * second.double().norm())
    return None if not product else max(-1.0, min(1.0, float(first.double() @ second.double()) / product))


def _ratio(first: Tensor, second: Tensor) -> float | None:
    norm = float(second.double().norm())
    return float(first.double().norm()) / norm if norm else None


def _degrees(cosine: float | None) -> float | None:
    return None if cosine is None else math.degrees(math.acos(cosine))
