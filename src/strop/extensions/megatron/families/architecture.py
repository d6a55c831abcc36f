"""What a family says of a model: the fields of Megatron Core's configuration and what each layer is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from strop.models.attention.rotary_scaling import scaled_rotary_frequencies

NormKind = Literal["rms", "rms_plus_one", "layer_norm_plus_one"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding: ``frequencies`` [D / 2] of the D first dimensions of a head, cosines and sines times ``scale``."""

    frequencies: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class LayerDesign:
    """What one layer has that others may lack."""

    window: int | None = None  # a token attends to itself and to the window - 1 positions before it
    rotary: int = 0  # index into Architecture.rotaries
    experts: bool = False


@dataclass(frozen=True, eq=False)
class Architecture:
    """A language model, as ``build_stages`` needs it."""

    transformer: Mapping[str, Any]  # fields of Megatron Core's TransformerConfig
    layers: tuple[LayerDesign, ...]
    rotaries: tuple[Rotary, ...]
    vocab_size: int
    tied: bool
    padding_token: int | None = None  # reading it does not train its embedding, as in Transformers
    norm: NormKind = "rms"
    post_norms: bool = False  # norms of what attention and MLP add to the residual stream
    softcap: float | None = None  # of attention scores
    embedding_scale: float = 1.0
    latent_attention: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)


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
