"""Sections ``optimizer``, ``scheduler`` and ``distributed_data_parallel_config`` of ``megatron_cfg``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, follows
from strop.problems import Problem

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]


class MegatronOptimizerConfig(BaseConfig):
    """Megatron Core's optimizer. Weight decay is decoupled, and biases and norms have none."""

    identity_keys: ClassVar[tuple[str, ...]] = ("optimizer",)

    optimizer: Literal["adam", "sgd"] = Field("adam", description="adam (AdamW) or sgd.")
    lr: float = Field(5e-6, ge=0, le=1000, description="Highest learning rate, which the warm-up ends at.")
    min_lr: float = Field(5e-7, ge=0, description="Learning rate that a schedule decays to.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")
    decoupled_weight_decay: bool = Field(
        True, description="Decay weights separately from the gradient (AdamW); false adds it to the gradient."
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of Adam's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of Adam's second moment.")
    adam_eps: float = Field(1e-8, ge=0, le=1, description="Added to the root of Adam's second moment.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of sgd.")
    use_distributed_optimizer: bool = Field(True, description="Shard masters and moments over the data-parallel ranks.")
    use_precision_aware_optimizer: bool = Field(
        True,
        description="Keep masters and moments in their own data types: Transformer Engine's kernel, where it is installed.",
    )
    clip_grad: float | None = follows(
        "...max_grad_norm", standalone=1.0, ge=0, description="Clip the gradient to this norm; 0 or null does not clip."
    )
    optimizer_cpu_offload: bool = Field(False, description="Keep moments in CPU memory and step there; needs Transformer Engine.")
    optimizer_offload_fraction: float = Field(
        0.0, ge=0, le=1, description="Share of the optimizer's state in CPU memory (fraction)."
    )
    overlap_cpu_optimizer_d2h_h2d: bool = Field(False, description="Overlap the copies of an offloaded optimizer with its steps.")

    def own_errors(self, key: str) -> Iterator[Problem]:
        if self.min_lr > self.lr:
            yield Problem(
                f"{key}.min_lr", f"found {self.min_lr:g}, which is above lr = {self.lr:g}", f"Set it to {self.lr:g} or less."
            )
        if self.optimizer_cpu_offload and not self.optimizer_offload_fraction:
            yield Problem(
                f"{key}.optimizer_offload_fraction",
                "found 0, so that optimizer_cpu_offload=true moves nothing",
                "Set it to 1.0, or optimizer_cpu_offload=false.",
            )
        if self.optimizer_cpu_offload and not self.use_distributed_optimizer:
            yield Problem(
                f"{key}.optimizer_cpu_offload",
                "found true, but only the distributed optimizer offloads",
                f"Set {key}.use_distributed_optimizer=true, or this to false.",
            )


class MegatronSchedulerConfig(BaseConfig):
    """The schedule of learning rate and weight decay. An iteration is a pass over a batch, as in NeMo-RL."""

    lr_decay_style: DecayStyle = Field("constant", description="Shape of the decay to optimizer.min_lr.")
    lr_decay_iters: int | None = Field(
        1000, ge=1, description="Iteration at which the decay ends; null is the run's last (steps)."
    )
    lr_warmup_iters: int = Field(13, ge=0, description="Iterations from lr_warmup_init to optimizer.lr (steps).")
    lr_warmup_fraction: float | None = Field(
        None, ge=0, lt=1, description="Warm-up as a share of lr_decay_iters, instead of lr_warmup_iters (fraction)."
    )
    lr_warmup_init: float = Field(5e-7, ge=0, description="Learning rate that the warm-up begins with.")
    lr_wsd_decay_iters: int | None = Field(None, ge=1, description="Length of the decay of WSD, before lr_decay_iters (steps).")
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "exponential", description="Shape of the decay of WSD."
    )
    start_weight_decay: float = follows(
        "..optimizer.weight_decay", standalone=0.01, ge=0, description="Weight decay at the first step."
    )
    end_weight_decay: float = follows(
        "..optimizer.weight_decay", standalone=0.01, ge=0, description="Weight decay at lr_decay_iters."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How the weight decay grows."
    )

    def own_errors(self, key: str) -> Iterator[Problem]:
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            yield Problem(
                f"{key}.lr_wsd_decay_iters", "found null, but lr_decay_style=WSD decays over this many steps", "Set it."
            )
        if self.end_weight_decay < self.start_weight_decay:
            message = (
                f"found {self.end_weight_decay:g}, below start_weight_decay = {self.start_weight_decay:g}; Megatron's only grows"
            )
            yield Problem(f"{key}.end_weight_decay", message, f"Set it to {self.start_weight_decay:g} or more.")
        if self.weight_decay_incr_style == "constant" and self.start_weight_decay != self.end_weight_decay:
            yield Problem(
                f"{key}.weight_decay_incr_style",
                f"found constant, but the weight decay goes from {self.start_weight_decay:g} to {self.end_weight_decay:g}",
                "Set it to linear or cosine, or both weight decays to the same.",
            )
        if self.lr_decay_iters is not None and self.lr_warmup_iters >= self.lr_decay_iters and not self.lr_warmup_fraction:
            message = f"found {self.lr_warmup_iters}, which leaves nothing of lr_decay_iters = {self.lr_decay_iters}"
            yield Problem(f"{key}.lr_warmup_iters", message, "Lower it, or raise lr_decay_iters.")


class MegatronDdpConfig(BaseConfig):
    """Gradients among data-parallel ranks. How they are added changes speed and memory."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    grad_reduce_in_fp32: bool = Field(False, description="Keep and add gradients of bfloat16 weights in float32.")
    overlap_grad_reduce: bool = Field(True, description="Add gradients while the backward pass goes on.")
    overlap_param_gather: bool = Field(
        True, description="Gather the weights of the distributed optimizer while the forward pass goes on."
    )
    use_custom_fsdp: bool = Field(False, description="Shard weights and gradients too (Megatron-FSDP); needs a GPU.")
