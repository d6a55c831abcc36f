"""Section ``peft`` of ``megatron_cfg``: low-rank adapters on Megatron Core's layers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig

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
