"""Frequencies of scaled rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scaled_rotary_frequencies(config: Any, kind: str, layer_type: str | None = None) -> tuple[Tensor, float]:
    """Return the frequencies [D / 2] of a rotary embedding with scaling of type ``kind``, and the factor of its cosines and sines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options: Any = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    return frequencies, float(scale)
