"""What a family says of a model: the fields of Megatron Core's configuration and what each layer is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

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
