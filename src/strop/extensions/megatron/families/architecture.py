"""What a family says of a model: fields of Megatron Core's configuration, layers, weights; and what most decoders have in common."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.models.attention.rotary_scaling import scaled_rotary_frequencies

NormKind = Literal["rms", "rms_wide", "rms_plus_one", "layer_norm_plus_one"]
MixerKind = Literal["attention", "delta_net", "mamba"]


@dataclass(frozen=True, eq=False)
class Rotary:
    """A rotary embedding: ``frequencies`` [D / 2] of the D first dimensions of a head, cosines and sines times ``scale``."""

    frequencies: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class LayerDesign:
    """What one layer has that others may lack."""

    window: int | None = None  # a token attends to itself and to the window - 1 positions before it
    rotary: int | None = 0  # index into Architecture.rotaries; None: positions are not encoded
    experts: bool = False
    mixer: MixerKind | None = "attention"  # None: only an MLP
    mlp: bool = True  # False: only a mixer
    chooser: int | None = None  # the layer whose indexer chooses the tokens that this one attends to


@dataclass(frozen=True)
class DeltaNetSizes:
    """A gated delta net: arXiv 2412.06464. Each key head serves ``value_heads / key_heads`` value heads."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int  # of the convolution, in tokens
    conv_bias: bool = False
    divided: ClassVar[str] = "key heads"

    @property
    def heads(self) -> int:
        """The number that tensor-parallel ranks divide."""
        return self.key_heads

    @property
    def convolved(self) -> tuple[int, ...]:
        """The channels of queries, keys and values."""
        keys = self.key_heads * self.key_size
        return keys, keys, self.value_heads * self.value_size

    @property
    def parts(self) -> tuple[int, ...]:
        """The rows of the projection: queries, keys, values, gate, beta, decay."""
        return *self.convolved, self.convolved[2], self.value_heads, self.value_heads


@dataclass(frozen=True)
class MambaSizes:
    """A Mamba 2 layer: arXiv 2405.21060. Heads of one group read and write their states by the same C and B."""

    inner_heads: int
    head_size: int
    groups: int
    state_size: int
    kernel: int
    conv_bias: bool
    step_limit: tuple[float, float]  # of the steps dt
    divided: ClassVar[str] = "groups of heads"

    @property
    def heads(self) -> int:
        """The number that tensor-parallel ranks divide."""
        return self.groups

    @property
    def inner(self) -> int:
        return self.inner_heads * self.head_size

    @property
    def convolved(self) -> tuple[int, ...]:
        """The channels of x, B and C."""
        return self.inner, self.groups * self.state_size, self.groups * self.state_size

    @property
    def parts(self) -> tuple[int, ...]:
        """The rows of the projection: gate, x, B, C, dt."""
        return self.inner, *self.convolved, self.inner_heads


@dataclass(frozen=True)
class IndexerSizes:
    """An indexer of DeepSeek Sparse Attention (arXiv 2512.02556), which every rank has whole."""

    heads: int
    head_size: int
    count: int  # tokens that it chooses
    interleaved: bool  # whether pairs of neighbours are rotated, or halves


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
    sinks: bool = False  # one more score of each query and head, without a value
    recurrent: DeltaNetSizes | MambaSizes | None = None  # of the layers whose mixer is not attention
    indexer: IndexerSizes | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layers_differ(self) -> bool:
        """Whether some layers have other parameters than others, so that checkpoints cannot stack them."""
        return len({(design.mixer, design.mlp, design.experts) for design in self.layers}) > 1


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
    step: int = 1  # between them in the Hugging Face weight

    @property
    def rows(self) -> slice:
        """The rows in the Hugging Face weight."""
        return slice(self.start, self.start + (self.length - 1) * self.step + 1, self.step)

    def of(self, weight: Tensor, dim: int) -> Tensor:
        """Return a view of the rows, or columns if ``dim`` is 1, of the Hugging Face weight."""
        return weight[(slice(None),) * dim + (self.rows,)]


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
    """Queries, keys and values in one parameter: for each group of heads its queries, its key, its value.

    ``gated``: each head's queries are followed by a gate of its output, and the parameter has a group's gates after its queries.
    """

    heads: int
    groups: int
    head_size: int
    part: int  # 0 queries, 1 keys, 2 values
    gated: bool = False

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        shared, size = self.heads // self.groups, self.head_size
        halves, adjacent = (2, 1) if self.gated else (1, shared)
        queries = halves * shared * size
        stride = queries + 2 * size
        if self.part:
            offset = queries + (self.part - 1) * size
            return [Piece(group * stride + offset, group * size, size) for group in range(self.groups)]
        return [
            Piece(
                head // shared * stride + (half * shared + head % shared) * size,
                (halves * head + half * adjacent) * size,
                adjacent * size,
            )
            for head in range(0, self.heads, adjacent)
            for half in range(halves)
        ]

    def size(self, rows: int, ranks: int) -> int:
        return (self.heads * (2 if self.gated else 1) + 2 * self.groups) * self.head_size


