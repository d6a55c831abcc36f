"""Rotary embeddings of the positions that a row says, with the scaling of the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.learner.megatron.models.architecture import Rotary


def rotary_of(hf_config: Any, head_dim: int, layer_type: str | None = None) -> Rotary:
    """Return the rotary embedding of a Hugging Face configuration, for one type of its layers where they differ."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"), **options)
    return Rotary(frequencies, float(scale))


def rotation_tables(rotaries: Sequence[Rotary], positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of positions [T] for each of R rotary embeddings: [R, 2, T, 1, 1, D]."""
    frequencies = torch.stack([rotary.frequencies for rotary in rotaries]).to(positions.device)
    angles = positions.float()[None, :, None] * frequencies[:, None]
    angles = torch.cat((angles, angles), -1)[:, :, None, None]
    scales = torch.tensor([rotary.scale for rotary in rotaries], device=positions.device)
    return (torch.stack((angles.cos(), angles.sin()), 1) * scales.view(-1, 1, 1, 1, 1, 1)).to(dtype)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate the first D dimensions of heads [T, 1, heads, head_dim] by cosines and sines [2, T, 1, 1, D]."""
    size = table.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * table[0] + torch.cat((-second, first), -1) * table[1]
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
