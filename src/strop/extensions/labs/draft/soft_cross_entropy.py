"""The cross-entropy of a draft head to the policy's own distribution, and its gradient, some rows at a time.

The loss of a row is -sum_v p_v log q_v, with p the policy's distribution over the tokens that the head knows, and q the head's: the
gradient of the head's logits is q - p, that of the forward KL. Loss and gradient are made in one pass, so no logits are kept: [rows of a
chunk, vocabulary] is all that exists at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.logprobs.lm_head import LMHead
from strop.sampling import at_least_float32


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
