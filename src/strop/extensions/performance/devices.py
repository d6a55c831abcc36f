"""Devices with their peak arithmetic, and the arithmetic that a decoder needs.

Rates are the vendors' own, for dense matrices (data sheets print twice as much, with 2:4 sparsity) with float32 accumulation.

FLOPs: a multiply-add is 2, and recomputation (checkpointed layers, logits) is not counted. A forward pass over T tokens of which N are
predicted, with P (query, key) pairs in each layer:

    2 T sum(layer matrices) + 2 P (query width + value width) + 2 N hidden vocabulary

A backward pass is twice that: once for the inputs and once for the weights, which frozen weights (LoRA) do not need. The same as
"6 N D" (Kaplan et al., arXiv:2001.08361) with attention and the output layer counted as they are; of experts only the chosen ones
(Narayanan et al., arXiv:2104.04473, count dense models like this).

The model is built without values, which takes a tenth of a second whatever its size. Only matrices count: norms, biases and sinks are less
than a thousandth of a model and of its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strop.models.layers.known_code import decoder_layers
from strop.models.loading import quiet_transformers


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, as its vendor describes it."""

    name: str  # as written by users, in any case: h100
    bf16_tflops: float  # 10^12 FLOPs per second; a multiply-add is 2
    fp8_tflops: float | None  # None: it has no FP8 arithmetic
    fp32_tflops: float  # without TF32
    memory_gib: float  # GiB that the driver reports
    names: tuple[str, ...] = ()  # its names in torch and NVML; the first table entry contained in a device's name matches

    def peak_flops(self, precision: str) -> float:
        """Return FLOPs per second in ``precision``: bfloat16, float16, fp8 or float32. Raises ValueError for unsupported ones."""
        rates = {
            "bfloat16": self.bf16_tflops,
            "float16": self.bf16_tflops,
            "fp8": self.fp8_tflops,
            "float32": self.fp32_tflops,
        }
        rate = rates.get(precision)
        if rate is None:
            known = ", ".join(name for name, each in rates.items() if each is not None)
            raise ValueError(f"{self.name} has no rate for {precision!r}: it has {known}")
        return rate * 1e12


# Sources: the data sheets of A100, H100, H200, L40S, HGX B200 and GB200 NVL72, and the architecture paper of Ada (RTX 4090, with
# sums in float32). Memory is what nvidia-smi shows. Order matters: "NVIDIA H100 PCIe" is found before "NVIDIA H100".
DEVICES: tuple[Device, ...] = (
    Device(
        name="A100-40GB", names=("A100-SXM4-40GB", "A100-PCIE-40GB"), bf16_tflops=312, fp8_tflops=None, fp32_tflops=19.5,
        memory_gib=40.0,
    ),
    Device(
        name="A100", names=("A100",), bf16_tflops=312, fp8_tflops=None, fp32_tflops=19.5,
        memory_gib=80.0,
    ),
    Device(
        name="H100-PCIe", names=("H100 PCIe",), bf16_tflops=756, fp8_tflops=1513, fp32_tflops=51,
        memory_gib=79.6,
    ),
    Device(
        name="H100-NVL", names=("H100 NVL",), bf16_tflops=835, fp8_tflops=1671, fp32_tflops=60,
        memory_gib=93.6,
    ),
    Device(
        name="H100", names=("H100",), bf16_tflops=989, fp8_tflops=1979, fp32_tflops=67,
        memory_gib=79.6,
    ),
    Device(
        name="H200", names=("H200",), bf16_tflops=989, fp8_tflops=1979, fp32_tflops=67,
        memory_gib=140.4,
    ),
    Device(
        name="GB200", names=("GB200",), bf16_tflops=2500, fp8_tflops=5000, fp32_tflops=80,
        memory_gib=185.0,
    ),
    Device(
        name="B200", names=("B200",), bf16_tflops=2250, fp8_tflops=4500, fp32_tflops=80,
        memory_gib=179.1,
    ),
    Device(
        name="L40S", names=("L40S",), bf16_tflops=362, fp8_tflops=733, fp32_tflops=91.6,
        memory_gib=45.0,
    ),
    Device(
        name="RTX-4090", names=("RTX 4090",), bf16_tflops=165.2, fp8_tflops=330.3, fp32_tflops=82.6,
        memory_gib=24.0,
    ),
)  # fmt: skip


def device_named(name: str) -> Device:
    """Return a device by the user's name for it: ``h100``, ``RTX 4090``. Raises ValueError, listing the names in the table."""
    wanted = _plain(name)
    for device in DEVICES:
        if _plain(device.name) == wanted:
            return device
    raise ValueError(f"there is no device {name!r} in the table: it has {', '.join(device.name for device in DEVICES)}")


def find_device(reported: str) -> Device | None:
    """Return the device for a name reported by torch or NVML ("NVIDIA H100 80GB HBM3"); None if it is not in the table.

    None for a MIG slice, whose name does not fully determine its share of the device's arithmetic.
    """
    if "MIG" in reported:
        return None
    words = f" {reported} "
    return next((device for device in DEVICES for name in device.names if _stands_in(name, words)), None)


def _stands_in(name: str, words: str) -> bool:
    """Return whether ``name`` occurs in ``words`` as separate words: GB200 is not a B200, and "GH200" not an H200."""
    start = words.find(name)
    return start >= 0 and not words[start - 1].isalnum() and not words[start + len(name)].isalnum()


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace(" ", "").replace("_", "")


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


@dataclass(frozen=True, kw_only=True)
class PassCounts:
    """The token counts of a pass. ``pairs`` has an entry for each window size of the model's layers, with None for full
    attention.
    """

    read: int  # T
    predicted: int  # N
    pairs: dict[int | None, int]


def windows_of(model: DecoderDimensions) -> frozenset[int | None]:
    return frozenset(layer.window for layer in model.layers)


def forward_flops(model: DecoderDimensions, counts: PassCounts) -> float:
    """Count the FLOPs of a forward pass."""
    return _matrices(model, counts) + _attention(model, counts) + _output(model, counts)


def training_flops(model: DecoderDimensions, counts: PassCounts, *, frozen: bool = False) -> float:
    """Count the FLOPs of a forward and a backward pass. ``frozen``: the matrices have no gradients (LoRA)."""
    passes = 2 if frozen else 3
    return passes * (_matrices(model, counts) + _output(model, counts)) + 3 * _attention(model, counts)


def _matrices(model: DecoderDimensions, counts: PassCounts) -> float:
    return 2.0 * counts.read * sum(layer.attention + layer.mlp for layer in model.layers)


def _attention(model: DecoderDimensions, counts: PassCounts) -> float:
    return sum(2.0 * counts.pairs[layer.window] * (layer.query_width + layer.value_width) for layer in model.layers)


def _output(model: DecoderDimensions, counts: PassCounts) -> float:
    return 2.0 * counts.predicted * model.hidden * model.vocabulary


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
    expert_matrices = [each for each in _list_matrices(layer) if each.dim() == 3]  # stacked [experts, out, in]
    beside = _count(each for each in _list_matrices(layer) if each.dim() == 2) - _count(_list_matrices(attention))
    resident = _count(expert_matrices)
    experts = len(expert_matrices[0]) if expert_matrices else 1
    chosen = getattr(config, "num_experts_per_tok", None) or config.top_k_experts if expert_matrices else 1
    query, value, cache = _widths(attention, config)
    return LayerDimensions(
        attention=_count(_list_matrices(attention)),
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


def _list_matrices(module: nn.Module) -> list[nn.Parameter]:
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
