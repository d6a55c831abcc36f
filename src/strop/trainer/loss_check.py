"""Check that the loss of a user's algorithm has the same gradient however a batch is cut (law 1), and none where it declares
none.

Both are decided from the gradient with respect to the network's outputs, so neither needs another forward pass, for any learner.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.base import Algorithm, LossFn, Outputs
from strop.algorithms.policy_gradient.parts import Part
from strop.data.splitting import select_rollouts
from strop.learner.parallel.micro_batch import tensor_fields
from strop.types import Batch

ROUNDING = 1e-3  # relative error of the gradient: reordered float32 sums differ by far less, and a wrong divisor by half of it
SMALLEST = 1e-5  # norm of the gradient of a mean over tokens, below which it may be all rounding


def check_loss(algorithm: Algorithm, loss: LossFn, batch: Batch, outputs: Outputs) -> None:
    """Check the loss on an optimizer step's ``batch`` if any part of the algorithm is the user's. Raises ValueError.

    ``outputs`` are the learner's outputs for the whole batch.
    """
    if all(type(part).__module__.startswith("strop.") for part in (algorithm, *_parts(algorithm))):
        return
    whole = _gradient(loss, batch, outputs)
    if not bool(whole.isfinite().all()):
        return  # the step is skipped, and counted
    name = f"the loss of {type(algorithm).__name__}"
    _check_cut(name, whole, _gradient_in_halves(loss, batch, outputs, whole_groups=algorithm.whole_groups))
    if batch.zero_gradient is not None and (lost := whole[batch.zero_gradient[batch.sequence]].norm()) > 0:
        raise ValueError(
            f"{name} has a gradient (of the norm {lost:.4g}) at rollouts that zero_gradient says have none: they are not trained on. "
            "Define zero_gradient(batch, learner) for what the loss adds, or set zero_gradient_without_advantage = False in its Objective"
        )


def _check_cut(name: str, whole: Tensor, halves: Tensor | None) -> None:
    difference = 0.0 if halves is None else float((whole - halves).norm())
    if halves is not None and difference > max(ROUNDING * float(whole.norm()), SMALLEST / len(whole) ** 0.5):
        raise ValueError(
            f"{name} depends on how a batch is cut into micro-batches: the gradient by the outputs of this step's {len(whole)} tokens has "
            f"the norm {whole.norm():.4g}, and in two halves {halves.norm():.4g}. Divide by batch.totals, as strop.algorithms.functional."
            "aggregate does, never by the size of what the loss is handed (no mean()); compute what needs the whole step in prepare_step; "
            "set whole_groups = True for a loss that compares the rollouts of a group"
        )


def _parts(algorithm: Algorithm) -> list[object]:
    values = [getattr(algorithm, field.name) for field in fields(algorithm)]
    return [part for value in values for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Part)]


def _gradient_in_halves(loss: LossFn, batch: Batch, outputs: Outputs, *, whole_groups: bool) -> Tensor | None:
    """Return the gradient of two parts, cut by every second rollout (which splits groups) or every second group; None if there is
    only one.
    """
    unit = batch.group.tolist() if whole_groups else range(batch.num_sequences)
    chosen = [[sequence for sequence, each in enumerate(unit) if each % 2 == side] for side in (0, 1)]
    halves = [select_rollouts(batch, sequences) for sequences in chosen if sequences]
    if len(halves) < 2 or not all(len(half.index) for half in halves):
        return None
    columns: list[dict[str, Any]] = [{name: column[half.index] for name, column in tensor_fields(outputs)} for half in halves]
    joined = torch.cat([_gradient(loss, half.batch, replace(outputs, **own)) for half, own in zip(halves, columns, strict=True)])
    return joined.index_copy(0, torch.cat([half.index for half in halves]), joined)


def _gradient(loss: LossFn, batch: Batch, outputs: Outputs) -> Tensor:  # [N, outputs]
    """Return the gradient of a loss with respect to all outputs of each token."""
    leaves: dict[str, Any] = {name: column.detach().clone().requires_grad_() for name, column in tensor_fields(outputs)}
    with torch.enable_grad():
        value, _ = loss(replace(outputs, **leaves), batch)
    columns = [*leaves.values()]
    found = torch.autograd.grad(value, columns, allow_unused=True) if value.requires_grad else [None] * len(columns)
    filled = [torch.zeros_like(column) if each is None else each for each, column in zip(found, columns, strict=True)]
    return torch.cat([each.reshape(len(each), -1).double() for each in filled], 1)
