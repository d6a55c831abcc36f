"""The rotary embedding of a Hugging Face configuration, with its scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from strop.extensions.megatron.families.architecture import Rotary
from strop.models.attention.rotary_scaling import scaled_rotary_frequencies


def rotary_of(hf_config: Any, head_dim: int, layer_type: str | None = None) -> Rotary:
    """Return the rotary embedding of a model, for one type of its layers where they differ. Raises ValueError."""
    parameters: Mapping[str, Any] = hf_config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return Rotary(1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(
            f"{hf_config.model_type}: rotary embeddings of type {kind} depend on the length of a sequence, which rows of many "
            "sequences do not have one of; Megatron Core's models have the types default, linear, llama3 and yarn: "
            "set policy.backend=torch"
        )
    return Rotary(*scaled_rotary_frequencies(hf_config, kind, layer_type))
