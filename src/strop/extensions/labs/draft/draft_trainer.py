"""Trains the draft head of a policy from the policy's own passes (``policy.draft``), with its own optimizer and schedule.

    draft/         in a checkpoint: the head as vLLM and SGLang load it, and
    draft/training.pt, the state of its training

The policy's pass is read, never changed: its loss, gradient and step are those without a head. The head has the policy's kind of
optimizer and schedule, and is clipped by itself, so that its gradient takes nothing of the policy's norm (as in NeMo-RL).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from strop import metrics
from strop.extensions.labs.draft.draft_pass import DraftPass
from strop.extensions.labs.draft.drafted_policy import DraftedPolicy
from strop.extensions.labs.draft.eagle_files import load_head_weights
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.extensions.labs.draft.state_capture import StateCapture
from strop.learner.torch.hyperparameters import Hyperparameters
from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.optimizer import make_optimizer, make_scheduler
from strop.learner.torch.optimizer_config import OptimizerConfig, SchedulerConfig
from strop.learner.torch.schedule_unit import ScheduleUnit
from strop.learner.training_state import TrainingState
from strop.metrics import Metrics
from strop.models.draft_head import FOLDER, WEIGHTS
from strop.sampling import Sampling
from strop.types import Batch

STATE_FILE = "training.pt"


@dataclass(frozen=True, eq=False)
class DraftSnapshot:
    """A head and the state of its training at one moment. ``save`` may run while both go on."""

    head: EagleHead
    state: Mapping[str, Any] | None

    def save(self, folder: Path) -> None:
        self.head.save(folder / FOLDER)
        if self.state is not None:
            torch.save(dict(self.state), folder / FOLDER / STATE_FILE)


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """How a head is trained."""

    optimizer: OptimizerConfig
    max_grad_norm: float | None
    loss_weight: float = 1.0
    scheduler: SchedulerConfig | None = None
    schedule_unit: ScheduleUnit = field(default_factory=ScheduleUnit)
    schedule_length: int | None = None  # steps of the schedule in the run; None: no limit
    section: str = "policy"  # for messages


class DraftTrainer:
    """The head of a policy, its optimizer and its schedule. Gradients accumulate until ``step``."""

    def __init__(
        self,
        policy: DraftedPolicy,
        head: EagleHead,
        options: DraftOptions,
        sampling: Sampling,
        add_gradients: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """``add_gradients``: adds them over the ranks that read other rollouts, in place; None: there are none. Raises ValueError for a
        policy without the layers that the head reads."""
        self.head = head
        self.options = options
        self.capture = StateCapture(policy.decoder, head.shape.aux_layers)
        self.read = DraftPass(policy, head, sampling, options.loss_weight)
        self._add_gradients = add_gradients
        parameters = [(name, parameter) for name, parameter in head.named_parameters()]
        self.masters = MasterWeights(parameters)
        self.optimizer = make_optimizer(options.optimizer, parameters, section=options.section)
        self.scheduler = make_scheduler(
            options.scheduler, self.optimizer, total_steps=options.schedule_length, section=options.section
        )
        self.state = TrainingState(
            trainable_parameters=parameters,
            masters=self.masters,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            schedule_unit=options.schedule_unit,
            average=None,
            configured=Hyperparameters.of(self.optimizer, self.scheduler),
        )
        self._steps = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.masters.parameters

    def capturing(self) -> AbstractContextManager[None]:
        """Keep the states of the policy's pass inside the context, which ``accumulate`` reads."""
        return self.capture.active()

    def accumulate(self, batch: Batch) -> Metrics:
        """Add the gradient of a micro-batch that the policy has just read."""
        last = self.capture.last
        assert last is not None, "the policy has read nothing"
        return self.read.accumulate(batch, self.capture.take(), last)

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> Metrics:
        """Add the gradients over the ranks, clip them, take a step, advance the schedule and drop the gradients."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._add_gradients is not None:
            self._add_gradients([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        limit = self.options.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.parameters, limit if limit is not None else float("inf"))
        if torch.isfinite(norm):
            self.optimizer.step()
        self._steps += 1
        if self.scheduler is not None and self._steps % self.state.schedule_unit.optimizer_steps == 0:
            self.scheduler.step()
        self.drop_gradients()
        return {"draft_grad_norm": metrics.mean(norm.item(), 1)}

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors of training besides the head's weights."""
        yield from self.state.tensors()
        yield from (parameter.grad for parameter in self.parameters if parameter.grad is not None)

    def stage(self, *, optimizer: bool) -> DraftSnapshot:
        """Copy head and state to CPU memory."""
        state = copy.deepcopy(self.state.state_dict()) if optimizer else None
        return DraftSnapshot(copy.deepcopy(self.head).cpu(), state)

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        DraftSnapshot(self.head, self.state.state_dict() if optimizer else None).save(folder)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote. Raises ValueError if the checkpoint has no head."""
        path = folder / FOLDER / STATE_FILE
        if not path.exists():
            raise ValueError(
                f"{folder} has no draft head, and policy.draft.enabled is true: continue with false, or start a new run from this "
                "checkpoint's weights (policy.model_name)"
            )
        load_head_weights(self.head, load_file(folder / FOLDER / WEIGHTS))
        device = self.head.fc.weight.device
        self.state.load_state_dict(torch.load(path, map_location=device, weights_only=True), path)
        self._steps = 0
