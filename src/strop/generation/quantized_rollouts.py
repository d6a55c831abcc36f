"""The quantisation of rollouts that a configuration requests: planned for engines, and emulated by the embedded engine.

Products stay in the engine's data type: every value that an engine with such kernels would multiply is rounded to its format and
back, while sums are unchanged. GPU kernels for the format give the same values, up to the order of their sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.generation.generation_config import GenerationConfig
from strop.generation.torch.kv_cache import EnginePlan
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.mixers.indexers import IndexRows
from strop.models.mixers.recurrence import MixerSpec, Recurrence, Rows
from strop.models.quantization.number_format import E4M3, NUMBER_FORMATS, quantize
from strop.models.quantization.quantization_plan import FUSED_EXPERTS, QuantizationPlan, make_plan, pack, packed_size
from strop.weight_sync.weight_source import SentPrecision


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


@dataclass(frozen=True)
class PlannedPrecision:
    """Rounds published weights by a plan."""

    plan: QuantizationPlan
    dtype: torch.dtype  # the engine's compute dtype: weights are cast to it and then rounded
    by_engine: bool
    packs: bool = False  # weights quantised by the engine are sent quantised

    def packed_size(self, name: str, shape: Sequence[int]) -> int | None:
        rows = self.plan.weights.rows
        halves = name.endswith(FUSED_EXPERTS) and rows is not None and shape[-2] % (2 * rows)  # blocks of both
        return packed_size(shape, self.plan.weights) if self.packs and len(shape) >= 2 and not halves else None

    def pack(self, tensor: Tensor) -> Tensor:
        return pack(quantize(tensor.to(self.dtype), self.plan.weights))

    def select(self, names: Iterable[str]) -> frozenset[str]:
        return self.plan.select(names)

    def round(self, tensor: Tensor) -> Tensor:
        return self.plan.round_weight(tensor.to(self.dtype)).to(tensor.dtype)


def make_rollout_plan(generation: GenerationConfig) -> QuantizationPlan | None:
    """Return the quantisation plan of the engine's weights; None: not quantised."""
    name, options = generation.weight_format, generation.vllm_cfg
    if name is None:
        return None
    return make_plan(
        NUMBER_FORMATS[name],
        pow2_inputs=bool(options.pow2_activation_scaling_factors),
        ignored=options.quantization_ignored_layer_kws,
        first_layers=options.num_first_layers_in_bf16,
        last_layers=options.num_last_layers_in_bf16,
        fp8_cache=options.fp8_cache,
    )


def make_emulation(generation: GenerationConfig, *, rounds_weights: bool) -> EmulatedQuantization | None:
    """Return the rounding done by the torch engine; None: none.

    ``rounds_weights``: its weights are the learner's own, and were not rounded before sending."""
    plan = make_rollout_plan(generation)
    return None if plan is None else EmulatedQuantization(plan, rounds_weights)


def make_weight_rounding(generation: GenerationConfig, precision: str) -> SentPrecision | None:
    """Return the rounding of published weights; None: not rounded.

    ``precision``: the compute precision of the torch engine."""
    plan = make_rollout_plan(generation)
    if plan is None:
        return None
    name = generation.engine_options.dtype if generation.uses_engines else precision
    by_engine = generation.uses_vllm and not generation.quantization.emulate
    return PlannedPrecision(plan, getattr(torch, name), by_engine, packs=by_engine and generation.quantization.send_quantized)
