"""Training in FP8 with torchao: linear layers round weights, inputs and gradients to FP8 and multiply in FP8 (``policy.fp8``).

The layers' class changes; parameters, names and checkpoints stay those of the plain model. (Scaling: arXiv 2209.05433; torchao's
``convert_to_float8_training``.)
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from strop.models.quantization.float8_config import Float8Config
from strop.packages import install_command

log = logging.getLogger(__name__)

LEAST_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}  # of GPUs
GPUS = {(8, 9): "Ada or newer", (9, 0): "Hopper or newer"}
MULTIPLE = 16  # required divisor of a layer's sizes in FP8 products
_ADAPTERS = (".lora_A.", ".lora_B.")


def convert_to_float8(model: Any, config: Float8Config, device: torch.device, section: str) -> None:
    """Make the linear layers of a model compute in FP8, in place, and log which ones do.

    ``device``: the training device; the model may still be elsewhere. ``section``: the key of ``config``, for messages. Raises
    ValueError on a device without FP8, and for a model without a suitable layer; ImportError without torchao.
    """
    if not config.enabled:
        return
    _check_device(config, device, section)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ImportError(
            f"{section}.enabled is true, which needs the package torchao: {install_command('fp8')}, or set it to false"
        ) from error
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    counts: Counter[str] = Counter()

    def takes_part(module: nn.Module, name: str) -> bool:
        kept = _find_reason_to_keep(module, name, config, module is head)
        counts[kept or "converted"] += not any(part in f".{name}." for part in _ADAPTERS)
        return kept is None

    options = replace(Float8LinearConfig.from_recipe_name(config.recipe_name), emulate=config.emulate)
    convert_to_float8_training(model, module_filter_fn=takes_part, config=options)
    if not counts["converted"]:
        raise ValueError(
            f"{section}: no linear layer of {type(model).__name__} computes in FP8 ({_describe(counts)}); set enabled=false"
        )
    how = "emulated, " if config.emulate else ""
    log.info(
        "%s: %d linear layers compute in FP8 (%s%s); %s", section, counts["converted"], how, config.recipe_name, _describe(counts)
    )


def is_float8(module: nn.Module) -> bool:
    """Return whether a module computes in FP8."""
    return type(module).__name__ == "Float8Linear"


def _check_device(config: Float8Config, device: torch.device, section: str) -> None:
    if config.emulate:
        return
    if device.type != "cuda":
        raise ValueError(
            f"{section}.enabled is true, but products in FP8 are not known for {device.type}; set {section}.emulate=true to round as FP8 "
            "does, slowly, or enabled=false"
        )
    needed, found = LEAST_CAPABILITY[config.recipe_name], torch.cuda.get_device_capability(device)
    if found < needed:
        raise ValueError(
            f"{section}.recipe_name is {config.recipe_name}, which needs {GPUS[needed]} (compute capability {needed[0]}.{needed[1]}), and "
            f"this GPU has {found[0]}.{found[1]}; set enabled=false, or emulate=true to round as FP8 does, slowly"
        )


def _find_reason_to_keep(module: nn.Module, name: str, config: Float8Config, is_head: bool) -> str | None:
    """Return why a linear layer stays in high precision; None if it computes in FP8."""
    if is_head or any(part in f".{name}." for part in _ADAPTERS) or any(text in name for text in config.filter_fqns):
        return "stay by name"
    if type(module) is not nn.Linear:
        return "are of another class"
    if not config.emulate and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
        return f"have sizes that are no multiple of {MULTIPLE}"
    return None


def _describe(counts: Counter[str]) -> str:
    kept = {reason: count for reason, count in counts.items() if reason != "converted" and count}
    return ", ".join(f"{count} {reason}" for reason, count in kept.items()) or "none stay in high precision"
