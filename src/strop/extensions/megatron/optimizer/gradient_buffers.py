"""Gradients of a rank's stages in Megatron Core's buffers, and their sum over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.extensions.megatron.megatron_optimizer_config import MegatronDdpConfig


def wrap_stages(
    stages: Sequence[Any], config: MegatronDdpConfig, *, distributed_optimizer: bool, key: str = "megatron_cfg"
) -> list[Any]:
    """Wrap stages in Megatron Core's DistributedDataParallel. Call it when their weights are loaded.

    Raises ValueError for Megatron-FSDP where it is not installed.
    """
    if config.use_custom_fsdp:
        raise ValueError(
            f"{key}.distributed_data_parallel_config.use_custom_fsdp: found true, but Megatron-FSDP needs CUDA and is not in this "
            "version; set it to false (use_distributed_optimizer=true shards the optimizer's state)"
        )
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_reduce_in_fp32,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather and config.overlap_grad_reduce and distributed_optimizer,
        use_distributed_optimizer=distributed_optimizer,
        average_in_collective=False,  # ranks add gradients (law 1)
    )
    chunks = []
    for stage in stages:
        chunk = DistributedDataParallel(config=stage.config, ddp_config=options, module=stage)
        chunk.vp_stage = stage.vp_stage  # the interleaved schedule compares it with its own count
        chunks.append(chunk)
    return chunks


class GradientBuffers:
    """The gradients of a step: added up over micro-batches, and once over the ranks."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.chunks = list(chunks)
        self.overlap: bool = chunks[0].ddp_config.overlap_grad_reduce
        self.added = False  # over the ranks, as far as it overlaps with the backward pass
        self.zero()

    def overlap_with_next_pass(self, config: Any) -> None:
        """Let the last micro-batch of the next pass start to add gradients over the ranks, where they overlap.

        Raises RuntimeError if it was done before in this step: those gradients would be added twice.
        """
        if not self.overlap:
            return
        if self.added:
            raise RuntimeError(
                "gradients were added over the ranks already in this optimizer step; set megatron_cfg.distributed_data_parallel_config."
                "overlap_grad_reduce=false for several passes a step"
            )
        contexts = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        self.added = True

    def add_over_ranks(self) -> None:
        """Add the gradients over data and context ranks, and those that tensor ranks and the first and last stage share."""
        from megatron.core.distributed import finalize_model_grads

        if self.overlap and not self.added:  # no pass had a gradient
            for chunk in self.chunks:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    group.start_grad_sync()
        finalize_model_grads(self.chunks, None)  # None: losses are divided by the totals of the step, and by nothing else
        self.added = False

    def zero(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.added = False
