"""What a family says of a model: fields of Megatron Core's configuration, layers, weights; and what most decoders have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

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


class Piece(NamedTuple):
    """Rows of a Hugging Face weight that are adjacent in the whole Megatron Core parameter, that of all ranks one after another."""

    whole: int  # the first of them in the whole parameter
    start: int  # in the Hugging Face weight
    length: int


class RowOrder(Protocol):
    """How the rows of a Hugging Face weight lie in a whole parameter."""

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        """Return where ``rows`` rows are in a parameter that ``ranks`` ranks share."""
        ...

    def size(self, rows: int, ranks: int) -> int:
        """Return the rows of the whole parameter."""
        ...


@dataclass(frozen=True)
class SameOrder:
    """The parameter is the weight, with rows of padding if ``padded``."""

    padded: bool = False

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        return (Piece(0, 0, rows),)

    def size(self, rows: int, ranks: int) -> int:
        return -(-rows // ranks) * ranks if self.padded else rows


@dataclass(frozen=True)
class QkvOrder:
    """Queries, keys and values in one parameter: for each group of heads its queries, its key, its value."""

    heads: int
    groups: int
    head_size: int
    part: int  # 0 queries, 1 keys, 2 values

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        queries = self.heads // self.groups * self.head_size
        offset = (0, queries, queries + self.head_size)[self.part]
        length = queries if self.part == 0 else self.head_size
        stride = queries + 2 * self.head_size
        return [Piece(group * stride + offset, group * length, length) for group in range(self.groups)]

    def size(self, rows: int, ranks: int) -> int:
        return (self.heads + 2 * self.groups) * self.head_size


@dataclass(frozen=True)
class GatedOrder:
    """Gate and up projection in one parameter: each rank has its rows of the gate, then its rows of the other."""

    part: int | None  # 0 gate, 1 up; None: the weight has both, first the whole gate

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        parts = (0, 1) if self.part is None else (self.part,)
        length = self.size(rows, ranks) // 2 // ranks
        return [
            Piece((2 * rank + part) * length, (index * ranks + rank) * length, length)
            for index, part in enumerate(parts)
            for rank in range(ranks)
        ]

    def size(self, rows: int, ranks: int) -> int:
        return rows if self.part is None else 2 * rows


@dataclass(frozen=True)
class WeightRule:
    """A weight's two names. ``layers.`` at the beginning stands for the layer's module, ``{expert}`` for the expert."""

    name: str  # in the Hugging Face model
    parameter: str  # in a stage
    dim: int | None = None  # of a matrix, that tensor-parallel ranks divide
    order: RowOrder = field(default=SameOrder())
    dtype: torch.dtype | None = None  # None is that of the model
    aliases: tuple[str, ...] = ()  # other names that files have for it
    # For the experts of a layer, one tensor in the module: the names of one expert's parts in files that have them separately.
    expert_files: tuple[str, ...] = ()

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.parameter


def qkv_rules(heads: int, groups: int, head_size: int) -> Sequence[WeightRule]:
    return [
        WeightRule(
            f"layers.self_attn.{part}_proj.{kind}",
            f"layers.self_attention.linear_qkv.{kind}",
            0,
            QkvOrder(heads, groups, head_size, index),
        )
        for index, part in enumerate("qkv")
        for kind in ("weight", "bias")
    ]


def glu_rules(name: str, parameter: str) -> Sequence[WeightRule]:
    """Return the rules of a gated MLP, from the names of its modules in a layer."""
    return (
        WeightRule(f"layers.{name}gate_proj.weight", f"layers.{parameter}linear_fc1.weight", 0, GatedOrder(0)),
        WeightRule(f"layers.{name}up_proj.weight", f"layers.{parameter}linear_fc1.weight", 0, GatedOrder(1)),
        WeightRule(f"layers.{name}down_proj.weight", f"layers.{parameter}linear_fc2.weight", 1),
    )


def expert_rules(gate: str, up: str, down: str, files: str = "layers.mlp.experts") -> Sequence[WeightRule]:
    """Return the rules of routed experts; ``gate``, ``up`` and ``down`` are the names that files have for an expert's matrices."""
    apart = f"{files}.{{expert}}"
    local = "layers.mlp.experts.local_experts.{expert}"
    return (
        WeightRule(
            "layers.mlp.experts.gate_up_proj",
            f"{local}.linear_fc1.weight",
            0,
            GatedOrder(None),
            expert_files=(f"{apart}.{gate}.weight", f"{apart}.{up}.weight"),
        ),
        WeightRule("layers.mlp.experts.down_proj", f"{local}.linear_fc2.weight", 1, expert_files=(f"{apart}.{down}.weight",)),
    )


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
