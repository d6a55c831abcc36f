"""vLLM's arguments for an engine whose weights are quantised at each publish.

vLLM builds the layers of a serialised checkpoint in FP8, with dummy weights; every publish then brings bfloat16, which the worker
quantises (``quantized_load``) and vLLM loads like such a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.generation.generation_config import GenerationConfig
from strop.generation.quantized_rollouts import make_rollout_plan
from strop.models.loading import list_weight_names
from strop.models.quantization.quantization_plan import QuantizationPlan

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MX = {"quant_method": "modelopt", "quant_algo": "MXFP8"}


def kernel_plan(generation: GenerationConfig) -> QuantizationPlan | None:
    """Return the quantisation of vLLM's kernels; None: weights are used as sent, perhaps rounded."""
    return None if generation.quantization.emulate else make_rollout_plan(generation)


def make_fp8_args(generation: GenerationConfig, model: str) -> dict[str, Any]:
    """Return vLLM's arguments for quantised weights; empty if they are not. ``model``: a folder with the model's configuration."""
    plan = kernel_plan(generation)
    if plan is None:
        return {}
    names = list_weight_names(Path(model))
    selected = plan.select(names)
    ignored = sorted(name.removesuffix(".weight") for name in names if name.endswith(".weight") and name not in selected)
    if plan.weights.columns == 32:
        config: dict[str, Any] = {**MX, "ignore": ignored, "exclude_modules": ignored}
    else:
        config = {**BLOCKS, "ignored_layers": ignored}
    return {"hf_overrides": {"quantization_config": config}}


def merge_overrides(args: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's ``extra`` arguments into ``args``; ``hf_overrides`` is merged field by field."""
    merged = {**args, **extra}
    if "hf_overrides" in args and isinstance(extra.get("hf_overrides"), Mapping):
        merged["hf_overrides"] = {**args["hf_overrides"], **extra["hf_overrides"]}
    return merged


def fp8_environment(generation: GenerationConfig) -> dict[str, str]:
    """Return environment variables of an engine with quantised weights.

    DeepGEMM is off: it would round block scales to powers of two again, so the engine would not use the published weights.
    """
    plan = kernel_plan(generation)
    if plan is None or plan.weights.columns == 32:
        return {}
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} | ({"VLLM_USE_DEEP_GEMM": "1"} if generation.vllm_cfg.use_deep_gemm else {})
