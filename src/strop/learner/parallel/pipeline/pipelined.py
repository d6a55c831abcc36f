"""A network in pipeline stages, each of them sharded over its ranks (torch.distributed.pipelining and FSDP2).

Each rank reads the same batch and cuts it in the same way, so a stage needs only hidden states from another: tokens, positions
and the attention plan are in its own micro-batch. torch's schedules exchange hidden states of one shape, so the micro-batches of
a step are padded to the longest of them; no token attends to the padding and nothing is predicted from it, so the gradient is the same.

A tied embedding is on the first and the last stage, which add their gradients before each optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from strop.data.shares import BatchShare
from strop.learner.parallel.context.sample_sharding import SampleSharding
from strop.learner.parallel.micro_batch import LocalOutputs, MicroBatch, OutputsT, detach_to_cpu, make_dummy
from strop.learner.parallel.parallel_dims import DeviceMeshes
from strop.learner.parallel.pipeline.pipeline_stages import PipelineStages
from strop.learner.parallel.shard_files import is_elsewhere
from strop.learner.parallel.sharded import Sharded, ShardedModel, ShardingOptions, shard_network
from strop.metrics import Metrics
from strop.models.layers.compiled_layers import use_learner_layers
from strop.models.network import Network
from strop.types import Batch

dist: Any = torch.distributed


def parallelize_stages(network: Network, meshes: DeviceMeshes, **options: Any) -> Pipelined:
    """Cut a network into pipeline stages and shard each over its ranks, in place, as ``parallelize_network`` does.

    Raises ValueError for a network that cannot be cut or sharded.
    """
    stages = PipelineStages(network, meshes.dims)
    ranks = stages.parameter_ranks()
    elsewhere = frozenset(name for name, having in ranks.items() if meshes.pipeline_rank not in having)
    model = shard_network(network, meshes, ShardingOptions(**options), elsewhere)
    shared = [name for name, having in ranks.items() if len(having) > 1 and meshes.pipeline_rank in having]
    return Pipelined(network, meshes, model, stages, shared)


@dataclass(frozen=True, eq=False)
class _Hidden:
    """The output of an inner stage."""

    hidden: Tensor  # [t, H]


class _StageModule(nn.Module):
    """A stage in the form torch's schedules call it. It does not own the model's modules, whose gradients a schedule would clear."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *received: Tensor) -> Tensor:
        return self.run(*received)


