"""Rounding in the embedded engine, to sample like an engine with low-precision weights, inputs and cache.

Products stay in the engine's data type: every value that an engine with such kernels would multiply is rounded to its format and
back, while sums are unchanged. GPU kernels for the format give the same values, up to the order of their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.generation.torch.kv_cache import EnginePlan
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.mixers.chosen_tokens import IndexRows
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows
from strop.models.quantization.number_format import E4M3
from strop.models.quantization.quantization_plan import QuantizationPlan


@dataclass(frozen=True)
class EmulatedQuantization:
    """The plan of an engine, and whether its weights are rounded in the engine or before sending."""

    plan: QuantizationPlan
    rounds_weights: bool

    @property
    def needs_modules(self) -> bool:
        """Whether values are rounded between layers, which the compiled kernels do not support."""
        return self.plan.inputs is not None or self.plan.fp8_cache

    def select_layers(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names of quantised layers, given those of all linear layers."""
        selected = self.plan.select(f"{name}.weight" for name in names)
        return frozenset(name for name in names if f"{name}.weight" in selected)

    def check_covers(self, weights: Sequence[str], linears: Sequence[str]) -> None:
        """Raises ValueError if the plan selects weights outside ``linears``, the layers that the engine can round."""
        beyond = sorted(self.plan.select(weights) - {f"{name}.weight" for name in linears})
        if beyond:
            raise ValueError(
                f"policy.generation: found {self.plan.weights.name} with the torch engine, which rounds only linear layers, and "
                f"{beyond[0]} is not one; set policy.generation.backend=vllm, or exclude such layers with "
                "policy.generation.vllm_cfg.quantization_ignored_layer_kws"
            )


@dataclass(frozen=True, eq=False)
class RoundedCache:
    """An attention plan whose keys and values are rounded to E4M3 when written, with scale 1, vLLM's default."""

    plan: EnginePlan

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return self.plan.attend(query, _round_e4m3(key), _round_e4m3(value), spec)

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        return self.plan.choose(rows, layer)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        return self.plan.convolve(inputs, weight, bias, spec)

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        return self.plan.scan(recurrence, rows, spec)


def _round_e4m3(tensor: Tensor) -> Tensor:
    return E4M3.round(tensor.to(torch.float32)).to(tensor.dtype)
