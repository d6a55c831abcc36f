"""Log-probabilities of given tokens from hidden states, without materializing [N, vocabulary] in float32.

The output layer is applied to one chunk of rows at a time. The backward pass recomputes a chunk's logits instead of storing them: for a
vocabulary of 150,000 that saves 1.2 MB of memory per token and pass, for one more product with the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.sampling import Sampling, at_least_float32, filtered_logits, kept_logits


@dataclass(frozen=True)
class LMHead:
    """The output layer and its model family's transformation of the logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    softcap: float | None = None  # final_logit_softcapping, Gemma 2 and 3
    divisor: float = 1.0  # logits_scaling, Granite
    multiplier: float = 1.0  # logit_scale, Cohere

    @property
    def is_linear(self) -> bool:
        return self.softcap is None and self.divisor == 1.0 and self.multiplier == 1.0

    def compute_logits(self, hidden: Tensor) -> Tensor:  # [.., H] -> [.., V]
        return self.transform_logits(nn.functional.linear(hidden, self.weight, self.bias))

    def transform_logits(self, logits: Tensor) -> Tensor:
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def get_lm_head(model: nn.Module) -> LMHead:
    """Return the LM head of a Hugging Face causal LM. Raises ValueError if it has no linear output layer."""
    layer = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(layer, nn.Linear):
        raise ValueError(f"{type(model).__name__} has no linear output layer (found {type(layer).__name__})")
    return make_lm_head(model.config, layer.weight, layer.bias)


def make_lm_head(config: Any, weight: Tensor, bias: Tensor | None = None) -> LMHead:
    """Return an output layer with the transformation of the logits that a Hugging Face configuration asks for."""
    config = getattr(config, "text_config", None) or config
    return LMHead(
        weight=weight,
        bias=bias,
        softcap=getattr(config, "final_logit_softcapping", None),
        divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        multiplier=float(getattr(config, "logit_scale", None) or 1.0),
    )


def token_logprobs(
    hidden: Tensor,
    target: Tensor,
    head: LMHead,
    sampling: Sampling,
    chunk: int,
    candidates: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    squared_probs: bool = False,
) -> TokenOutputs:
    """hidden [N, H], target [N] -> log-probabilities and entropies [N], at least float32, under the sampling distribution.

    ``candidates`` [N, K] are further token ids to return log-probabilities of. ``kept`` [N, K], padded with -1, are the ids that each
    target was sampled from: the distribution is then over these ids, not over those that the sampling filters keep of these logits.
    ``squared_probs``: also return the log of the sum over the vocabulary of p^2, without gradient. At most ``chunk`` rows of float32
    logits exist at a time. All other outputs are differentiable; gradients that are not needed cost nothing.
    """

    def compute(rows: Tensor, targets: Tensor, candidates: Tensor | None, kept: Tensor | None) -> tuple[Tensor, ...]:
        return _chunk_outputs(rows, targets, head, sampling, candidates, kept, squared_probs)

    return map_chunks(compute, hidden, target, chunk, candidates, kept, squared_probs=squared_probs)


def map_chunks(
    compute: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, ...]],
    hidden: Tensor,
    target: Tensor,
    chunk: int,
    candidates: Tensor | None,
    kept: Tensor | None,
    *,
    squared_probs: bool,
) -> TokenOutputs:
    """Return the outputs of all rows from those of ``chunk`` rows at a time: the columns that ``compute`` returns, joined."""
    outputs = [
        compute(*rows)
        for rows in zip(
            hidden.split(chunk),
            target.split(chunk),
            _split_optional(candidates, chunk),
            _split_optional(kept, chunk),
            strict=False,
        )
    ]
    columns = [torch.cat(column) for column in zip(*outputs, strict=True)]
    squares = columns.pop() if squared_probs else None
    return replace(TokenOutputs(*columns), log_sum_sq_probs=squares)


def _split_optional(column: Tensor | None, chunk: int) -> Iterable[Tensor | None]:
    return repeat(None) if column is None else column.split(chunk)


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
    if head.is_linear and candidates is None and kept is None and not sampling.filtered and not squares:
        apply: Any = _ChunkLogprobs.apply
        outputs: tuple[Tensor, ...] = apply(hidden, head.weight, head.bias, target, sampling.temperature or 1.0)
        return outputs
    if torch.is_grad_enabled():
        outputs = checkpoint(_autograd_outputs, hidden, target, head, sampling, candidates, kept, squares, use_reentrant=False)
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


class _ChunkLogprobs(torch.autograd.Function):
    """log softmax(W h / temperature)[target] and its entropy for one chunk of rows; the backward pass recomputes the logits.

    With p = softmax(logits): d logprob / d logits = onehot(target) - p, and d entropy / d logits = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        ctx.temperature = temperature
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.set_materialize_grads(False)
        with torch.autocast(device, enabled=False):
            logs = _scaled_logits(hidden, weight, bias, ctx.dtype, temperature).log_softmax(-1)
            logprobs = logs.gather(1, target[:, None]).squeeze(1)
            entropy = -torch.bmm(logs.exp()[:, None], logs[:, :, None]).flatten()
        ctx.save_for_backward(hidden, weight, bias, target, entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, target, entropy = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            logits = _scaled_logits(hidden, weight, bias, ctx.dtype, ctx.temperature)
            grad_logits = logits.softmax(-1)
            if grad_entropy is not None:
                entropy_term = -grad_entropy[:, None] * grad_logits * (logits.log_softmax(-1) + entropy[:, None])
            if grad is None:
                grad_logits.zero_()
            else:
                grad_logits.mul_(-grad[:, None]).scatter_add_(1, target[:, None], grad[:, None])
            if grad_entropy is not None:
                grad_logits += entropy_term
            grad_logits = (grad_logits.div_(ctx.temperature) if ctx.temperature != 1.0 else grad_logits).to(ctx.dtype)
            grad_hidden = (grad_logits @ weight.to(ctx.dtype)).to(hidden.dtype) if ctx.needs_input_grad[0] else None
            grad_weight = (grad_logits.t() @ hidden.to(ctx.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
            grad_bias = grad_logits.sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return grad_hidden, grad_weight, grad_bias, None, None


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, temperature: float) -> Tensor:
    logits = at_least_float32(nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)))
    return logits.div_(temperature) if temperature != 1.0 else logits
