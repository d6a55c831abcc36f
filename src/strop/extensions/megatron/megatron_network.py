"""A model of Megatron Core behind one call: micro-batches through the stages, outputs from the last one; and scores with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size
from torch import Tensor

from strop.algorithms.base import CANDIDATES, SQUARED_PROBS, Outputs, ValueOutputs
from strop.data.rollout_selector import SubBatch
from strop.data.shares import BatchShare, ShareRequest, SplitRule, take_share, without_read_columns
from strop.extensions.distillation.top_tokens import TopTokens, find_top_tokens
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.models.gpt_stage import GptStage, LayerReplay, StageRow, install_stage_replay
from strop.extensions.megatron.schedule import Finish, RowSharding, run_schedule
from strop.extensions.megatron.stage_adapters import StageAdapters
from strop.extensions.megatron.vocab_parallel import VocabParallelHead, vocab_parallel_logprobs
from strop.learner.parallel.micro_batch import MicroBatch, MicroBatchOutputs, OutputsT, detach_to_cpu
from strop.models.logprobs.lm_head import ROWS, make_lm_head
from strop.models.routing.recorded_experts import ReplayedRoutes, RoutedLayers
from strop.models.value_network import apply_score_layer
from strop.sampling import KEPT_TOKENS, Sampling
from strop.types import Batch


class MegatronNetwork:
    """The stages of one model that this rank holds."""

    packed = True  # it reads rows with shared prompts

    def __init__(
        self,
        stages: Sequence[GptStage],
        hf_config: Any,
        layout: MegatronLayout,
        *,
        chunk: int | None = None,
        adapters: StageAdapters | None = None,
    ) -> None:
        """``chunk``: at most this many rows of float32 logits exist at a time; None is 1,024. ``adapters``: what is trained, if not all."""
        self.stages = list(stages)
        self.chunks: list[Any] = list(
            stages
        )  # the stages as they are run: inside of DistributedDataParallel while they are trained
        self.hf_config = hf_config
        self.layout = layout
        self.adapters = adapters
        self.chunk = chunk or ROWS
        fp8: Any = stages[0].config.fp8
        self.sharding = RowSharding(layout, 1 if not fp8 else get_fp8_align_size(stages[0].config.fp8_recipe))
        self.device = layout.device
        self.routed: RoutedLayers | None = None  # with router replay: those of this rank
        self._replays: list[LayerReplay] = []
        self._replayed: list[ReplayedRoutes] = []  # of the passes whose counts were not taken
        self.draft: EagleHead | None = None  # with policy.draft
        self.publishes_draft = False  # whether engines draft with it
        self.vocab_size = int(hf_config.get_text_config().vocab_size)

    @property
    def last_stage(self) -> GptStage:
        """The end of the model, on a rank that has it."""
        return self.stages[-1]

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters():
                yield f"{index}.{name}", parameter

    def share_request(self, token_budget: int, *, whole_groups: bool = False, read_columns: bool = False) -> ShareRequest:
        """Return the share of a batch that this rank reads in micro-batches of ``token_budget``."""
        dims = self.layout.dims
        rule = SplitRule(ranks=dims.data, token_budget=token_budget, whole_groups=whole_groups, fills_up=dims.virtual > 1)
        return ShareRequest(rule=rule, number=self.layout.data_rank, read_columns=read_columns)

    def split_batch(
        self, batch: Batch | BatchShare, token_budget: int, *, whole_groups: bool = False
    ) -> tuple[list[MicroBatch], float]:
        """Return this rank's micro-batches, equally many of each kind on every rank, and the fullest rank's tokens over the mean.

        The interleaved schedule takes a multiple of the stages, which dummies fill up.
        """
        request = self.share_request(token_budget, whole_groups=whole_groups)
        share = take_share(batch, request.rule, request.number)
        cut = list(share.micro_batches())
        micro_batches = []
        for kind in (False, True):
            parts = [part for part, zero_gradient in cut if zero_gradient == kind]
            missing = -len(parts) % self.layout.dims.pipeline if self.layout.dims.virtual > 1 else 0
            micro_batches += [
                MicroBatch(_read_dummy(share) if part is None else part, kind, dummy=part is None)
                for part in (*parts, *[None] * missing)
            ]
        return micro_batches, share.max_over_mean

    def run(self, micro_batches: Sequence[MicroBatch], finish: Finish, *, backward: bool = False) -> list[Any]:
        """Read micro-batches; return the results of ``finish`` in their order, on ranks of the last stage.

        ``finish`` is given a micro-batch and the hidden states of its row, and returns a loss and a result.
        """
        if not micro_batches:
            return []
        with self.layout.activate(), torch.set_grad_enabled(backward):
            for replay in self._replays:
                replay.forget()
            if self.adapters is not None:
                self.adapters.set_training_pass(backward)
            return run_schedule(self.layout, self.chunks, self._make_row, micro_batches, finish, backward=backward)

    def _make_row(self, micro_batch: MicroBatch) -> StageRow:
        row = self.sharding.make_row(micro_batch.sub_batch.batch, self.routed)
        if row.experts is not None and not micro_batch.dummy:
            self._replayed.append(row.experts)
        return row

    def enable_router_replay(self) -> None:
        """Read batches with the experts that were recorded for them. Raises ValueError for a model without experts."""
        self.routed, self._replays = install_stage_replay(self.stages)

    def drop_router_counts(self) -> None:
        self._replayed.clear()

    def take_router_counts(self) -> Tensor | None:
        """Return how often the model chose otherwise than recorded since the last call, and of how many (token, layer) pairs.

        All ranks must call it. None without router replay.
        """
        if self.routed is None:
            return None
        counts = torch.zeros(2, dtype=torch.float64, device=self.device)
        for experts in self._replayed:
            experts.check(self.routed.top_k)
            counts += experts.counts
        self._replayed.clear()
        return self.sharding.add_counts(counts)

    def outputs(self, hidden: Tensor, batch: Batch, sampling: Sampling) -> Outputs:
        """Return the outputs [N] of a micro-batch from the hidden states of the last stage, equal on all ranks that have them."""
        stage = self.last_stage
        if stage.output_layer is None:
            rows = self.predicting_rows(hidden, batch, vocab_parallel=False)
            return self.sharding.gather_outputs(ValueOutputs(apply_score_layer(stage.score, rows)), len(batch.target))
        rows = self.predicting_rows(hidden, batch)
        candidates, kept = (
            None if column is None else self.sharding.shard_predictions(column)
            for column in (batch.columns.get(CANDIDATES), batch.columns.get(KEPT_TOKENS))
        )
        target, squares = self.sharding.shard_predictions(batch.target), SQUARED_PROBS in batch.columns
        outputs = vocab_parallel_logprobs(
            rows, target, self.head(), sampling, self.chunk, candidates, kept, squared_probs=squares
        )
        return self.sharding.gather_outputs(outputs, len(batch.target))

    def predicting_rows(self, hidden: Tensor, batch: Batch, *, vocab_parallel: bool = True) -> Tensor:
        """Return the hidden states [n, H] at the places that this context rank predicts from."""
        rows = self.sharding.gather_hidden(hidden, vocab_parallel=vocab_parallel and self.layout.dims.tensor > 1)
        return rows.index_select(0, self.sharding.shard_predictions(batch.source))

    def head(self) -> VocabParallelHead:
        """Return the output layer, on a rank of the last stage."""
        self.wait_for_output_weights()
        shard = make_lm_head(self.hf_config, self.last_stage.output_weight)
        return VocabParallelHead(shard, self.vocab_size, self.layout.tensor)

    def wait_for_output_weights(self) -> None:
        """Finish gathering the output layer's weights: with overlap_param_gather a module's are when it is called, and this is not."""
        chunk = self.chunks[-1]
        group = getattr(chunk, "param_to_bucket_group", {}).get(self.last_stage.output_weight)
        if group is not None and chunk.ddp_config.overlap_param_gather and chunk.ddp_config.use_distributed_optimizer:
            group.finish_param_sync()

    def gather_weights(self) -> None:
        """Finish gathering all weights of a distributed optimizer: they are about to be read other than by a pass."""
        with self.layout.activate():
            for chunk in self.chunks:
                config = getattr(chunk, "ddp_config", None)
                if config is not None and config.use_distributed_optimizer and config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)


def _read_dummy(share: BatchShare) -> SubBatch:
    dummy = share.require_dummy()
    return SubBatch(dummy, torch.arange(len(dummy.target)))


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
