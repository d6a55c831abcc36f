"""Log-probabilities of given tokens where each tensor-parallel rank has some rows of the output layer.

Logits stay where they are: the ranks exchange maxima, sums and the logits of single tokens, [n] numbers for n rows. Only a filter of the
sampling distribution (top-k, top-p, min-p), whose threshold is over the whole vocabulary, gathers the logits, of one chunk at a time. As in
``strop.models.logprobs`` the backward pass recomputes a chunk's logits instead of storing them.

The gradient of the hidden states is that of this rank's rows; who gathered them adds the ranks' (``RowSharding.gather_hidden``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.algorithms.base import TokenOutputs
from strop.learner.parallel.collectives import all_reduce, join_rows
from strop.models.logprobs.lm_head import LMHead
from strop.models.logprobs.token_logprobs import map_chunks, token_logprobs
from strop.sampling import NO_TOKEN, Sampling, at_least_float32

dist: Any = torch.distributed


@dataclass(frozen=True)
class VocabParallelHead:
    """The rows of an output layer that this tensor-parallel rank has. Rows past the vocabulary, which pad it, have no probability."""

    shard: LMHead  # its weight [V / ranks, H]
    vocab_size: int  # without padding
    group: Any  # the tensor-parallel ranks

    is_linear = False  # for ``token_logprobs``: logits are gathered by ``compute_logits``

    @property
    def first(self) -> int:
        """The token id of this rank's first row."""
        return int(dist.get_rank(self.group)) * len(self.shard.weight)

    @property
    def parallel(self) -> bool:
        return bool(dist.get_world_size(self.group) > 1)

    def whole(self) -> LMHead:
        """Return the layer of a single tensor-parallel rank."""
        weight, bias = self.shard.weight, self.shard.bias
        return replace(self.shard, weight=weight[: self.vocab_size], bias=None if bias is None else bias[: self.vocab_size])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, [n, H] -> [n, V], equal on all ranks."""
        return join_rows(self.shard.compute_logits(hidden).t(), self.group)[: self.vocab_size].t()

    def compute_local_logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return this rank's logits, [n, H] -> [n, V / ranks], in at least float32; -inf for padding."""
        logits = at_least_float32(self.shard.compute_logits(hidden))
        if temperature not in (0.0, 1.0):
            logits = logits / temperature
        padding = self.first + len(self.shard.weight) - self.vocab_size
        if padding > 0:
            past = torch.arange(logits.shape[1], device=logits.device) >= logits.shape[1] - padding
            logits = logits.masked_fill(past, float("-inf"))
        return logits

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of token ids among this rank's logits, and which of them are there: [..] each."""
        local = ids.long() - self.first
        here = (local >= 0) & (local < len(self.shard.weight)) & (ids != NO_TOKEN)
        return local.clamp(0, len(self.shard.weight) - 1), here

    def pick_logits(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the logits [n, K] of token ids [n, K] from this rank's logits; 0 for padding. Equal on all ranks."""
        columns, here = self.find(ids)
        return all_reduce(logits.gather(1, columns).masked_fill(~here, 0.0), self.group)


def vocab_parallel_logprobs(
    hidden: Tensor,
    target: Tensor,
    head: VocabParallelHead,
    sampling: Sampling,
    chunk: int,
    candidates: Tensor | None = None,
    kept: Tensor | None = None,
    *,
    squared_probs: bool = False,
) -> TokenOutputs:
    """Return what ``token_logprobs`` returns for the whole layer, with the same arguments."""
    if not head.parallel:
        return token_logprobs(hidden, target, head.whole(), sampling, chunk, candidates, kept, squared_probs=squared_probs)
    if kept is None and sampling.filtered and not sampling.greedy:
        gathered: Any = head
        return token_logprobs(hidden, target, gathered, sampling, chunk, candidates, kept, squared_probs=squared_probs)

    def compute(rows: Tensor, targets: Tensor, candidates: Tensor | None, kept: Tensor | None) -> tuple[Tensor, ...]:
        return _chunk_outputs(rows, targets, candidates, kept, head, sampling.temperature or 1.0, squared_probs)

    return map_chunks(compute, hidden, target, chunk, candidates, kept, squared_probs=squared_probs)


def _chunk_outputs(
    hidden: Tensor,
    target: Tensor,
    candidates: Tensor | None,
    kept: Tensor | None,
    head: VocabParallelHead,
    temperature: float,
    squares: bool,
) -> tuple[Tensor, ...]:
    if head.shard.is_linear and candidates is None and kept is None and not squares and head.shard.bias is None:
        apply: Any = _ChunkLogprobs.apply
        outputs: tuple[Tensor, ...] = apply(hidden, head.shard.weight, target, head, temperature)
        return outputs
    compute: Any = _kept_outputs if kept is not None else _autograd_outputs
    arguments = (hidden, target, candidates, kept, head, temperature, squares)
    if torch.is_grad_enabled():
        outputs = checkpoint(compute, *arguments, use_reentrant=False)
        return outputs
    outputs = compute(*arguments)
    return outputs


def _autograd_outputs(
    hidden: Tensor,
    target: Tensor,
    candidates: Tensor | None,
    kept: None,
    head: VocabParallelHead,
    temperature: float,
    squares: bool,
) -> tuple[Tensor, ...]:
    """Compute the outputs of a chunk with autograd, for any transformation of the logits."""
    logits = head.compute_local_logits(hidden, temperature)
    highest = _max_over_ranks(logits.detach(), head)
    shifted = logits - highest[:, None]
    exponentials = shifted.exp()
    total = all_reduce(exponentials.sum(1), head.group)
    # e^x x is 0 for a padded row, where x is -inf
    weighted = all_reduce((exponentials * shifted.masked_fill(shifted == float("-inf"), 0.0)).sum(1), head.group)
    log_total = total.log()
    normalizer = (highest + log_total)[:, None]
    outputs = [(head.pick_logits(logits, target[:, None]) - normalizer).squeeze(1), log_total - weighted / total]
    if candidates is not None:
        outputs.append(head.pick_logits(logits, candidates) - normalizer)
    if squares:
        outputs.append(all_reduce((2 * (shifted - log_total[:, None])).detach().exp().sum(1), head.group).log())
    return tuple(outputs)


def _kept_outputs(
    hidden: Tensor,
    target: Tensor,
    candidates: Tensor | None,
    kept: Tensor,
    head: VocabParallelHead,
    temperature: float,
    squares: bool,
) -> tuple[Tensor, ...]:
    """Compute the outputs under the softmax over each row's kept ids [n, K]; -inf for other candidates."""
    logits = head.compute_local_logits(hidden, temperature)
    scaled = head.pick_logits(logits, kept).masked_fill(kept == NO_TOKEN, float("-inf"))
    total = scaled.logsumexp(-1, keepdim=True)
    logs = scaled - total
    entropy = -(logs.exp() * logs.masked_fill(logs == float("-inf"), 0.0)).sum(-1)
    outputs = [(head.pick_logits(logits, target[:, None]) - total).squeeze(1), entropy]
    if candidates is not None:
        is_kept = (candidates[:, :, None] == kept[:, None, :]).any(-1)
        outputs.append((head.pick_logits(logits, candidates) - total).masked_fill(~is_kept, float("-inf")))
    if squares:
        outputs.append((2 * logs.detach()).logsumexp(-1))
    return tuple(outputs)


def _max_over_ranks(logits: Tensor, head: VocabParallelHead) -> Tensor:
    highest = logits.max(1).values
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=head.group)
    return highest


