"""Scaled rotary embeddings with length-dependent frequencies: one length for a whole run.

Transformers chooses the frequencies of the types ``longrope`` (2402.13753) and ``dynamic`` by the largest position of a call. In
a packed row, a sequence would get the frequencies of its neighbours; in a growing cache, keys would have those of an earlier
length. So a run uses the frequencies of its longest sequence for all of them, in learner and engines, as vLLM does for longrope.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

FIXED = "fixed"  # a type for which Transformers recomputes nothing


def scaled_rotary_frequencies(
    config: Any, kind: str, layer_type: str | None = None, longest: int | None = None
) -> tuple[Tensor, float]:
    """Return the frequencies [D / 2] of a rotary embedding with scaling of type ``kind``, and the factor of its cosines and sines.

    ``longest``: the sequence length, for the types that depend on it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options: Any = {} if layer_type is None else {"layer_type": layer_type}
    if longest is not None:
        options["seq_len"] = longest
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    return frequencies, float(scale)


def depends_on_length(kind: Any) -> bool:
    return kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind)


def fix_rotary_length(model: nn.Module, longest: int) -> None:
    """Give every rotary embedding of a model the frequencies of sequences of ``longest`` tokens. The model's configuration stays."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer: Mapping[str | None, Any] = kinds if isinstance(kinds, Mapping) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if depends_on_length(kind):
                _fix_frequencies(module, kind, layer_type, longest)
        if isinstance(kinds, Mapping):
            module.rope_type = {name: FIXED if depends_on_length(kind) else kind for name, kind in kinds.items()}  # type: ignore[assignment]
        elif depends_on_length(kinds):
            module.rope_type = FIXED  # type: ignore[assignment]


def _fix_frequencies(module: Any, kind: str, layer_type: str | None, longest: int) -> None:
    frequencies, scale = scaled_rotary_frequencies(module.config, kind, layer_type, longest)
    prefix = "" if layer_type is None else f"{layer_type}_"
    device = getattr(module, f"{prefix}inv_freq").device
    module.register_buffer(f"{prefix}inv_freq", frequencies.to(device), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scale)
    log.info(
        "rotary embeddings of type %s: the frequencies of sequences of %d tokens, for all of this run's sequences", kind, longest
    )


def fixed_rotary_config(config: Any, longest: int) -> dict[str, Any]:
    """Return the configuration changes that give an engine the frequencies of ``fix_rotary_length``; empty if there are none."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = {name: each for name, each in parameters.items() if isinstance(each, Mapping)}
    found = {name: each for name, each in (nested or {None: parameters}).items() if depends_on_length(each.get("rope_type"))}
    if not found:
        return {}
    fixed = dict(parameters)
    for name, each in found.items():
        parameters = _fix_parameters(text, each, name, longest)
        fixed = parameters if name is None else {**fixed, name: parameters}
    changes: dict[str, Any] = {"rope_parameters": fixed}
    if longest > text.max_position_embeddings:  # engines have no positions beyond it
        changes["max_position_embeddings"] = longest
    return changes


def _fix_parameters(config: Any, parameters: Mapping[str, Any], layer_type: str | None, longest: int) -> dict[str, Any]:
    if parameters["rope_type"] == "longrope":
        long = longest > parameters.get("original_max_position_embeddings", config.max_position_embeddings)
        factors = parameters["long_factor" if long else "short_factor"]
        return {**parameters, "short_factor": factors, "long_factor": factors}
    frequencies, _ = scaled_rotary_frequencies(config, parameters["rope_type"], layer_type, longest)
    size = 2 * len(frequencies)
    theta = float(frequencies[-1].double() ** (-size / (size - 2)))  # frequency i is theta ** (-2 i / size)
    kept = {name: value for name, value in parameters.items() if name == "partial_rotary_factor"}
    return {"rope_type": "default", "rope_theta": theta, **kept}