@dataclass(frozen=True)
class PartsOrder:
    """Several matrices in one parameter: each rank has its rows of the first, then its rows of the second, and so on."""

    shares: tuple[int, ...]  # of the rows of the parameter that each part has
    parts: tuple[int, ...]  # those that the weight has, in its order
    blocks: int = 1  # groups of rows in the weight, with an equal number of each part's

    def pieces(self, rows: int, ranks: int) -> Sequence[Piece]:
        sizes = self._sizes(rows)
        lengths = [sizes[part] // self.blocks for part in self.parts]  # in a block
        found: list[Piece] = []
        start = 0
        if set(lengths) == {1}:  # as many pieces as parts, not as rows
            for place, part in enumerate(self.parts):
                found += self._cut(sizes, part, ranks, Piece(0, place, self.blocks, len(self.parts)))
            return found
        for block in range(self.blocks):
            for part, length in zip(self.parts, lengths, strict=True):
                found += self._cut(sizes, part, ranks, Piece(block * length, start, length))
                start += length
        return found

    def _sizes(self, rows: int) -> list[int]:
        unit = rows // sum(self.shares[part] for part in self.parts)
        return [share * unit for share in self.shares]

    @staticmethod
    def _cut(sizes: Sequence[int], part: int, ranks: int, piece: Piece) -> Iterator[Piece]:
        """Cut rows of a part, of which ``whole`` is the first in the part, at the ends of ranks."""
        share, first, last = sizes[part] // ranks, piece.whole, piece.whole + piece.length
        for rank in range(first // share, -(-last // share)):
            low, high = max(first, rank * share), min(last, (rank + 1) * share)
            before = (rank * sum(sizes) + sum(sizes[:part])) // ranks
            yield Piece(before + low - rank * share, piece.start + (low - first) * piece.step, high - low, piece.step)

    def size(self, rows: int, ranks: int) -> int:
        return sum(self._sizes(rows))


GATE, UP, GATE_AND_UP = (PartsOrder((1, 1), parts) for parts in ((0,), (1,), (0, 1)))


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
    transposed: bool = False  # the Hugging Face weight has the parameter's columns as rows

    @property
    def of_experts(self) -> bool:
        return "{expert}" in self.parameter


LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def find_rule(rules: Mapping[str, WeightRule], name: str) -> WeightRule:
    """Return the rule of a weight: that of its full name, or of its name in any layer. Raises ValueError if there is none."""
    rule = rules.get(name) or rules.get(LAYER.sub("layers.", name))
    if rule is None:
        raise ValueError(f"{name} has no place in Megatron Core's model: set policy.backend=torch")
    return rule


def text_name(name: str) -> str:
    """Return a weight's name without that of the language model, of a model that reads images."""
    head, found, tail = name.partition("language_model.")
    return f"{head}{tail}" if found and head in ("", "model.") else name


def name_in_file(name: str, layer: int | None, expert: int | None) -> str:
    """Return a name of a rule as it stands in a file, for a layer and an expert."""
    return re.sub(r"^(?:(\w+)\.)?layers\.(?!\d)", lambda found: f"{found[1] or 'model'}.layers.{layer}.", name).format(
        expert=expert
    )


def qkv_rules(
    heads: int, groups: int, head_size: int, *, module: str = "layers.self_attn.", gated: bool = False
) -> Sequence[WeightRule]:
    return [
        WeightRule(
            f"{module}{part}_proj.{kind}",
            f"layers.self_attention.linear_qkv.{kind}",
            0,
            QkvOrder(heads, groups, head_size, index, gated),
        )
        for index, part in enumerate("qkv")
        for kind in ("weight", "bias")
    ]


def glu_rules(name: str, parameter: str) -> Sequence[WeightRule]:
    """Return the rules of a gated MLP, from the names of its modules in a layer."""
    return (
        WeightRule(f"layers.{name}gate_proj.weight", f"layers.{parameter}linear_fc1.weight", 0, GATE),
        WeightRule(f"layers.{name}up_proj.weight", f"layers.{parameter}linear_fc1.weight", 0, UP),
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
            GATE_AND_UP,
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
        "ffn_hidden_size": getattr(hf_config, "intermediate_size", None) or hf_config.moe_intermediate_size,
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


def outer_rules(*, embedding: str = "model.embed_tokens.weight", norm: str = "model.norm") -> Sequence[WeightRule]:
    return (
        WeightRule(embedding, "embedding.word_embeddings.weight", dim=0, order=SameOrder(padded=True)),
        WeightRule("lm_head.weight", "output_layer.weight", dim=0, order=SameOrder(padded=True)),
        WeightRule("score.weight", "score.weight"),
        WeightRule(f"{norm}.weight", "decoder.final_layernorm.weight"),
        WeightRule(f"{norm}.bias", "decoder.final_layernorm.bias"),
    )


def attention_rules(hf_config: Any, *, module: str = "layers.self_attn.", gated: bool = False) -> Sequence[WeightRule]:
    """Return the rules of attention. ``gated``: its query projection makes a gate of its output too."""
    groups = hf_config.num_key_value_heads
    return (
        *qkv_rules(hf_config.num_attention_heads, groups, head_size(hf_config), module=module, gated=gated),
        WeightRule(f"{module}o_proj.weight", "layers.self_attention.linear_proj.weight", dim=1),
        WeightRule(f"{module}q_norm.weight", "layers.self_attention.q_layernorm.weight"),
        WeightRule(f"{module}k_norm.weight", "layers.self_attention.k_layernorm.weight"),
    )


def norm_rules() -> Sequence[WeightRule]:
    names = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"}
    return [
        WeightRule(f"layers.{name}.{kind}", f"layers.{parameter}.{kind}")
        for name, parameter in names.items()
        for kind in ("weight", "bias")
    ]
