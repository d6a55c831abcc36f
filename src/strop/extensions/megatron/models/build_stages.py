"""Build the stages of a model that this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from strop.extensions.megatron.families.find_family import find_family
from strop.extensions.megatron.layout import MegatronLayout
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.models.gpt_stage import GptStage, Head
from strop.extensions.megatron.models.layer_specs import layer_spec
from strop.extensions.megatron.models.stage_norms import NORMS
from strop.extensions.megatron.models.transformer_settings import transformer_config


def build_stages(
    hf_config: Any, config: MegatronConfig, layout: MegatronLayout, *, dtype: torch.dtype, head: Head = "lm"
) -> list[GptStage]:
    """Build the stages of this rank, one for each virtual stage, without weights. ``head``: for logits, or for values (``scalar``)."""
    architecture = find_family(hf_config).architecture(hf_config)
    settings = transformer_config(architecture, config, dtype)
    vocab_size = padded_vocabulary(architecture.vocab_size, config.tensor_model_parallel_size)
    virtual = settings.virtual_pipeline_model_parallel_size
    with layout.activate():
        stages = []
        for stage in range(virtual or 1):
            vp_stage = stage if virtual else None
            first = get_transformer_layer_offset(settings, vp_stage=vp_stage)
            designs = architecture.layers[first : first + get_num_layers_to_build(settings, vp_stage=vp_stage)]
            block = TransformerBlockSubmodules(
                layer_specs=[layer_spec(architecture, design, settings, adapters=config.peft.enabled) for design in designs],
                layer_norm=NORMS[architecture.norm],
            )
            stages.append(
                GptStage(
                    settings,
                    architecture,
                    block,
                    vocab_size=vocab_size,
                    head=head,
                    pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
                    post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
                    vp_stage=vp_stage,
                )
            )
    return stages


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return the rows of an embedding that tensor-parallel ranks share equally."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel
