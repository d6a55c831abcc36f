"""Section ``megatron_cfg``: the Megatron Core learner, which is not in this version."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from strop.base_config import BaseConfig


class MegatronConfig(BaseConfig):
    """The Megatron Core learner, which is not in this version."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(False, description="Train with Megatron Core; true is an error in this version.")
    activation_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    tensor_model_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks (GPUs).")
    pipeline_model_parallel_size: int = Field(1, ge=1, description="Pipeline stages (GPUs).")
    context_parallel_size: int = Field(1, ge=1, description="Context-parallel ranks (GPUs).")
    expert_model_parallel_size: int = Field(1, ge=1, description="Expert-parallel ranks (GPUs).")
    expert_tensor_parallel_size: int = Field(1, ge=1, description="Tensor-parallel ranks inside experts (GPUs).")
    sequence_parallel: bool = Field(False, description="Split activations between tensor-parallel ranks along the sequence.")
