"""Section ``policy``, and the keys that all trained models share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator, model_serializer, model_validator

from strop.base_config import BaseConfig, follows, subsection
from strop.config.schema.generation_config import Device, GenerationConfig, Precision
from strop.config.schema.lora_config import LoraConfig


class TokenizerConfig(BaseConfig):
    """The tokenizer and its chat template."""

    name: str = follows("..model_name", standalone=..., min_length=1, description="A hub name or a folder.")
    chat_template: str | None = Field(None, description="Jinja template; null or default is the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )


class OptimizerGroupConfig(BaseConfig):
    """Parameters with their own learning rate or weight decay."""

    match: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = Field(
        ..., description="Patterns of parameter names, as in no_decay."
    )
    lr: float | None = Field(None, ge=0, description="Learning rate, scaled by the scheduler; null is that of kwargs.")
    weight_decay: float | None = Field(None, ge=0, description="Weight decay; null is that of kwargs.")

    @model_validator(mode="after")
    def _check_not_empty(self) -> OptimizerGroupConfig:
        if self.lr is None and self.weight_decay is None:
            raise ValueError(
                "the group sets neither lr nor weight_decay, so it has no effect; set one of them, or remove the group"
            )
        return self


class OptimizerConfig(BaseConfig):
    """The optimizer."""

    name: str = Field(
        "torch.optim.AdamW",
        min_length=1,
        description="Dotted name of an optimizer class of torch or an installed package, such as "
        "bitsandbytes.optim.AdamW8bit or torchao.optim.AdamW8bit.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=lambda: {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
        description="Arguments; lr is required. Setting kwargs in a file replaces this default as a whole.",
    )
    no_decay: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (),
        description="Name patterns of parameters without weight decay, such as [bias, norm, embed]. A pattern matches a part "
        "of the name, or with * ? or [ the whole name. One that matches nothing is an error.",
    )
    groups: Annotated[tuple[OptimizerGroupConfig, ...], Field(strict=False)] = Field(
        (),
        description="Entries {match: [pattern, ...], lr, weight_decay}. The first entry that matches a parameter applies; "
        "no_decay comes before all.",
    )


class ScheduleStageConfig(BaseConfig):
    """One learning-rate schedule."""

    name: str = Field(
        ...,
        min_length=1,
        description="constant, linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, wsd (warm-up, stable, decay), or the "
        "dotted name of a torch scheduler class.",
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments. Every named schedule takes warmup_steps or warmup_ratio, and total_steps (optimizer steps; "
        "null is all of the run, or up to the next milestone); all but constant take min_ratio; "
        "cosine_with_restarts takes cycles, polynomial power, inverse_sqrt timescale (steps), wsd decay_steps or "
        "decay_ratio and decay (linear, cosine, sqrt).",
    )


class SchedulerConfig(BaseConfig):
    """A sequence of schedulers: stage i + 1 takes over at step milestones[i].

    Written as one ``{name, kwargs}``, or as a list of them that ends in ``{milestones: [...]}``.
    """

    stages: Annotated[tuple[ScheduleStageConfig, ...], Field(strict=False, min_length=1)]
    milestones: Annotated[tuple[int, ...], Field(strict=False)] = ()

    @model_validator(mode="before")
    @classmethod
    def _parse_stages(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "stages" not in values:
            return {"stages": [values], "milestones": []}
        if isinstance(values, Sequence) and not isinstance(values, str):
            stages = [value for value in values if not (isinstance(value, Mapping) and set(value) == {"milestones"})]
            milestones = [value["milestones"] for value in values if value not in stages]
            return {"stages": stages, "milestones": milestones[-1] if milestones else []}
        return values

    @model_validator(mode="after")
    def _check_milestones(self) -> SchedulerConfig:
        if len(self.milestones) != len(self.stages) - 1:
            raise ValueError(
                f"{len(self.stages)} schedulers need {len(self.stages) - 1} milestones (the steps at which the next one takes over), "
                f"found {len(self.milestones)}; end the list with {{milestones: [...]}}"
            )
        if any(later <= earlier for earlier, later in zip(self.milestones, self.milestones[1:], strict=False)):
            raise ValueError(f"milestones {list(self.milestones)} must increase")
        return self

    @model_serializer
    def _serialize(self) -> Any:
        stages: list[Any] = [{"name": stage.name, "kwargs": stage.kwargs} for stage in self.stages]
        return stages[0] if not self.milestones else [*stages, {"milestones": list(self.milestones)}]


class DtensorConfig(BaseConfig):
    """The torch learner and its parallelism."""

    enabled: bool = Field(True, description="Train with the torch learner.")
    cpu_offload: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in CPU memory; needs several ranks."
    )
    sequence_parallel: bool = Field(False, description="Split activations between tensor-parallel ranks along the sequence.")
    activation_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, more time."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks: they shard the linear layers (GPUs).")
    context_parallel_size: int = Field(
        1, ge=1, description="Context-parallel ranks: they shard the tokens of a micro-batch (GPUs)."
    )
    expert_parallel_size: int = Field(
        1,
        ge=1,
        description="Expert-parallel ranks: they shard the experts of a layer; 1, or a multiple of tensor_parallel_size (GPUs).",
    )
    dp_replicate_size: int = Field(
        1, ge=1, description="Replicas of the model, each sharded over its ranks (HSDP); 1 shards over all ranks (copies)."
    )
    custom_parallel_plan: str | None = Field(
        None,
        description="Dotted name of a tensor-parallel plan, a mapping from name patterns to styles, such as my_plans:PLAN; "
        "null is the model's own.",
    )
    lora_cfg: LoraConfig = subsection(LoraConfig)


class MegatronConfig(BaseConfig):
    """The Megatron Core learner, which is not in this version."""

    enabled: bool = Field(False, description="Train with Megatron Core; true is an error in this version.")
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    tensor_model_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks (GPUs).")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages (GPUs).")
    context_parallel_size: int = Field(1, ge=1, description="Context-parallel ranks (GPUs).")
    expert_model_parallel_size: int = Field(1, ge=1, description="Expert-parallel ranks (GPUs).")
    expert_tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks inside experts (GPUs).")
    sequence_parallel: bool = Field(False, description="Split activations between tensor-parallel ranks along the sequence.")


class SequencePackingConfig(BaseConfig):
    """Micro-batches of flat rows without padding, within a token budget."""

    enabled: bool = Field(
        True,
        description="Pack rollouts into flat rows; false pads them to the longest of the batch, and the budgets of "
        "dynamic_batching hold.",
    )
    train_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..train_micro_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a training micro-batch (tokens).",
    )
    logprob_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..logprob_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a micro-batch scored without gradients (tokens).",
    )
    prefix_sharing: bool = Field(True, description="Store and compute a group's prompt once instead of once per rollout.")


class DynamicBatchingConfig(BaseConfig):
    """Token budgets of padded micro-batches, where sequence_packing is off."""

    enabled: bool = Field(False, description="Padded dynamic batching; true is an error in this version.")
    train_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..train_micro_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a training micro-batch, padding included (tokens).",
    )
    logprob_mb_tokens: int = follows(
        "..max_total_sequence_length",
        "..logprob_batch_size",
        standalone=2048,
        ge=1,
        description="Token budget of a micro-batch scored without gradients, padding included (tokens).",
    )


class EmaConfig(BaseConfig):
    """An exponential moving average of the trained weights, saved beside them."""

    enabled: bool = Field(False, description="Keep an average in float32, and save it as a Hugging Face folder policy/ema.")
    decay: float = Field(
        0.999,
        ge=0,
        lt=1,
        description="Weight of the old average in an optimizer step (fraction).",
    )
    start_step: int = Field(0, ge=0, description="Until this step the average equals the weights (optimizer steps).")


class ReferenceConfig(BaseConfig):
    """The frozen copy of the policy in the KL term."""

    offload: bool = Field(False, description="Keep it in CPU memory between uses.")


class ModelConfig(BaseConfig):
    """A model and its training."""

    model_name: str = Field(..., min_length=1, description="A hub name or a folder with a Hugging Face model.")
    tokenizer: TokenizerConfig = subsection(TokenizerConfig)
    hf_config_overrides: dict[str, Any] = Field(
        default_factory=dict, description="Values set on the model's Hugging Face configuration."
    )
    device: Device = Field("auto", description="cpu, cuda or cuda:N; auto is the first GPU if there is one.")
    num_threads: int | None = Field(None, ge=1, description="CPU threads; null is torch's own choice (threads).")
    precision: Precision = Field("bfloat16", description="Compute precision: bfloat16 (autocast) or float32.")
    weights_dtype: Precision = Field(
        "float32",
        description="Data type of the weights that train and sample. bfloat16 keeps float32 master weights in the optimizer: "
        "no cast in each forward pass and a reference policy of half the size, for 2 more bytes per trained "
        "weight.",
    )
    max_total_sequence_length: int = Field(
        512, ge=2, description="Longest prompt and completion together, over all turns (tokens)."
    )
    train_global_batch_size: int | None = Field(
        None,
        ge=1,
        description="Rollouts per optimizer step; null is the whole batch; of recorded data, at most 32 examples (rollouts).",
    )
    train_micro_batch_size: int = Field(
        4,
        ge=1,
        description="Sets the default token budget of a training micro-batch, with max_total_sequence_length (rollouts).",
    )
    logprob_batch_size: int = follows(
        ".train_micro_batch_size",
        standalone=4,
        ge=1,
        description="Sets the default token budget of a micro-batch scored without gradients (rollouts).",
    )
    logprob_chunk_size: int | None = Field(
        1024, ge=1, description="Tokens with float32 logits in memory at once; null is all of a micro-batch (tokens)."
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="Clip the gradient to this norm; null does not clip.")
    optimizer: OptimizerConfig = subsection(OptimizerConfig)
    scheduler: SchedulerConfig | None = Field(
        None,
        description="Learning-rate schedule over optimizer steps: {name, kwargs}, such as {name: cosine, kwargs: "
        "{warmup_steps: 50, min_ratio: 0.1}}, or a list of them ending in {milestones: [...]}. Names: constant, "
        "linear, cosine, cosine_with_restarts, polynomial, inverse_sqrt, wsd, or a dotted torch class. kwargs: "
        "warmup_steps or warmup_ratio, total_steps (null is the run's), min_ratio, and the schedule's own. null "
        "is constant.",
    )
    ema: EmaConfig = subsection(EmaConfig)
    dtensor_cfg: DtensorConfig = subsection(DtensorConfig)
    megatron_cfg: MegatronConfig = subsection(MegatronConfig)
    sequence_packing: SequencePackingConfig = subsection(SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = subsection(DynamicBatchingConfig)

    @field_validator("weights_dtype")
    @classmethod
    def _check_weights_dtype(cls, weights_dtype: str, values: ValidationInfo) -> str:
        if weights_dtype == "bfloat16" and values.data.get("precision") == "float32":
            raise ValueError(
                "with bfloat16 weights nothing is computed in float32; set precision=bfloat16, or weights_dtype=float32"
            )
        return weights_dtype


class PolicyConfig(ModelConfig):
    """The policy and its training."""

    generation_batch_size: int | None = Field(
        None,
        ge=1,
        description="Accepted for NeMo-RL recipes, without effect: the engine batches continuously, up to "
        "generation.torch_cfg.max_num_seqs (rollouts).",
    )
    reference: ReferenceConfig = subsection(ReferenceConfig)
    generation: GenerationConfig = subsection(GenerationConfig)