class Pipelined(Sharded):
    """A ``Parallelism`` in pipeline stages. Created by ``parallelize_stages``."""

    def __init__(
        self, network: Network, meshes: DeviceMeshes, model: ShardedModel, stages: PipelineStages, shared: Sequence[str]
    ) -> None:
        super().__init__(network, meshes, model)
        assert isinstance(network.token_sharding, SampleSharding)
        self.stages = stages
        self.own_stages = stages.stages_of_rank(meshes.pipeline_rank)
        self._sharding = network.token_sharding
        self._language_model = network
        self._shared = [name for name in shared if name in self.sharded]
        for name in self._shared:
            self._copy_counts[id(self.local_parameters[name])] *= 2

    # --- passes ----------------------------------------------------------------------------------------------------------

    def split_batch(
        self, batch: Batch | BatchShare, token_budget: int, *, whole_groups: bool = False
    ) -> tuple[Sequence[MicroBatch], Metrics]:
        share = self.take_share(batch, token_budget, whole_groups=whole_groups)
        micro_batches, logged = super().split_batch(share, token_budget, whole_groups=whole_groups)
        filled: list[MicroBatch] = []
        for kind in (False, True):
            members = [each for each in micro_batches if each.zero_gradient == kind]
            filled += [*members, *self._make_dummies(share.require_dummy(), members)]
        return filled, logged

    def _make_dummies(self, dummy: Batch, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the dummies that the schedule needs: at least one micro-batch per rank, and complete rounds for interleaved
        stages.
        """
        count, ranks = len(micro_batches), self.meshes.dims.pipeline
        missing = -count % ranks if self.meshes.dims.interleaved else ranks - count
        if not count or missing <= 0:
            return []
        return [make_dummy(dummy, zero_gradient=micro_batches[0].zero_gradient)] * missing

    def run_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[Batch], OutputsT],
        loss: Callable[[MicroBatch, OutputsT], Tensor] | None = None,
        *,
        backward: bool = False,
    ) -> LocalOutputs[OutputsT]:
        trained = [each for each in micro_batches if backward and not each.zero_gradient]
        others = [each for each in micro_batches if not (backward and not each.zero_gradient)]
        with use_learner_layers(self.network, keep_copies=False):
            results = self._run_schedule(trained, compute, loss, backward=True) if trained else []
            results += self._run_schedule(others, compute, loss, backward=False) if others else []
        self._finish_passes()
        reported = zip((*trained, *others), results, strict=False)  # only the last stage has results
        return tuple((each.sub_batch.index, outputs) for each, outputs in reported if self.is_leader and not each.dummy)

    def _run_schedule(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[Batch], OutputsT],
        loss: Callable[[MicroBatch, OutputsT], Tensor] | None,
        *,
        backward: bool,
    ) -> list[OutputsT]:
        """Run all stages over micro-batches in the order of the schedule; return the outputs on the last stage."""
        results: list[OutputsT] = []

        def run_last(micro_batch: MicroBatch, received: Tensor | None) -> Tensor:
            outputs = self._run_stage(self.stages.count - 1, received, lambda: compute(micro_batch.sub_batch.batch))
            value = None if loss is None else loss(micro_batch, outputs)
            results.append(detach_to_cpu(outputs))
            return torch.zeros(1, device=self.device) if value is None else value.reshape(1)

        def stage_runner(stage: int) -> Callable[..., Tensor]:
            upcoming: Iterator[MicroBatch] = iter(micro_batches)  # a schedule runs a stage's micro-batches in order

            def run(*received: Tensor) -> Tensor:
                micro_batch, hidden = next(upcoming), received[0] if received else None
                last = stage == self.stages.count - 1
                return run_last(micro_batch, hidden) if last else self._run_inner(stage, hidden, micro_batch)

            return run

        self._sharding.length = max(len(each.sub_batch.batch.tokens) for each in micro_batches)
        stages = [self._make_stage(stage, stage_runner(stage), requires_grad=backward) for stage in self.own_stages]
        loss_fn = (lambda value, _: value) if backward else None
        schedule: Any
        if self.meshes.dims.interleaved:
            schedule = ScheduleInterleaved1F1B(list(stages), len(micro_batches), loss_fn=loss_fn, scale_grads=False)
        else:
            schedule = Schedule1F1B(stages[0], len(micro_batches), loss_fn=loss_fn, scale_grads=False)
        try:
            with torch.set_grad_enabled(backward):
                schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        finally:
            self._sharding.length = 0
        return results

    def _run_inner(self, stage: int, received: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        """Return the hidden states that a stage sends to the next one."""
        network = self._language_model

        def compute() -> _Hidden:
            with network.autocast():
                return _Hidden(network.run_decoder(micro_batch.sub_batch.batch))

        hidden = self._run_stage(stage, received, compute).hidden.contiguous()
        if hidden.dtype != self._hidden_dtype:
            raise RuntimeError(
                f"stage {stage} of {self.stages.name} computes hidden states in {hidden.dtype}, but its embedding is in "
                f"{self._hidden_dtype}: the next stage cannot receive them; set pipeline_parallel_size=1"
            )
        return hidden

    def _run_stage(self, stage: int, received: Tensor | None, compute: Callable[[], OutputsT]) -> OutputsT:
        def run() -> OutputsT:  # within FSDP's forward pass, which handles all layers of the rank
            with self.stages.run_only(stage, received):
                return compute()

        return self._run(run)

    def _make_stage(self, stage: int, run: Callable[..., Tensor], *, requires_grad: bool) -> PipelineStage:
        """Create a stage with the shapes of its input and output, which all stages know."""
        dims, width = self.meshes.dims, int(self.stages.embedding.weight.shape[1])
        rows = self._sharding.padded_length(0) // (dims.context * (dims.tensor if dims.sequence else 1))
        hidden = torch.empty(rows, width, dtype=self._hidden_dtype, device="meta", requires_grad=requires_grad)
        result = torch.empty(1, device="meta")
        return PipelineStage(
            _StageModule(run),
            stage,
            self.stages.count,
            self.device,
            input_args=() if stage == 0 else (hidden,),
            output_args=(result,) if stage == self.stages.count - 1 else (hidden,),
            group=self.meshes.pipeline,
        )

    @property
    def _hidden_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.stages.embedding.weight.dtype
        return self.gather_dtype or dtype

    # --- gradients and weights -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        for name in self._shared:
            parameter = self.local_parameters[name]
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = own + self._exchange(own.to(self.device)).to(own.device)
        return super().clip_grad_norm(parameters, limit)

    def _exchange(self, tensor: Tensor) -> Tensor:
        """Exchange a tensor with the other rank that has the tied embedding: the first or the last."""
        group, received = self.meshes.pipeline, torch.empty_like(tensor)
        other = dist.get_global_rank(group, 0 if self.meshes.pipeline_rank else self.meshes.dims.pipeline - 1)
        sends = dist.P2POp(dist.isend, tensor.contiguous(), other, group)
        receives = dist.P2POp(dist.irecv, received, other, group)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return received

    def gather_stages(self, value: Any) -> Sequence[Any]:
        values = [None] * self.meshes.dims.pipeline
        dist.all_gather_object(values, value, group=self.meshes.pipeline)
        return values

    @torch.no_grad()
    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather a tensor on its stage and send it to the others. All ranks must call it."""
        if not isinstance(tensor, DTensor) and not is_elsewhere(tensor):
            return tensor.detach()  # buffers are on all stages
        group = self.meshes.pipeline
        having = torch.zeros(self.meshes.dims.pipeline, dtype=torch.int32, device=self.device)
        having[self.meshes.pipeline_rank] = 0 if is_elsewhere(tensor) else 1
        dist.all_reduce(having, group=group)
        source = having.tolist().index(1)
        if source == self.meshes.pipeline_rank:
            full = super().full_tensor(tensor).contiguous()
        else:
            dtype = self.param_dtype if self.param_dtype is not None and tensor.is_floating_point() else tensor.dtype
            full = torch.empty(tensor.shape, dtype=dtype, device=self.device)
        dist.broadcast(full, dist.get_global_rank(group, source), group=group)
        return full
