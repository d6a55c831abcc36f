"""The dimensions of a decoder, measured on its modules: the matrices that a token is multiplied with, and what is attended to.

The model is built without values, which takes a tenth of a second whatever its size. Only matrices count: norms, biases and sinks are less
than a thousandth of a model and of its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from strop.extensions.performance.devices import DecoderDimensions, LayerDimensions
from strop.models.layers.known_code import decoder_layers
from strop.models.loading import quiet_transformers

KINDS = ("full_attention", "sliding_attention")


class UnknownDimensions(ValueError):
    """A model with layers that cannot be counted."""


def dimensions_of(values: Mapping[str, Any]) -> DecoderDimensions:
    """Return the dimensions of a model by its ``config.json`` (or ``config.to_dict()``); of one that reads images, of its language model.

    Raises UnknownDimensions for layers without attention over all or the last tokens (states, linear attention), and for encoders.
    """
    from transformers import AutoModel

    config = read_config(values)
    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise UnknownDimensions(f"{config.model_type} has an encoder, and decoders alone are counted")
    with quiet_transformers(), torch.device("meta"):
        decoder = AutoModel.from_config(text)
    layers = tuple(_measure_layer(layer, index, text) for index, layer in enumerate(decoder_layers(decoder)))
    vocabulary, hidden = decoder.get_input_embeddings().weight.shape
    return DecoderDimensions(hidden=hidden, vocabulary=vocabulary, tied=bool(config.tie_word_embeddings), layers=layers)


def read_config(values: Mapping[str, Any]) -> Any:
    """Return Transformers' configuration of a ``config.json``. Raises UnknownDimensions for a ``model_type`` that it does not have."""
    from transformers import CONFIG_MAPPING

    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnknownDimensions(f"model_type is {kind!r}, which the installed Transformers does not have")
    with quiet_transformers():
        return CONFIG_MAPPING[kind].from_dict(dict(values))


def _measure_layer(layer: nn.Module, index: int, config: Any) -> LayerDimensions:
    attention = _find_attention(layer, index, config)
    config = config.per_layer_config[index] if config.is_heterogeneous else config  # layers differ in heads (Gemma 4)
    expert_matrices = [each for each in _matrices(layer) if each.dim() == 3]  # stacked [experts, out, in]
    beside = _count(each for each in _matrices(layer) if each.dim() == 2) - _count(_matrices(attention))
    resident = _count(expert_matrices)
    experts = len(expert_matrices[0]) if expert_matrices else 1
    chosen = getattr(config, "num_experts_per_tok", None) or config.top_k_experts if expert_matrices else 1
    query, value, cache = _widths(attention, config)
    return LayerDimensions(
        attention=_count(_matrices(attention)),
        mlp=beside + resident * chosen // experts,
        resident=beside + resident,
        query_width=query,
        value_width=value,
        cache_width=cache,
        window=_window(index, config),
    )


def _find_attention(layer: nn.Module, index: int, config: Any) -> nn.Module:
    found = [module for module in layer.children() if type(module).__name__.endswith("Attention")]
    types = getattr(config, "layer_types", None) or KINDS
    has_states = any(isinstance(module, nn.Conv1d) for module in layer.modules())  # before states or linear attention
    if len(found) != 1 or has_states or (types is not KINDS and types[index] not in KINDS):
        raise UnknownDimensions(
            f"{type(layer).__name__} is no layer of attention over all tokens or the last ones, which alone are counted"
        )
    return found[0]


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [each for name, each in module.named_parameters() if each.dim() >= 2 and "bias" not in name]


def _count(matrices: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() for each in matrices)


def _widths(attention: Any, config: Any) -> tuple[int, int, int]:
    """Return the widths of queries and values over all heads, and the numbers that a token leaves in the cache."""
    heads = config.num_attention_heads
    if rank := getattr(
        config, "kv_lora_rank", None
    ):  # latent attention (arXiv:2405.04434): as training computes it, of every head
        turned = config.qk_rope_head_dim
        return heads * (config.qk_nope_head_dim + turned), heads * config.v_head_dim, rank + turned
    size = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None) or config.hidden_size // heads
    pairs = getattr(attention, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or heads
    return heads * size, heads * size, 2 * pairs * size


def _window(index: int, config: Any) -> int | None:
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types is not None:
        return window if types[index] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None
