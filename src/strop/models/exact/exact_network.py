"""A network whose passes are exact: what ``strop.models.network`` and the embedded engine need of it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from strop.models.exact.exact_attention import KEY_BLOCK, ExactSpec, exact_attention
from strop.models.exact.exact_modules import make_exact
from strop.models.exact.packed_weights import PackedWeights

log = logging.getLogger(__name__)


class ExactPasses:
    """The exact forward passes of one model, whose modules are changed in place."""

    def __init__(self, model: Any) -> None:
        """Raises NotExactError for a model with operations that have no exact form."""
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.weights: PackedWeights = make_exact(model.get_decoder(), vocabulary)
        log.info("exact_on_policy: learner and engine compute with products, attention and functions of fixed order")


def attend_cached(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, spec: ExactSpec) -> Tensor:
    """Attention over keys in the order of their positions: [B, heads, L, D] x [B, kv_heads, S, D] -> [B, heads, L, D] in query's dtype.

    ``positions`` [B or 1, L] are those of the queries. Keys are padded to whole blocks.
    """
    missing = -key.shape[2] % KEY_BLOCK
    if missing:
        key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (key, value))
    return exact_attention(query, key, value, positions, spec)