class _ChunkLogprobs(torch.autograd.Function):
    """log softmax(W h / temperature)[target] and its entropy for one chunk of rows; the backward pass recomputes the logits.

    With p = softmax(logits): d logprob / d logits = onehot(target) - p, and d entropy / d logits = -p (log p + entropy). Given the
    normalizer, each rank has these for its own columns.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, head: VocabParallelHead, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.head, ctx.temperature = head, temperature
        ctx.set_materialize_grads(False)
        logits = head.compute_local_logits(hidden, temperature)
        highest = _max_over_ranks(logits, head)
        columns, here = head.find(target)
        chosen = (logits.gather(1, columns[:, None]).squeeze(1) - highest).masked_fill(~here, 0.0)
        shifted = logits.sub_(highest[:, None])
        exponentials = shifted.exp()
        weighted = (exponentials * shifted.masked_fill_(shifted == float("-inf"), 0.0)).sum(1)
        sums = torch.stack([exponentials.sum(1), weighted, chosen])
        dist.all_reduce(sums, group=head.group)
        total, weighted, chosen = sums
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, target, highest + total.log(), entropy)
        return chosen - total.log(), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, target, normalizer, entropy = ctx.saved_tensors
        head: VocabParallelHead = ctx.head
        with torch.no_grad():
            logs = head.compute_local_logits(hidden, ctx.temperature).sub_(normalizer[:, None])
            probabilities = logs.exp()
            grad_logits = torch.zeros_like(probabilities)
            if grad is not None:
                columns, here = head.find(target)
                grad_logits = probabilities * -grad[:, None]
                grad_logits.scatter_add_(1, columns[:, None], (grad * here)[:, None])
            if grad_entropy is not None:
                logs.masked_fill_(logs == float("-inf"), 0.0)
                grad_logits -= grad_entropy[:, None] * probabilities * (logs + entropy[:, None])
            if ctx.temperature != 1.0:
                grad_logits.div_(ctx.temperature)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden = grad_logits @ weight if ctx.needs_input_grad[0] else None
            grad_weight = grad_logits.t() @ hidden if ctx.needs_input_grad[1] else None
        return grad_hidden, grad_weight, None, None, None
