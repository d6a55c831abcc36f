"""Which tensors of a model are fake-quantised, and to which format: ordered rules over the names of quantisers, as in ModelOpt.

A linear layer ``model.layers.0.mlp.down_proj`` has the quantisers ``model.layers.0.mlp.down_proj.weight_quantizer`` and
``model.layers.0.mlp.down_proj.input_quantizer``. Rules apply in order, and later ones win. This module imports no torch: configurations are
checked with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Quantizer = Literal["weight_quantizer", "input_quantizer"]

# What Hugging Face's layers are called by Megatron Core and by vLLM, which fuse some of them: a rule for any name is one for all.
_OTHER_NAMES = {
    "q_proj": ("qkv_proj", "linear_qkv"),
    "k_proj": ("qkv_proj", "linear_qkv"),
    "v_proj": ("qkv_proj", "linear_qkv"),
    "o_proj": ("linear_proj",),
    "gate_proj": ("gate_up_proj", "linear_fc1"),
    "up_proj": ("gate_up_proj", "linear_fc1"),
    "gate_up_proj": ("gate_proj", "up_proj", "linear_fc1"),
    "down_proj": ("linear_fc2",),
    "lm_head": ("output_layer",),
}
_OTHER_PARTS = (
    (".self_attn.", ".self_attention."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.experts.", ".experts."),
)


@dataclass(frozen=True)
class QuantizerFormat:
    """The format of one quantiser."""

    name: str  # of a number format: fp8_tensor, fp8_row, fp8_block, fp8_group, mxfp8, mxfp4_ceil, nvfp4, nvfp4_32
    constant_amax: bool = False  # the scale is 1: values are rounded as they are

    @property
    def static_inputs(self) -> bool:
        """Whether inputs in this format have a scale of the whole tensor, which is calibrated once (``input_quantizer`` of ModelOpt)."""
        return not self.constant_amax and self.name in ("fp8_tensor", "nvfp4", "nvfp4_32")


@dataclass(frozen=True)
class QuantizerRule:
    """A rule about all quantisers whose name a pattern matches, as in ``fnmatch``."""

    pattern: str
    enabled: bool
    format: QuantizerFormat | None = None  # None: that of an earlier rule


@dataclass(frozen=True)
class QuantizerRules:
    """The rules of one configuration."""

    source: str  # the name or the file, for messages
    rules: tuple[QuantizerRule, ...]

    def weight_format(self, layer: str) -> QuantizerFormat | None:
        """Return the format of the weight of a linear layer, by the name of the layer in the Hugging Face model; None: not quantised."""
        return self._find(layer, "weight_quantizer")

    def input_format(self, layer: str) -> QuantizerFormat | None:
        """Return the format of the input of a linear layer; None: not quantised."""
        return self._find(layer, "input_quantizer")

    def find(self, quantizer: str) -> QuantizerFormat | None:
        """Return the format of the quantiser with this very name; None: it is disabled."""
        return self._apply([quantizer])

    @property
    def may_calibrate(self) -> bool:
        """Whether the inputs of any layer may have a static scale, which needs calibration."""
        inputs = (rule for rule in self.rules if rule.enabled and _may_match(rule.pattern, "input_quantizer"))
        return any(rule.format is not None and rule.format.static_inputs for rule in inputs)

    @property
    def rounds_inputs(self) -> bool:
        """Whether the inputs of any layer may be rounded."""
        return any(rule.enabled and _may_match(rule.pattern, "input_quantizer") for rule in self.rules)

    def _find(self, layer: str, quantizer: Quantizer) -> QuantizerFormat | None:
        return self._apply([f"{name}.{quantizer}" for name in other_names(layer)])

    def _apply(self, names: Sequence[str]) -> QuantizerFormat | None:
        enabled, chosen = False, None
        for rule in self.rules:
            if any(fnmatchcase(name, rule.pattern) for name in names):
                enabled, chosen = rule.enabled, rule.format or chosen
        return chosen if enabled else None


def other_names(layer: str) -> list[str]:
    """Return the names that a layer has in Hugging Face's models, in Megatron Core and in vLLM."""
    names = [layer]
    for here, there in _OTHER_PARTS:
        names += [name.replace(here, there) for name in names if here in name]
    return [each for name in dict.fromkeys(names) for each in _renamed(name)]


def _renamed(name: str) -> Iterator[str]:
    folder, dot, last = name.rpartition(".")
    yield name
    for other in _OTHER_NAMES.get(last, ()):
        yield f"{folder}{dot}{other}"


def _may_match(pattern: str, quantizer: str) -> bool:
    """Return whether a pattern may match a quantiser of this kind: its end does."""
    end = pattern.rpartition(".")[2].lstrip("*")
    return pattern == "*" or pattern.endswith("*") or quantizer.endswith(end) or end in quantizer
