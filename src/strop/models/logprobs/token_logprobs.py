"""Log-probabilities of given tokens from hidden states, without materializing [N, vocabulary] in float32.

For a linear output layer and the full softmax, ``tiled_logprobs`` computes them. For any other head, filter or request, the
output layer is applied to one chunk of rows at a time, under autograd, and the backward pass recomputes a chunk's logits instead
of storing them: for a vocabulary of 150,000 that saves 1.2 MB of memory per token and pass, at the cost of one more product with
the output layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.models.logprobs.lm_head import LMHead
from strop.models.logprobs.logit_tiles import ROWS
from strop.models.logprobs.row_chunks import map_chunks
from strop.models.logprobs.tiled_logprobs import tiled_logprobs
from strop.sampling import Sampling, filtered_logits, kept_logits


def token_logprobs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    chunk: int | None,
    candidates: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    squared_probs: bool = False,
) -> TokenOutputs:
    """hidden [N, H], target [N] -> log-probabilities and entropies [N], at least float32, under the sampling distribution.

    ``candidates`` [N, K] are further token ids to return log-probabilities of. ``kept`` [N, K], padded with -1, are the ids that each
    target was sampled from: the distribution is then over these ids rather than those kept by the sampling filters for these logits.
    ``squared_probs``: also return the log of the sum over the vocabulary of p^2, without gradient. At most ``chunk`` rows of float32
    logits exist at a time, and fewer where tiles are used; None is 1,024, and for tiles the device's choice. All other outputs are
    differentiable; gradients that are not needed cost nothing. No rows give no outputs, and gradients of zero.
    """

    if head.is_linear and candidates is None and kept is None and not sampling.filtered and not squared_probs:
        temperature = sampling.temperature or 1.0
        return TokenOutputs(*tiled_logprobs(hidden, target, head.weight, head.bias, temperature, chunk, head.division))

    def compute(rows: Tensor, targets: Tensor, candidates: Tensor | None, kept: Tensor | None) -> tuple[Tensor, ...]:
        return _chunk_outputs(rows, targets, head, sampling, candidates, kept, squared_probs)

    return map_chunks(compute, hidden, target, chunk or ROWS, candidates, kept, squared_probs=squared_probs)


def _chunk_outputs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    candidates: Tensor | None,
    kept: Tensor | None,
    squares: bool,
) -> tuple[Tensor, ...]:
    """Return log-probabilities and entropies [n] of one chunk, log-probabilities [n, K] of its candidates if any, and with ``squares``
    the log of the sum of squared probabilities [n]."""
    if torch.is_grad_enabled():
        outputs: tuple[Tensor, ...] = checkpoint(
            _autograd_outputs, hidden, target, head, sampling, candidates, kept, squares, use_reentrant=False
        )
        return outputs
    return _autograd_outputs(hidden, target, head, sampling, candidates, kept, squares)


def _autograd_outputs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    candidates: Tensor | None,
    kept: Tensor | None,
    squares: bool,
) -> tuple[Tensor, ...]:
    """Compute the outputs of a chunk with autograd, for any head, filter and set of kept ids."""
    logits = head.compute_logits(hidden)
    if kept is not None:
        return _kept_outputs(logits, target, sampling, candidates, kept, squares)
    logs = filtered_logits(logits, sampling, target).log_softmax(-1)
    outputs = [logs.gather(1, target[:, None]).squeeze(1), _entropy(logs)]
    outputs += [] if candidates is None else [logs.gather(1, candidates)]
    return *outputs, *_log_sum_sq_probs(logs, squares)


def _kept_outputs(
    logits: Tensor, target: Tensor, sampling: Sampling, candidates: Tensor | None, kept: Tensor, squares: bool
) -> tuple[Tensor, ...]:
    """Return log-probabilities under the softmax over each row's kept ids; -inf for other candidates."""
    scaled = kept_logits(logits, kept, sampling)
    total = scaled.logsumexp(-1, keepdim=True)
    logprobs = (kept_logits(logits, target[:, None], sampling) - total).squeeze(1)
    outputs = [logprobs, _entropy(scaled - total)]
    if candidates is not None:
        is_kept = (candidates[:, :, None] == kept[:, None, :]).any(-1)
        outputs.append((kept_logits(logits, candidates, sampling) - total).masked_fill(~is_kept, float("-inf")))
    return *outputs, *_log_sum_sq_probs(scaled - total, squares)


def _log_sum_sq_probs(logs: Tensor, wanted: bool) -> tuple[Tensor, ...]:
    return ((2 * logs.detach()).logsumexp(-1),) if wanted else ()


def _entropy(logs: Tensor) -> Tensor:
    return -(logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)).sum(-1)
