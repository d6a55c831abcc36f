"""Gradients of a rank's stages in Megatron Core's buffers, and their sum over the data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from strop.extensions.megatron.megatron_config import MegatronDdpConfig, MegatronOptimizerConfig, MegatronSchedulerConfig


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


def make_megatron_optimizer(
    config: MegatronOptimizerConfig,
    chunks: Sequence[Any],
    dtype: torch.dtype,
    *,
    gloo_groups: bool = False,
    key: str = "megatron_cfg.optimizer",
) -> Any:
    """Return Megatron Core's optimizer of wrapped stages with weights of type ``dtype``.

    Weight decay is decoupled, and biases and weights of one dimension have none. Raises ValueError for what needs Transformer Engine
    where it is not installed.
    """
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    engine = find_spec("transformer_engine") is not None
    if config.optimizer_cpu_offload and not engine:
        raise ValueError(
            f"{key}.optimizer_cpu_offload: found true, but it needs Transformer Engine, which is not installed; set it to false "
            "(policy.offload moves the whole learner to CPU memory between its phases)"
        )
    mixed = dtype in (torch.bfloat16, torch.float16)
    if config.use_distributed_optimizer and dtype == torch.float64:
        raise ValueError(f"{key}.use_distributed_optimizer: found true, but it takes no float64 weights; set it to false")
    options = OptimizerConfig(
        optimizer=config.optimizer,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        decoupled_weight_decay=config.decoupled_weight_decay,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        sgd_momentum=config.sgd_momentum,
        use_distributed_optimizer=config.use_distributed_optimizer,
        # Its masters and moments are float32 here, as without it: another kernel with the same numbers.
        use_precision_aware_optimizer=(
            config.use_precision_aware_optimizer
            and config.use_distributed_optimizer
            and engine
            and mixed
            and config.optimizer == "adam"
        ),
        clip_grad=config.clip_grad or 0.0,
        overlap_param_gather=chunks[0].ddp_config.overlap_param_gather,
        optimizer_cpu_offload=config.optimizer_cpu_offload,
        optimizer_offload_fraction=config.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=config.overlap_cpu_optimizer_d2h_h2d,
    )
    return get_megatron_optimizer(options, list(chunks), use_gloo_process_groups=gloo_groups)


def chained(optimizer: Any) -> list[Any]:
    """Return the optimizers that Megatron Core has put together: of ordinary weights, and of experts."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


@torch.no_grad()
def step_optimizer(optimizer: Any) -> tuple[float, bool]:
    """Clip the gradients and take a step. Return their norm before, and whether it was finite; otherwise there is no step."""
    overflow = optimizer.prepare_grads()  # of a loss scale, which it lowers
    norm = math.inf if overflow else float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        return norm, False
    clip_gradients(optimizer, norm)
    optimizer.step_with_ready_grads()
    return norm, True


def clip_gradients(optimizer: Any, norm: float) -> None:
    """Scale gradients of the norm ``norm`` down to the configured one. (Megatron Core's own function knows only float32.)"""
    for each in chained(optimizer):
        limit = each.config.clip_grad
        if getattr(each, "is_stub_optimizer", False) or not 0 < limit < norm + 1e-6:
            continue
        name = "decoupled_grad" if each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        gradients = [grad for parameter in each.get_parameters() if (grad := getattr(parameter, name, None)) is not None]
        if gradients:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))


def make_megatron_scheduler(
    config: MegatronSchedulerConfig,
    rates: MegatronOptimizerConfig,
    optimizer: Any,
    *,
    total_steps: int | None,
    key: str = "megatron_cfg.scheduler",
) -> Any:
    """Return the schedule of learning rate and weight decay, which counts passes over a batch (``total_steps`` in the run, if it ends).

    Raises ValueError if a schedule that decays has no end.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    end = config.lr_decay_iters or total_steps
    if end is None and (config.lr_decay_style != "constant" or config.weight_decay_incr_style != "constant"):
        raise ValueError(
            f"{key}.lr_decay_iters: found null, but the run has no last step to end lr_decay_style={config.lr_decay_style} with; set it, "
            "or the number of steps of the run"
        )
    warmup = int(config.lr_warmup_fraction * (end or 0)) if config.lr_warmup_fraction else config.lr_warmup_iters
    if end is not None and warmup >= end and config.lr_decay_style != "constant":
        raise ValueError(
            f"{key}.lr_warmup_iters: found {warmup}, which leaves nothing of the {end} steps of the schedule; lower it, or raise "
            "lr_decay_iters"
        )
    end = max(end or 0, warmup + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init if warmup else 0.0,
        max_lr=rates.lr,
        min_lr=rates.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=end,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=end,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


def set_schedule_step(scheduler: Any, step: int) -> None:
    """Set a schedule to a step, and with it the learning rate and weight decay."""
    scheduler.num_steps = 0
    scheduler.step(step)
