"""Scores with a model of Megatron Core: a frozen reference, a teacher, or a network in training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.data.shares.batch_share import BatchShare, without_read_columns
from strop.data.shares.split_rule import ShareRequest
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.learner.parallel.micro_batch import MicroBatch, MicroBatchOutputs, OutputsT, detach_to_cpu
from strop.learner.torch.top_tokens import TopTokens, find_top_tokens
from strop.sampling import Sampling
from strop.types import Batch


@dataclass(frozen=True)
class MegatronScorer:
    """A rank's part of a scorer. ``context`` is entered while it reads: to bring weights to their device, or to disable adapters."""

    network: MegatronNetwork
    sampling: Sampling
    score_tokens: int  # tokens of one forward pass
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    replays: bool = (
        False  # the experts recorded in rollouts, as the policy does; a reference is another one, with its own routing
    )

    def share_requests(self) -> dict[str, ShareRequest]:
        """Return the share of a batch that this rank reads."""
        return {"score": self.network.share_request(self.score_tokens, read_columns=self.replays)}

    def score_local(self, batch: Batch | BatchShare) -> MicroBatchOutputs:
        """Score this rank's micro-batches."""
        return MicroBatchOutputs(self.read_local(batch, lambda hidden, part: self.network.outputs(hidden, part, self.sampling)))

    @property
    def vocab_size(self) -> int:
        """Size of the output layer."""
        return self.network.vocab_size

    def top_tokens_local(self, batch: Batch | BatchShare, count: int, vocabulary: int) -> tuple[tuple[Tensor, TopTokens], ...]:
        """Return the ``count`` most likely of the first ``vocabulary`` token ids at this rank's positions [n] in the batch's N."""

        def compute(hidden: Tensor, part: Batch) -> TopTokens:
            rows, head = self.network.predicting_rows(hidden, part), self.network.head()
            chunks = rows.split(self.network.chunk)  # one chunk of float32 logits at a time
            found = [find_top_tokens(head.compute_logits(each), self.sampling, count, vocabulary) for each in chunks]
            top = TopTokens(torch.cat([each.ids for each in found]), torch.cat([each.logprobs for each in found]))
            return self.network.sharding.gather_outputs(top, len(part.target))

        return self.read_local(batch, compute)

    def read_local(
        self, batch: Batch | BatchShare, compute: Callable[[Tensor, Batch], OutputsT]
    ) -> tuple[tuple[Tensor, OutputsT], ...]:
        """Return what ``compute(hidden states of the last stage, micro-batch)`` returns for each of this rank's micro-batches, with its
        places [n] in the batch's N; nothing on ranks that do not lead."""

        def finish(micro_batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, tuple[MicroBatch, OutputsT]]:
            return torch.zeros((), device=hidden.device), (
                micro_batch,
                detach_to_cpu(compute(hidden, micro_batch.sub_batch.batch)),
            )

        if not self.replays:
            batch = without_read_columns(batch)
        with self.context():
            micro_batches, _ = self.network.split_batch(batch, self.score_tokens)
            halves = ([each for each in micro_batches if each.zero_gradient == kind] for kind in (False, True))
            results = [result for half in halves for result in self.network.run(half, finish)]
        self.network.drop_router_counts()
        if not self.network.layout.is_leader:
            return ()
        return tuple((each.sub_batch.index, outputs) for each, outputs in results if not each.dummy)
