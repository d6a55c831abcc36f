"""Sections ``optimizer``, ``scheduler`` and ``distributed_data_parallel_config`` of ``megatron_cfg``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig, follows, subsection
from strop.learner.learner_config import LearnerSection
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


Patterns = Annotated[tuple[str, ...], Field(strict=False)]


class MegatronPeftConfig(BaseConfig):
    """Low-rank adapters (LoRA) on Megatron Core's linear layers; the fused ones (linear_qkv, linear_fc1) share one A."""

    identity_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(False, description="Train only adapters.")
    target_modules: Patterns = Field(
        (),
        description="Layers that get adapters, such as [linear_qkv, linear_proj] or ['*.layers.0.*.linear_fc1']; "
        "empty is every linear layer of the decoder but those of experts. A pattern matches the end of a name after a dot, or "
        "with * ? or [ the whole name, in which layers are counted through all stages.",
    )
    exclude_modules: Patterns = Field((), description="Patterns of layers without adapters, matched in the same way.")
    dim: int = Field(8, ge=1, description="Rank of an adapter.")
    alpha: int = Field(32, ge=1, description="Scale of an adapter: its output is multiplied by alpha / dim.")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout probability in training; only for recorded data, where the policy does not sample (fraction).",
    )
    dropout_position: Literal["pre", "post"] = Field("post", description="Drop an adapter's inputs (pre) or outputs (post).")
    lora_A_init_method: Literal["xavier", "uniform", "kaiming"] = Field(
        "xavier", description="Initialisation of A: xavier (normal), or uniform, also called kaiming (as PEFT does)."
    )
    lora_B_init_method: Literal["zero"] = Field("zero", description="Initialisation of B.")


Names = Annotated[tuple[str, ...], Field(strict=False)]
RECOMPUTED = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
Kernels = "a kernel of Transformer Engine or APEX, used where it is installed"


class Fp8Config(BaseConfig):
    """Training in FP8, by Transformer Engine on a GPU that has it."""

    enabled: bool = Field(False, description="Compute linear layers in FP8; needs Transformer Engine and an FP8 GPU.")
    fp8: Literal["e4m3", "hybrid"] = Field("e4m3", description="Format: e4m3, or hybrid with gradients in e5m2.")
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = Field(
        "blockwise", description="What shares a scale; mxfp8 needs a Blackwell GPU."
    )
    fp8_param: bool = Field(False, description="Keep the weights in FP8 too; not in this version.")


