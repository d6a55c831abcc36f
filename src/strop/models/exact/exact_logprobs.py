"""Log-probabilities of tokens whose bits do not depend on the other rows of a pass: the same functions for learner and sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.models.exact.exact_mode import ExactMode
from strop.models.exact.packed_weights import PackedWeights
from strop.models.exact.row_products import exact_linear
from strop.sampling import Sampling, filtered_logits


@dataclass(frozen=True)
class ExactHead:
    """The output layer."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    transform: Callable[[Tensor], Tensor]  # of the logits [n, V], as the model family does it
    weights: PackedWeights

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [n, H] -> [n, V]
        logits = exact_linear(hidden, self.weight, self.bias, self.weights)
        with ExactMode(self.weights):
            return self.transform(logits)


def sampled_logprobs(scaled: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of the tokens [n] and entropies [n] under the softmax of ``filtered_logits`` [n, V]."""
    logs = scaled.log_softmax(-1)
    terms = logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)
    terms = torch.cat([terms, terms]) if len(terms) == 1 else terms  # the sum of a single long row is shared by the threads
    return logs.gather(1, tokens[:, None]).squeeze(1), -terms.sum(-1)[: len(logs)]


def exact_token_logprobs(
    hidden: Tensor,
    target: Tensor,
    head: ExactHead,
    sampling: Sampling,
    chunk: int,
    candidates: Tensor | None = None,
    *,
    squared_probs: bool = False,
) -> TokenOutputs:
    """hidden [N, H], target [N] -> log-probabilities and entropies [N] under the sampling distribution, at least float32.

    ``candidates`` [N, K]: further ids to return log-probabilities of. ``squared_probs``: also the log of the sum of p^2. The backward
    pass computes the logits of ``chunk`` rows again.
    """

    def compute(rows: Tensor, tokens: Tensor, others: Tensor | None) -> tuple[Tensor, ...]:
        scaled = filtered_logits(head.compute_logits(rows), sampling, tokens)
        outputs = [*sampled_logprobs(scaled, tokens)]
        if others is not None or squared_probs:
            logs = scaled.log_softmax(-1)
            outputs += [] if others is None else [logs.gather(1, others)]
            outputs += [(2 * logs.detach()).logsumexp(-1)] if squared_probs else []
        return tuple(outputs)

    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, max(len(hidden), 1), chunk):
        rows, tokens = hidden[start : start + chunk], target[start : start + chunk]
        others = None if candidates is None else candidates[start : start + chunk]
        parts.append(_maybe_checkpoint(compute, rows, tokens, others))
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    squares = columns.pop() if squared_probs else None
    return replace(TokenOutputs(*columns), log_sum_sq_probs=squares)


def _maybe_checkpoint(compute: Callable[..., tuple[Tensor, ...]], *inputs: Any) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return compute(*inputs)
    outputs: tuple[Tensor, ...] = checkpoint(compute, *inputs, use_reentrant=False)
    return outputs
