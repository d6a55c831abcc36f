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
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from strop import metrics
from strop.extensions.labs.draft.eagle_head import EagleHead, StateCapture, load_head_weights
from strop.learner.torch.master_weights import MasterWeights
from strop.learner.torch.optimizer import Hyperparameters, ScheduleUnit, make_optimizer, make_scheduler
from strop.learner.torch.optimizer_config import OptimizerConfig, SchedulerConfig
from strop.learner.training_state import TrainingState
from strop.metrics import Metrics
from strop.models.attention.kernel_choice import AttentionKernel
from strop.models.attention.tree_plan import TreePlan
from strop.models.logprobs.lm_head import ROWS, LMHead
from strop.models.network_parts import FOLDER, WEIGHTS
from strop.sampling import Sampling, at_least_float32
from strop.types import Batch


class DraftedPolicy(Protocol):
    """A policy whose passes a head learns from. ``strop.models.network.Network`` is one."""

    chunk: int | None  # rows of logits that exist at a time; None: ROWS
    attention_kernel: AttentionKernel

    @property
    def decoder(self) -> nn.Module:
        """The module that has the layers."""
        ...

    @property
    def head(self) -> LMHead:
        """The whole output layer."""
        ...

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[R] int64 -> embeddings [R, H]."""
        ...

    def autocast(self) -> torch.autocast | Any:
        """The precision that the policy computes in."""
        ...


# The pass of a draft head over a micro-batch that the policy has just read, with its backward pass.


@dataclass(frozen=True, eq=False)
class DraftFit:
    """How well a head predicts M distributions of the policy, and the gradient of the weighted sum of the losses."""

    loss: Tensor  # [M], nats
    overlap: Tensor  # [M], sum_v min(p_v, q_v): the chance that rejection sampling (arXiv 2211.17192) accepts a draft
    same_top: Tensor  # [M], 1 where both find the same token likeliest
    grad_hidden: Tensor  # [M, H]
    grad_weight: Tensor  # [draft vocabulary, H]


@torch.no_grad()
def fit_draft(
    hidden: Tensor,
    weight: Tensor,
    policy_hidden: Tensor,
    policy_head: LMHead,
    row_weight: Tensor,
    temperature: float,
    token_ids: Tensor | None,
    chunk: int,
) -> DraftFit:
    """Compare a head with its policy.

    Args:
        hidden: [M, H], the head's normed states, and ``weight`` [draft vocabulary, H] its output layer.
        policy_hidden: [M, H], the policy's states at the same predictions, and ``policy_head`` its output layer.
        row_weight: [M], of each row's loss in the sum whose gradient is returned.
        temperature: Divides the logits of both.
        token_ids: [draft vocabulary], the policy's ids of the head's tokens; None: the vocabularies are the same.
        chunk: Rows of logits that exist at a time.
    """
    dtype = torch.get_autocast_dtype(hidden.device.type) if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=at_least_float32(weight.new_empty(0)).dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        cast = weight.to(dtype)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            part = hidden[rows].to(dtype)
            logs = (at_least_float32(part @ cast.t()) / temperature).log_softmax(-1)
            target = _policy_logits(policy_hidden[rows].to(dtype), policy_head, dtype) / temperature
            columns.append(_compare(logs, target, token_ids))
            known = target if token_ids is None else target[:, token_ids]
            gradient = (logs.exp() - known.softmax(-1)) * (row_weight[rows, None] / temperature)
            grad_hidden[rows] = (gradient.to(dtype) @ cast).to(grad_hidden.dtype)
            grad_weight += (gradient.to(dtype).t() @ part).to(grad_weight.dtype)
    loss, overlap, same = (torch.cat(column) for column in zip(*columns, strict=True)) if columns else (row_weight,) * 3
    return DraftFit(loss, overlap, same, grad_hidden, grad_weight.to(weight.dtype))


def _policy_logits(hidden: Tensor, head: LMHead, dtype: torch.dtype) -> Tensor:  # [m, V], at least float32
    bias = None if head.bias is None else head.bias.to(dtype)
    return at_least_float32(head.transform_logits(torch.nn.functional.linear(hidden, head.weight.to(dtype), bias)))


def _compare(logs: Tensor, target: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, overlap and agreement of the likeliest token, [m] each. Tokens that the head does not know overlap with nothing."""
    known = target if token_ids is None else target[:, token_ids]
    loss = -(known.softmax(-1) * logs).sum(-1)
    shares = target.softmax(-1)
    overlap = torch.minimum(shares if token_ids is None else shares[:, token_ids], logs.exp()).sum(-1)
    best = logs.argmax(-1)
    same = (best if token_ids is None else token_ids[best]) == target.argmax(-1)
    return loss, overlap, same.to(loss.dtype)


@dataclass(frozen=True, eq=False)
class DraftRows:
    """R rows, T - R of the batch's tokens being the first of their path; the head is trained on M of them."""

    token: Tensor  # [R] int64, place in T of the token whose embedding a row reads
    predecessor: Tensor  # [R] int64, place in T of the token before it on its path
    positions: Tensor  # [R] int64, of the predecessor
    segment_start: Tensor  # [segments] int64
    segment_length: Tensor  # [segments] int64
    segment_parent: Tensor  # [segments] int64
    trained: Tensor  # [M] int64, rows that are trained on; more than once where rollouts share a sampled token
    predicted: Tensor  # [M] int64, place in N of what the policy predicts there


