"""One attention function for training and generation, registered with Transformers' attention interface.

A model whose attention implementation is ``strop`` passes the queries, keys and values of a flat row of tokens to the *plan* of the
call ``model(..., plan=plan)``. The plan decides which tokens attend to which: ``TreePlan`` for packed training with shared
prefixes, the plans of ``strop.generation.torch`` for a key-value cache. Models are not modified, and learner and engine run the same
module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from strop.models.attention.attention_plan import AttentionPlan, AttentionSpec
from strop.models.mixers.mixer_interface import running_call, running_layer

IMPLEMENTATION = "strop"


def strop_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    plan: AttentionPlan | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function called by Transformers: [1, heads, T, D] -> [1, T, heads, D]. ``s_aux`` [heads]: attention sinks;
    ``indices`` [1, T, bytes]: an indexer's choice.
    """
    if plan is None:
        raise RuntimeError(
            "attention implementation 'strop' needs a plan: call the model with plan=..., or set another implementation"
        )
    if dropout:
        raise ValueError(
            f"attention dropout is {dropout}: packed attention has none; set attention_dropout to 0 in hf_config_overrides"
        )
    layer: Any = module.layer_idx
    if layer is None or layer == -1:  # Zamba and Zamba2: several layers share an attention
        layer = running_layer()
    assert isinstance(layer, int)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    chosen = None if indices is None or not indices.shape[-1] else indices[0]
    spec = AttentionSpec(layer, scale, sliding_window, softcap, s_aux, chosen)
    call = running_call()
    if call is not None and call.block is not None:
        spec = replace(spec, chosen=call.chosen, block=call.block, pooled=call.pooled)
    kind = query.device.type
    if torch.is_autocast_enabled(kind):  # rotary embeddings return float32
        query, key, value = (tensor.to(torch.get_autocast_dtype(kind)) for tensor in (query, key, value))
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return plan.attend(query, key, value, spec).unsqueeze(0), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, strop_attention)


def keep_attention_uncompiled() -> None:
    """Make torch.compile stop at attention from now on, in this process."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, torch.compiler.disable(strop_attention))


def mixes_tokens(module: nn.Module) -> bool:
    """Return whether a module mixes tokens. Such modules have a ``layer_idx``, as do the decoder layers that contain them."""
    return hasattr(module, "layer_idx") and not isinstance(module, GradientCheckpointingLayer)