class MegatronConfig(LearnerSection):
    """The Megatron Core learner: tensor, sequence, pipeline, context and expert parallelism."""

    backend: ClassVar[str] = "megatron"
    title: ClassVar[str] = "Megatron Core"
    adapters_key: ClassVar[str] = "peft"
    trains_drafts: ClassVar[bool] = True
    weights_follow_precision: ClassVar[bool] = True

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(False, description="Train with Megatron Core, unless policy.backend says torch.")

    tensor_model_parallel_size: int = Field(1, ge=1, description="Ranks that share each layer (GPUs).")
    sequence_parallel: bool = Field(False, description="Split activations between tensor-parallel ranks along the sequence.")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages: ranks that have different layers (GPUs).")
    virtual_pipeline_model_parallel_size: int | None = Field(
        None, ge=1, description="Parts of a stage, which alternate with those of other stages (interleaved 1F1B); null is 1."
    )
    num_layers_in_first_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers of the first stage; null is as many as others."
    )
    num_layers_in_last_pipeline_stage: int | None = Field(
        None, ge=1, description="Layers of the last stage; null is as many as others."
    )
    context_parallel_size: int = Field(1, ge=1, description="Ranks that share the tokens of a micro-batch (GPUs).")
    expert_model_parallel_size: int = Field(1, ge=1, description="Ranks that share the experts of a layer (GPUs).")
    expert_tensor_parallel_size: int = Field(1, ge=1, description="Ranks that share each expert (GPUs).")

    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, more time."
    )
    recompute_granularity: Literal["full", "selective"] = Field(
        "full", description="What activation_checkpointing recomputes: full is each layer, selective the recompute_modules."
    )
    recompute_modules: Names | None = Field(
        None,
        description="Modules of a selective recomputation: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts; "
        "null is core_attn.",
    )

    freeze_moe_router: bool = Field(True, description="Do not train the weights that choose the experts of a token.")
    moe_router_dtype: Literal["fp32", "fp64"] | None = Field(
        "fp64", description="Data type in which the router computes; null is that of the model."
    )
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = Field(
        "none", description="How the load of experts is balanced in training: by an auxiliary loss, or not."
    )
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="Weight of the auxiliary loss.")
    moe_z_loss_coeff: float | None = Field(None, ge=0, description="Weight of the loss of large router logits; null has none.")
    moe_per_layer_logging: bool = Field(False, description="Log the losses of routers for each layer too.")
    moe_router_enable_expert_bias: bool | None = Field(
        None, description="Choose experts with a bias that follows their load; null is as the model has it."
    )
    moe_router_bias_update_rate: float = Field(0.0, ge=0, description="Change of the expert bias in an optimizer step.")
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = Field(
        "alltoall", description="How tokens travel to their experts; flex (DeepEP) needs its kernels."
    )
    moe_enable_deepep: bool = Field(
        False, description="Dispatch with DeepEP; needs it, a GPU and moe_token_dispatcher_type=flex."
    )
    moe_shared_expert_overlap: bool = Field(False, description="Compute shared experts while tokens travel.")
    moe_permute_fusion: bool = Field(True, description=f"Sort the tokens of experts by {Kernels}.")
    moe_grouped_gemm: bool | None = Field(
        None, description="Compute the experts of a rank by one grouped kernel; null does so where Transformer Engine is."
    )

    gradient_accumulation_fusion: bool = Field(
        False, description="Add weight gradients in the kernel that computes them; needs APEX."
    )
    use_fused_weighted_squared_relu: bool = Field(False, description=f"Squared ReLU of experts by {Kernels}.")
    use_gloo_process_groups: bool = Field(False, description="Make process groups over gloo too, for an optimizer in CPU memory.")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="Layers: local is PyTorch, transformer_engine needs it; auto takes it where FP8 needs it."
    )

    first_last_layers_bf16: bool = Field(False, description="Compute the first and last layers in bfloat16 where FP8 is enabled.")
    num_layers_at_start_in_bf16: int = Field(1, ge=0, description="First layers in bfloat16, with first_last_layers_bf16.")
    num_layers_at_end_in_bf16: int = Field(1, ge=0, description="Last layers in bfloat16, with first_last_layers_bf16.")
    layernorm_epsilon: float | None = Field(None, gt=0, description="Epsilon of the norms; null is the model's.")
    model_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Values set on Megatron Core's TransformerConfig, after all others."
    )

    fp8_cfg: Fp8Config = subsection(Fp8Config)
    peft: MegatronPeftConfig = subsection(MegatronPeftConfig)
    optimizer: MegatronOptimizerConfig = subsection(MegatronOptimizerConfig)
    scheduler: MegatronSchedulerConfig = subsection(MegatronSchedulerConfig)
    distributed_data_parallel_config: MegatronDdpConfig = subsection(MegatronDdpConfig)

    @property
    def adapters(self) -> MegatronPeftConfig:
        return self.peft

    @property
    def largest_size(self) -> int:
        return max(self.tensor_model_parallel_size, self.context_parallel_size, self.pipeline_model_parallel_size)

    def errors(self, key: str) -> Iterator[Problem]:
        if not self.enabled:
            return
        yield from self.optimizer.own_errors(f"{key}.optimizer")
        yield from self.scheduler.own_errors(f"{key}.scheduler")
        yield from self._check_adapters(key)
        virtual, stages = self.virtual_pipeline_model_parallel_size or 1, self.pipeline_model_parallel_size
        if virtual > 1 and stages == 1:
            yield Problem(
                f"{key}.virtual_pipeline_model_parallel_size",
                f"found {virtual}, but pipeline_model_parallel_size is 1: there are no stages to interleave",
                "Set it to null, or raise pipeline_model_parallel_size.",
            )
        if self.recompute_modules and not (self.activation_checkpointing and self.recompute_granularity == "selective"):
            yield Problem(
                f"{key}.recompute_modules",
                f"found {', '.join(self.recompute_modules)}, but only a selective recomputation has modules",
                f"Set {key}.activation_checkpointing=true and {key}.recompute_granularity=selective, or this to null.",
            )
        if unknown := [name for name in self.recompute_modules or () if name not in RECOMPUTED]:
            yield Problem(
                f"{key}.recompute_modules",
                f"found {', '.join(unknown)}, which Megatron Core does not recompute",
                f"Name some of {', '.join(RECOMPUTED)}.",
            )
        if self.fp8_cfg.enabled and self.fp8_cfg.fp8_param:
            yield Problem(
                f"{key}.fp8_cfg.fp8_param",
                "found true, but checkpoints and publishes of weights in FP8 are not in this version",
                "Set it to false: layers are computed in FP8 from bfloat16 weights, which takes more memory and trains the same.",
            )
        if self.moe_router_load_balancing_type == "sinkhorn":
            yield Problem(
                f"{key}.moe_router_load_balancing_type",
                "found sinkhorn, which chooses other experts for a token than those of its best scores, which engines sample with",
                "Set it to aux_loss, seq_aux_loss, global_aux_loss or none.",
            )
        if self.scheduler.lr_warmup_iters and self.scheduler.lr_warmup_init > self.optimizer.lr:
            yield Problem(
                f"{key}.scheduler.lr_warmup_init",
                f"found {self.scheduler.lr_warmup_init:g}, which is above optimizer.lr = {self.optimizer.lr:g}",
                f"Set it to {self.optimizer.lr:g} or less.",
            )

    def _check_adapters(self, key: str) -> Iterator[Problem]:
        if self.peft.enabled and self.moe_shared_expert_overlap:
            yield Problem(
                f"{key}.moe_shared_expert_overlap",
                f"found true, but then shared experts exchange their tokens where their adapters ({key}.peft) do not see it",
                "Set it to false.",
            )

    def size_errors(self, key: str, devices: int, *, uses_ray: bool) -> Iterator[Problem]:
        sizes = {
            "tensor_model_parallel_size": self.tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
            "context_parallel_size": self.context_parallel_size,
        }
        experts = {
            "expert_model_parallel_size": self.expert_model_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_model_parallel_size,
        }
        if problem := _check_product(key, sizes, devices) or _check_product(key, experts, devices):
            yield problem

    def errors_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.extensions.megatron.megatron_checks import run_errors  # knows the configuration, which this is part of

        return run_errors(key, config) if self.enabled else iter(())

    def warnings_of_run(self, key: str, config: Any) -> Iterator[Problem]:
        from strop.extensions.megatron.megatron_checks import run_warnings

        return run_warnings(key, config) if self.enabled else iter(())

    def warnings(self, key: str) -> Iterator[Problem]:
        if self.enabled and self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield Problem(
                f"{key}.sequence_parallel",
                "it has no effect: tensor_model_parallel_size is 1, so there are no ranks to shard the sequence over",
                "Set it to false, or raise tensor_model_parallel_size.",
            )
        if self.enabled and self.fp8_cfg.enabled:
            gpus = "a Blackwell GPU" if self.fp8_cfg.fp8_recipe == "mxfp8" else "a GPU with FP8 (Ada, Hopper or newer)"
            yield Problem(
                f"{key}.fp8_cfg.enabled",
                f"{self.fp8_cfg.fp8_recipe} needs Transformer Engine and {gpus} on every node that trains; a run without them ends when "
                "it starts",
            )


def _check_product(key: str, sizes: Mapping[str, int], devices: int) -> Problem | None:
    product = math.prod(sizes.values())
    if devices % product == 0:
        return None
    name = max(sizes, key=lambda each: devices % sizes[each] > 0)  # the first that does not divide by itself, or else the first
    others = " and ".join(f"{other} = {size}" for other, size in sizes.items() if other != name)
    return Problem(
        f"{key}.{name}",
        f"found {sizes[name]}, with {others}: these {product} ranks do not divide the {devices} devices that train",
        f"Raise cluster.gpus_per_node or cluster.num_nodes (a multiple of {product} devices must train), or lower the sizes.",
    )
