"""A trained step, as the loop passes it to listeners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.base import LossFn, Outputs
from strop.monitoring.rollout_store.rollout_record import DropReason
from strop.monitoring.trackers.base import Tracker
from strop.trainer.step_timer import StepTimer
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerPass:
    """A forward and backward pass of a learner over a mini-batch."""

    learner: str  # that its loss is for: "policy" for every policy
    policy: int = 0  # number of the policy (``strop.data.rollout_selector``)
    index: Tensor  # [n] int64: indices of the predicted tokens that it trained on
    batch: Batch  # the mini-batch as the loss read it
    outputs: Outputs
    loss: LossFn


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateResult:
    """What the update of a step computed."""

    old_outputs: Outputs  # the policy's outputs for the batch, before the first optimizer step
    metrics: Mapping[str, float]
    passes: Sequence[OptimizerPass] = ()  # in order


@dataclass(frozen=True, kw_only=True, eq=False)
class StepView:
    """A step after its weights were published."""

    step: int
    groups: Sequence[Group]  # trained on
    dropped: Sequence[tuple[Group, DropReason]]
    batch: Batch
    result: UpdateResult
    metrics: Mapping[str, float]  # metrics of the loop and of the listeners called before this one
    timer: StepTimer
    tracker: Tracker  # for notes
