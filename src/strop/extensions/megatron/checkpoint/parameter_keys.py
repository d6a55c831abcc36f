"""The names that Megatron Core's checkpoints have for the parameters of a model."""

from __future__ import annotations

import re
from collections.abc import Collection

# Norms before a linear layer are parameters of it where Transformer Engine fuses the two, and checkpoints always have those names.
_FUSED_NORMS = {
    "input_layernorm.": ("self_attention.linear_qkv.", "layer_norm_"),
    "pre_mlp_layernorm.": ("mlp.linear_fc1.", "layer_norm_"),
}
_LOCAL_EXPERT = re.compile(r"\.local_experts\.[^.]+\.")


def saved_key(name: str, layer: Collection[str]) -> str:
    """Return the name that a checkpoint has for a parameter, or part of one, of a layer with the parameters ``layer``."""
    for norm, (linear, prefix) in _FUSED_NORMS.items():
        before, found, kind = name.partition(norm)
        if found and f"{before}{linear}weight" in layer:
            return f"{before}{linear}{prefix}{kind}"
    return _LOCAL_EXPERT.sub(".experts.", name)


def possible_keys(name: str) -> Collection[str]:
    """Return the names that a checkpoint may have for a parameter of a layer whose other parameters are not known."""
    norms = [f"{name.partition(norm)[0]}{linear}weight" for norm, (linear, _) in _FUSED_NORMS.items() if norm in name]
    return {saved_key(name, norms): None, saved_key(name, ()): None}.keys()
