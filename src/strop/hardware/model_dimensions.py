"""The dimensions of a decoder, using only its ``config.json``: the matrices that a token is multiplied with, and its attention.

Only matrices count. Norms, biases and sinks are less than a thousandth of a model and of its arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class UnknownDimensions(ValueError):
    """A configuration with layers of an unknown kind. The message names its ``model_type``."""


# Decoders with full or sliding attention and gated MLPs.
GATED = frozenset((
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2", "olmo3", "granite",
    "smollm3", "seed_oss", "glm4", "cohere", "cohere2", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe",
    "deepseek_v2", "deepseek_v3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "smolvlm_text", "exaone4",
))  # fmt: skip
UNGATED = frozenset(("nemotron", "starcoder2", "gpt_neox", "phi"))  # MLPs of two matrices
SPARSE = frozenset(
    ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "qwen3_vl_moe_text")
)


@dataclass(frozen=True, kw_only=True)
class LayerDimensions:
    """One layer of a decoder."""

    attention: int  # parameters of its attention's matrices
    mlp: int  # parameters of the MLP matrices that one token is multiplied with: its experts, the shared ones, the router
    resident: int  # parameters of its MLP in memory: all experts
    query_width: int  # over all heads: the inner dimension of query-key products
    value_width: int  # of all heads
    cache_width: int  # numbers per token in the KV cache
    window: int | None = None  # number of tokens that a token attends to, including itself; None: all before it


@dataclass(frozen=True, kw_only=True)
class DecoderDimensions:
    """A decoder: its layers, and its embedding, which the output layer may share."""

    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerDimensions, ...]

    @property
    def parameters(self) -> int:
        """Matrix parameters in memory, with all experts."""
        body = sum(layer.attention + layer.resident for layer in self.layers)
        return body + self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def cache_width(self) -> int:
        """Numbers per token in the KV cache, over all layers. A window drops them again."""
        return sum(layer.cache_width for layer in self.layers)


def dimensions_of(values: Mapping[str, Any]) -> DecoderDimensions:
    """Return the dimensions in a model's ``config.json`` (or ``config.to_dict()``); for a model that reads images, its language
    model's.

    Raises UnknownDimensions for an unknown kind of layers (state space, linear attention, encoders).
    """
    text = _text_config(values)
    kind = str(text.get("model_type"))
    if kind not in GATED | UNGATED:
        known = ", ".join(sorted(GATED | UNGATED))
        raise UnknownDimensions(f"model_type is {kind!r}, whose layers are unknown: parameters and FLOPs are counted for {known}")
    try:
        layers = tuple(_layer(text, index, kind) for index in range(text["num_hidden_layers"]))
        hidden, vocabulary = int(text["hidden_size"]), int(text["vocab_size"])
    except (KeyError, TypeError) as error:
        raise UnknownDimensions(f"the configuration of this {kind} lacks a size: {error}") from error
    tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings", TIED_BY_DEFAULT.get(kind, False)))
    return DecoderDimensions(hidden=hidden, vocabulary=vocabulary, tied=bool(tied), layers=layers)


# Values omitted in a config.json that equal Transformers' default.
TIED_BY_DEFAULT: Mapping[str, bool] = {"gemma": True, "gemma2": True, "gemma3_text": True, "cohere": True, "cohere2": True}
HEAD_SIZE: Mapping[str, int] = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "qwen3": 128}


def _text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    text = values.get("text_config")
    if isinstance(text, Mapping):
        return text
    # Qwen2-VL's older files have the language model's sizes at the same level as the vision tower's
    kind = values.get("model_type")
    return {**values, "model_type": f"{kind}_text"} if kind in ("qwen2_vl", "qwen2_5_vl") else values


def _layer(text: Mapping[str, Any], index: int, kind: str) -> LayerDimensions:
    latent = text.get("kv_lora_rank") is not None
    attention, query, value, cache = _latent_attention(text) if latent else _grouped_attention(text, kind)
    active, resident = _mlp(text, index, kind)
    return LayerDimensions(
        attention=attention,
        mlp=active,
        resident=resident,
        query_width=query,
        value_width=value,
        cache_width=cache,
        window=_window(text, index),
    )


def _grouped_attention(text: Mapping[str, Any], kind: str) -> tuple[int, int, int, int]:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    pairs = text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or HEAD_SIZE.get(kind) or hidden // heads
    return 2 * hidden * heads * size + 2 * hidden * pairs * size, heads * size, heads * size, 2 * pairs * size


def _latent_attention(text: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), as computed in training: keys and values for every head."""
    hidden, heads, rank = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    plain, turned, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    query_rank = text.get("q_lora_rank")
    query = heads * (plain + turned)
    queries = hidden * query if query_rank is None else hidden * query_rank + query_rank * query
    keys = hidden * (rank + turned) + rank * heads * (plain + value)
    return queries + keys + heads * value * hidden, query, heads * value, rank + turned


def _mlp(text: Mapping[str, Any], index: int, kind: str) -> tuple[int, int]:
    """Return the parameters that a token is multiplied with, and the parameters in memory."""
    hidden, matrices = text["hidden_size"], 3 if kind in GATED else 2
    if kind not in SPARSE or not _has_experts(text, index):
        dense = matrices * hidden * text["intermediate_size"]
        return dense, dense
    experts = next(text[name] for name in ("n_routed_experts", "num_experts", "num_local_experts") if text.get(name))
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = matrices * hidden * width * (text.get("n_shared_experts") or 0)
    if text.get("shared_expert_intermediate_size") and kind == "qwen2_moe":
        shared = matrices * hidden * text["shared_expert_intermediate_size"] + hidden  # and its gate
    always = shared + hidden * experts  # and the router
    expert = matrices * hidden * width
    return always + expert * text["num_experts_per_tok"], always + expert * experts


def _has_experts(text: Mapping[str, Any], index: int) -> bool:
    """Return whether a layer of a sparse model has experts: in some models, the first layers or every other one are dense."""
    if index < (text.get("first_k_dense_replace") or 0) or index in (text.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % (text.get("decoder_sparse_step") or 1) == 0


def _window(text: Mapping[str, Any], index: int) -> int | None:
    """Return the window of a layer: ``layer_types`` lists the layers with one; in Mistral's older files all layers have it."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or text.get("use_sliding_window") is False:
        return None
    types = text.get("layer_types")
    if types is None:
        return (
            window
            if text.get("model_type") in ("mistral", "mixtral", "phi3", "starcoder2")
            else _alternating(text, index, window)
        )
    return window if types[index] == "sliding_attention" else None


def _alternating(text: Mapping[str, Any], index: int, window: int) -> int | None:
    """Return the window of a layer from the file's pattern or the family's: Gemma 2 every other layer, Gemma 3 five of six."""
    every = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4}.get(str(text.get("model_type")))
    every = text.get("sliding_window_pattern") if isinstance(text.get("sliding_window_pattern"), int) else every
    if every is None:  # Qwen: layers from max_window_layers on, where use_sliding_window
        return window if text.get("use_sliding_window") and index >= text.get("max_window_layers", 0) else None
    return None if (index + 1) % every == 0 else window
