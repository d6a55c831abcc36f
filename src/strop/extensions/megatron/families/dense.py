"""What most decoders have in common: grouped-query attention, a gated MLP, root mean square norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from strop.extensions.megatron.families.architecture import Architecture, LayerDesign, rotary_of
from strop.extensions.megatron.families.weight_rules import SameOrder, WeightRule, glu_rules, qkv_rules


def squared_relu(hidden: Tensor) -> Tensor:
    return F.relu(hidden).square()


ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": squared_relu,
}


def head_size(hf_config: Any) -> int:
    return int(getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads)


def dense_fields(hf_config: Any, hidden_act: str | None = None) -> dict[str, Any]:
    """Return the fields of TransformerConfig that a configuration in Llama's form says."""
    return {
        "hidden_size": hf_config.hidden_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": head_size(hf_config),
        "ffn_hidden_size": hf_config.intermediate_size,
        "gated_linear_unit": True,
        "activation_func": activation(hf_config, hidden_act or hf_config.hidden_act),
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "add_bias_linear": False,
    }


def activation(hf_config: Any, name: str) -> Any:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{hf_config.model_type}: hidden_act={name} is not an activation of Megatron Core's model; it may be "
            f"{', '.join(sorted(ACTIVATIONS))}: set policy.backend=torch"
        )
    return ACTIVATIONS[name]


def dense_architecture(hf_config: Any, *, transformer: Mapping[str, Any] | None = None, **changes: Any) -> Architecture:
    """Return a decoder in Llama's form, with other fields of TransformerConfig, or ``changes`` of the architecture."""
    values: dict[str, Any] = {
        "transformer": dense_fields(hf_config) if transformer is None else transformer,
        "layers": (LayerDesign(),) * hf_config.num_hidden_layers,
        "vocab_size": hf_config.vocab_size,
        "tied": bool(hf_config.tie_word_embeddings),
        "padding_token": padding_token(hf_config),
        **changes,
    }
    if "rotaries" not in values:
        values["rotaries"] = (rotary_of(hf_config, head_size(hf_config)),)
    return Architecture(**values)


def padding_token(hf_config: Any) -> int | None:
    """Return the token id whose embedding Transformers does not train where it is read. A negative one counts from the end."""
    token = getattr(hf_config, "pad_token_id", None)
    return None if token is None else int(token) % int(hf_config.vocab_size)


def windowed_layers(hf_config: Any) -> tuple[LayerDesign, ...]:
    """Return layers of which those of type sliding_attention, or all where there are no types, have the window."""
    types = getattr(hf_config, "layer_types", None)
    window = getattr(hf_config, "sliding_window", None)
    if types is None:
        return (LayerDesign(window),) * int(hf_config.num_hidden_layers)
    return tuple(LayerDesign(window if kind == "sliding_attention" else None) for kind in types)


def dense_rules(hf_config: Any) -> Sequence[WeightRule]:
    """Return the rules of weights with Llama's names."""
    return (*outer_rules(), *attention_rules(hf_config), *norm_rules(), *glu_rules("mlp.", "mlp."))


def outer_rules() -> Sequence[WeightRule]:
    return (
        WeightRule("model.embed_tokens.weight", "embedding.word_embeddings.weight", dim=0, order=SameOrder(padded=True)),
        WeightRule("lm_head.weight", "output_layer.weight", dim=0, order=SameOrder(padded=True)),
        WeightRule("score.weight", "score.weight"),
        WeightRule("model.norm.weight", "decoder.final_layernorm.weight"),
        WeightRule("model.norm.bias", "decoder.final_layernorm.bias"),
    )


def attention_rules(hf_config: Any) -> Sequence[WeightRule]:
    groups = hf_config.num_key_value_heads
    return (
        *qkv_rules(hf_config.num_attention_heads, groups, head_size(hf_config)),
        WeightRule("layers.self_attn.o_proj.weight", "layers.self_attention.linear_proj.weight", dim=1),
        WeightRule("layers.self_attn.q_norm.weight", "layers.self_attention.q_layernorm.weight"),
        WeightRule("layers.self_attn.k_norm.weight", "layers.self_attention.k_layernorm.weight"),
    )


def norm_rules() -> Sequence[WeightRule]:
    names = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
    return [
        WeightRule(f"layers.{name}.{kind}", f"layers.{parameter}.{kind}")
        for name, parameter in names.items()
        for kind in ("weight", "bias")
    ]
