"""The most likely tokens at each predicted place, under a network's sampling distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.models.network import Network
from strop.sampling import Sampling, filtered_logits
from strop.types import Batch


@dataclass(frozen=True)
class TopTokens:
    """The K most likely tokens at each of the N predicted places."""

    ids: Tensor  # [N, K] int64
    logprobs: Tensor  # [N, K] float32, of the whole distribution


@torch.no_grad()
def compute_top_tokens(network: Network, batch: Batch, sampling: Sampling, count: int, vocabulary: int) -> TopTokens:
    """Return the ``count`` most likely of the first ``vocabulary`` token ids; equal on all devices that share the batch's tokens."""
    chunks = []
    with network.autocast():
        for rows in network.hidden(batch).split(network.chunk):  # one chunk of float32 logits at a time
            logits = filtered_logits(network.head.compute_logits(rows), sampling)
            best, ids = logits[:, :vocabulary].topk(count, dim=-1)
            chunks.append((ids, (best - logits.logsumexp(-1, keepdim=True)).float()))
    ids, logprobs = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return network.token_sharding.gather_outputs(TopTokens(ids, logprobs), len(batch.target))
