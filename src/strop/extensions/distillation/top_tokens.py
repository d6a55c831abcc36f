"""The most likely tokens at each predicted position, under a network's sampling distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.logprobs.lm_head import ROWS
from strop.models.network import Network
from strop.sampling import Sampling, filtered_logits
from strop.types import Batch


@dataclass(frozen=True)
class TopTokens:
    """The K most likely tokens at each of the N predicted positions."""

    ids: Tensor  # [N, K] int64
    logprobs: Tensor  # [N, K] float32, of the whole distribution


@torch.no_grad()
def compute_top_tokens(network: Network, batch: Batch, sampling: Sampling, count: int, vocabulary: int) -> TopTokens:
    """Return the ``count`` most likely of the first ``vocabulary`` token ids; equal on all devices that share the batch's tokens."""
    head = network.head
    with network.autocast():
        chunks = network.hidden(batch).split(network.chunk or ROWS)  # one chunk of float32 logits at a time
        found = [find_top_tokens(head.compute_logits(rows), sampling, count, vocabulary) for rows in chunks]
    top = TopTokens(torch.cat([each.ids for each in found]), torch.cat([each.logprobs for each in found]))
    return network.token_sharding.gather_outputs(top, len(batch.target))


def find_top_tokens(logits: Tensor, sampling: Sampling, count: int, vocabulary: int) -> TopTokens:
    """Return the ``count`` most likely of the first ``vocabulary`` token ids by their logits [n, V]."""
    filtered = filtered_logits(logits, sampling)
    best, ids = filtered[:, :vocabulary].topk(count, dim=-1)
    return TopTokens(ids, (best - filtered.logsumexp(-1, keepdim=True)).float())
