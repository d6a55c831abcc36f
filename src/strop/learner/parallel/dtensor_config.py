"""Section ``dtensor_cfg``: the torch learner and its parallelism."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig, subsection
from strop.models.lora_config import LoraConfig


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
