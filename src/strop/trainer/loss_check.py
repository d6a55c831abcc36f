"""Check that the loss of a user's algorithm has the same gradient however a batch is cut (law 1), and none where it declares
none.

Both are decided from the gradient with respect to the network's outputs, so neither needs another forward pass, for any learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.base import Algorithm, LossFn, Outputs
from strop.algorithms.policy_gradient.parts import Part
from strop.data.splitting import select_rollouts
from strop.learner.parallel.micro_batch import tensor_fields
from strop.metrics import Metrics, merge
from strop.types import Batch

ROUNDING = 1e-3  # relative error of the gradient: reordered float32 sums differ by far less, and a wrong divisor by half of it
SMALLEST = 1e-5  # norm of the gradient of a mean over tokens, below which it may be all rounding


def check_loss(algorithm: Algorithm, loss: LossFn, batch: Batch, outputs: Outputs) -> None:
    """Check the loss on an optimizer step's ``batch`` if any part of the algorithm is the user's. Raises ValueError.

    ``outputs`` are the learner's outputs for the whole batch.
    """
    if all(type(part).__module__.startswith("strop.") for part in (algorithm, *_parts(algorithm))):
        return
    whole, _ = differentiate(loss, batch, outputs)
    if not bool(whole.isfinite().all()):
        return  # the step is skipped, and counted
    name, unit = type(algorithm).__name__, batch.group.tolist() if algorithm.whole_groups else range(batch.num_sequences)
    halves = [[sequence for sequence, each in enumerate(unit) if each % 2 == side] for side in (0, 1)]
    if fault := find_cut_fault(name, whole, differentiate_parts(loss, batch, outputs, halves), "in two halves"):
        raise ValueError(fault)
    if fault := find_zero_fault(name, whole, batch):
        raise ValueError(fault)


def find_cut_fault(name: str, whole: Tensor, cut: tuple[Tensor, Metrics] | None, how: str) -> str | None:
    """Return what is wrong if the gradient of a cut batch differs from that of the whole one, both [N, outputs]."""
    if cut is None or float((whole - cut[0]).norm()) <= max(ROUNDING * float(whole.norm()), SMALLEST / len(whole) ** 0.5):
        return None
    return (
        f"the loss of {name} depends on how a batch is cut into micro-batches: the gradient by the outputs of this step's {len(whole)} "
        f"tokens has the norm {whole.norm():.4g}, and {how} {cut[0].norm():.4g}. Divide by batch.totals, as strop.algorithms.functional."
        "aggregate does, never by the size of what the loss is handed (no mean()); compute what needs the whole step in prepare_step; "
        "set whole_groups = True for a loss that compares the rollouts of a group"
    )


def find_zero_fault(name: str, whole: Tensor, batch: Batch) -> str | None:
    """Return what is wrong if a rollout of ``batch.zero_gradient`` has a gradient. ``whole``: [N, outputs]."""
    if batch.zero_gradient is None or not (lost := whole[batch.zero_gradient[batch.sequence]].norm()) > 0:
        return None
    return (
        f"the loss of {name} has a gradient (of the norm {lost:.4g}) at rollouts that zero_gradient says have none: they are not "
        "trained on. Define zero_gradient(batch, learner) for what the loss adds, or set zero_gradient_without_advantage = False in its "
        "Objective"
    )


def _parts(algorithm: Algorithm) -> list[object]:
    values = [getattr(algorithm, field.name) for field in fields(algorithm)]
    return [part for value in values for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Part)]


def differentiate_parts(
    loss: LossFn, batch: Batch, outputs: Outputs, parts: Sequence[Sequence[int]]
) -> tuple[Tensor, Metrics] | None:
    """Return the gradient [N, outputs] and the merged metrics of the loss over ``parts`` of a batch's rollouts; None if fewer than
    two parts have tokens.
    """
    cut = [part for part in (select_rollouts(batch, sequences) for sequences in parts if sequences) if len(part.index)]
    if len(cut) < 2:
        return None
    columns: list[dict[str, Any]] = [{name: column[part.index] for name, column in tensor_fields(outputs)} for part in cut]
    found = [differentiate(loss, part.batch, replace(outputs, **own)) for part, own in zip(cut, columns, strict=True)]
    joined = torch.cat([gradient for gradient, _ in found])
    return joined.index_copy(0, torch.cat([part.index for part in cut]), joined), merge(*(logged for _, logged in found))


def differentiate(loss: LossFn, batch: Batch, outputs: Outputs) -> tuple[Tensor, Metrics]:
    """Return the gradient [N, outputs] of a loss with respect to all outputs of each token, and its metrics."""
    leaves: dict[str, Any] = {name: column.detach().clone().requires_grad_() for name, column in tensor_fields(outputs)}
    with torch.enable_grad():
        value, logged = loss(replace(outputs, **leaves), batch)
    columns = [*leaves.values()]
    found = torch.autograd.grad(value, columns, allow_unused=True) if value.requires_grad else [None] * len(columns)
    filled = [torch.zeros_like(column) if each is None else each for each, column in zip(found, columns, strict=True)]
    return torch.cat([each.reshape(len(each), -1).double() for each in filled], 1), logged
