"""The quantisation of rollouts requested by a configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.generation.generation_config import GenerationConfig
from strop.generation.torch.emulated_quantization import EmulatedQuantization
from strop.models.quantization.number_format import NUMBER_FORMATS, quantize
from strop.models.quantization.quantization_plan import FUSED_EXPERTS, QuantizationPlan, make_plan, pack, packed_size
from strop.weight_sync.weight_source import SentPrecision


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
