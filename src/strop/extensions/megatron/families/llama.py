"""Llama 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from strop.extensions.megatron.families.architecture import Architecture
from strop.extensions.megatron.families.dense import dense_architecture, dense_rules
from strop.extensions.megatron.families.weight_rules import WeightRule


class Llama:
    """Llama, and models with its configuration (SmolLM2)."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def architecture(self, hf_config: Any) -> Architecture:
        if hf_config.attention_bias or hf_config.mlp_bias:
            raise ValueError("llama: attention_bias and mlp_bias are not in Megatron Core's Llama here: set policy.backend=torch")
        return dense_architecture(hf_config)

    def rules(self, hf_config: Any) -> Sequence[WeightRule]:
        return dense_rules(hf_config)