def make_draft_rows(batch: Batch) -> DraftRows:
    """Return the rows of a batch.

    Trained on are tokens that the policy sampled and that it predicts from, for each rollout that it sampled them in: an engine drafts
    only after a token that it has sampled. They are the same however the batch is cut.
    """
    lengths, parents = batch.segment_length.tolist(), batch.segment_parent.tolist()
    last = _last_tokens(batch.segment_start.tolist(), lengths, parents)
    predecessor = torch.arange(-1, len(batch.tokens) - 1)
    for segment, start in enumerate(batch.segment_start.tolist()):
        if lengths[segment]:
            predecessor[start] = last[parents[segment]] if parents[segment] >= 0 else -1
    kept = predecessor >= 0
    rank = kept.cumsum(0) - 1
    counts = [int(part.sum()) for part in kept.split(lengths)]
    start, parent = _drop_empty(counts, parents)
    trained, predicted = _find_trained(batch, predecessor)
    token = kept.nonzero().squeeze(1)
    return DraftRows(
        token=token,
        predecessor=predecessor[token],
        positions=batch.positions[predecessor[token]],
        segment_start=torch.tensor(start, dtype=torch.int64),
        segment_length=torch.tensor([count for count in counts if count], dtype=torch.int64),
        segment_parent=torch.tensor(parent, dtype=torch.int64),
        trained=rank[trained],
        predicted=predicted,
    )


def _last_tokens(starts: list[int], lengths: list[int], parents: list[int]) -> list[int]:
    """Return the place in T of the last token of the path to each segment's end; -1 where the path is empty."""
    last: list[int] = []
    for start, length, parent in zip(starts, lengths, parents, strict=True):
        last.append(start + length - 1 if length else last[parent] if parent >= 0 else -1)
    return last


def _drop_empty(counts: list[int], parents: list[int]) -> tuple[list[int], list[int]]:
    """Return starts and parents of the segments that have rows."""
    starts, kept_parents, place, total = list[int](), list[int](), list[int](), 0
    for count, parent in zip(counts, parents, strict=True):
        above = place[parent] if parent >= 0 else -1
        if count:
            place.append(len(starts))
            starts.append(total)
            kept_parents.append(above)
            total += count
        else:
            place.append(above)
    return starts, kept_parents


def _find_trained(batch: Batch, predecessor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in T that are trained on, and the places in N that are predicted from them, [M] each.

    A token was sampled in a rollout if the rollout has a prediction from the token before it.
    """
    tokens = len(batch.tokens) + 1
    before = predecessor[batch.source]
    sampled = torch.isin(batch.sequence.long() * tokens + before, batch.sequence.long() * tokens + batch.source) & (before >= 0)
    predicted = sampled.nonzero().squeeze(1)
    return batch.source[predicted], predicted


METRICS = ("draft_loss", "draft_acceptance", "draft_same_top")


@dataclass(frozen=True, eq=False)
class DraftPass:
    """What trains a head alongside a policy: only the head's gradient. Nothing of it reaches the policy."""

    policy: DraftedPolicy
    head: EagleHead
    sampling: Sampling
    loss_weight: float = 1.0

    def accumulate(self, batch: Batch, states: Tensor, last: Tensor) -> Metrics:
        """Add the gradient of a micro-batch to the head's, and return metrics of it.

        ``states`` [T, layers * H] and ``last`` [T, H] are the policy's, of the same pass. The loss is summed over the trained tokens and
        divided by all of the optimizer step that count (``Totals``), so it does not depend on how the batch is cut.
        """
        rows = make_draft_rows(batch)
        if not len(rows.trained):
            return {name: metrics.mean(0.0, 0.0) for name in METRICS}
        device = states.device
        weight = batch.mask[rows.predicted].to(device)
        with torch.enable_grad(), self.policy.autocast():
            normed = self._read(batch, rows, states)
            fit = fit_draft(
                normed,
                self.head.lm_head.weight,
                last.index_select(0, batch.source[rows.predicted].to(device)),
                self.policy.head,
                weight * (self.loss_weight / max(batch.totals.tokens, 1)),
                self.sampling.temperature or 1.0,
                self.head.token_ids if self.head.reduced else None,
                max(16, (self.policy.chunk or ROWS) // 4),
            )
            torch.autograd.backward([normed, self.head.lm_head.weight], [fit.grad_hidden, fit.grad_weight])
        count = float(weight.sum())
        columns = zip(METRICS, (fit.loss, fit.overlap, fit.same_top), strict=True)
        return {name: metrics.mean(float((column * weight).sum()) / max(count, 1.0), count) for name, column in columns}

    def _read(self, batch: Batch, rows: DraftRows, states: Tensor) -> Tensor:
        """Return the head's normed states at the rows that are trained on, [M, H]."""
        device = states.device
        with torch.no_grad():
            embedded = self.policy.embed_tokens(batch.tokens[rows.token].to(device)).detach()
        segments = (rows.segment_start, rows.segment_length, rows.segment_parent)
        plan = TreePlan(*segments, device, self.policy.attention_kernel)
        fused = self.head.fuse(states.index_select(0, rows.predecessor.to(device)))
        hidden = self.head(embedded, fused, rows.positions.to(device), plan)
        normed: Tensor = self.head.norm(hidden.index_select(0, rows.trained.to(device)))
        return normed


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
