"""The configurations that ModelOpt has names for (``modelopt.torch.quantization``, 0.47), as rules in ModelOpt's own form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FP8 = {"num_bits": "e4m3"}
FP8_ROWS = {"num_bits": "e4m3", "axis": 0}
FP8_TOKENS = {"num_bits": "e4m3", "type": "dynamic", "block_sizes": {-1: None}}
FP8_BLOCKS = {"num_bits": "e4m3", "block_sizes": {-1: 128, -2: 128}}
MXFP8 = {"num_bits": "e4m3", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}}
MXFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e8m0"}}
NVFP4 = {"num_bits": "e2m1", "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": "e4m3"}}
NVFP4_BLOCKS_OF_32 = {"num_bits": "e2m1", "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": "e4m3"}}

# Layers that stay in high precision in every preset.
DISABLED = (
    "*block_sparse_moe.gate*", "*linear_attn.conv1d*", "*self_attention.conv1d*", "*linear_attn.in_proj_a*", "*linear_attn.in_proj_b*",
    "*lm_head*", "*mixer.conv1d*", "*mlp.gate.*", "*mlp.shared_expert_gate.*", "*output_layer*", "*proj_out.*", "*router*", "mtp.*",
    "output.*", "*embed_vision*", "*vision_tower*", "*visual*", "*vision_model*", "*multi_modal_projector*",
)  # fmt: skip
ATTENTION_OF_HYBRIDS = (
    "*fc1_latent_proj*", "*fc2_latent_proj*", "*q_proj*", "*k_proj*", "*v_proj*", "*o_proj*", "*self_attention.linear_qkv*",
    "*self_attention.linear_proj*",
)  # fmt: skip
CONSERVATIVE = (*ATTENTION_OF_HYBRIDS, "*mixer.in_proj*", "*mixer.out_proj*")
ALL = ("*",)
MLP = ("*mlp*", "*block_sparse_moe*")
MLP_AND_EXPERTS = ("*mlp*", "*.mixer.up_proj.", "*.mixer.down_proj.", "*block_sparse_moe*", "*.experts.*")
EXPERTS = ("*block_sparse_moe*", "*.experts.*")


def _preset(
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any] | None = None,
    layers: tuple[str, ...] = ALL,
    disabled: tuple[str, ...] = DISABLED,
) -> list[dict[str, Any]]:
    """Return the entries of a preset: nothing, then the weights and inputs of ``layers``, and not the ``disabled`` ones."""
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for layer in layers:
        entries.append({"quantizer_name": f"{layer}weight_quantizer", "cfg": weights})
        if inputs is not None:
            entries.append({"quantizer_name": f"{layer}input_quantizer", "cfg": inputs})
    return entries + [{"quantizer_name": pattern, "enable": False} for pattern in disabled]


PRESETS: Mapping[str, list[dict[str, Any]]] = {
    "FP8_DEFAULT_CFG": _preset(FP8, FP8),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": _preset(FP8_ROWS, FP8_TOKENS),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": _preset(FP8_BLOCKS),
    "MAMBA_MOE_FP8_AGGRESSIVE_CFG": _preset(FP8, FP8, disabled=(*DISABLED, *ATTENTION_OF_HYBRIDS)),
    "MAMBA_MOE_FP8_CONSERVATIVE_CFG": _preset(FP8, FP8, disabled=(*DISABLED, *CONSERVATIVE)),
    "MXFP8_DEFAULT_CFG": _preset(MXFP8, MXFP8),
    "MXFP4_DEFAULT_CFG": _preset(MXFP4, MXFP4),
    "MXFP4_MLP_WEIGHT_ONLY_CFG": _preset(MXFP4, layers=MLP),
    "W4A8_MXFP4_FP8_CFG": _preset(MXFP4, FP8),
    "NVFP4_DEFAULT_CFG": _preset(NVFP4, NVFP4),
    "W4A16_NVFP4_CFG": _preset(NVFP4),
    "W4A8_NVFP4_FP8_CFG": _preset(NVFP4_BLOCKS_OF_32, FP8),
    "NVFP4_MLP_WEIGHT_ONLY_CFG": _preset(NVFP4_BLOCKS_OF_32, layers=MLP),
    "NVFP4_MLP_ONLY_CFG": _preset(NVFP4, NVFP4, MLP_AND_EXPERTS),
    "NVFP4_OMLP_ONLY_CFG": _preset(NVFP4, NVFP4, ("*o_proj*", *MLP_AND_EXPERTS[:-1])),
    "NVFP4_EXPERTS_ONLY_CFG": _preset(NVFP4, NVFP4, EXPERTS),
    "MAMBA_MOE_NVFP4_AGGRESSIVE_CFG": _preset(NVFP4, NVFP4, disabled=(*DISABLED, *ATTENTION_OF_HYBRIDS)),
    "MAMBA_MOE_NVFP4_CONSERVATIVE_CFG": _preset(NVFP4, NVFP4, disabled=(*DISABLED, *CONSERVATIVE)),
}

# Names of ModelOpt that are refused, and what they need that is not here.
REFUSED_PRESETS: Mapping[str, str] = {
    **dict.fromkeys(
        ("FP8_KV_CFG", "FP8_AFFINE_KV_CFG", "NVFP4_KV_CFG", "NVFP4_AFFINE_KV_CFG", "NVFP4_KV_ROTATE_CFG", "NVFP4_FP8_MHA_CONFIG"),
        "quantises keys and values of attention, which the learner computes in high precision",
    ),
    **dict.fromkeys(
        (
            "INT8_DEFAULT_CFG",
            "INT8_SMOOTHQUANT_CFG",
            "INT8_WEIGHT_ONLY_CFG",
            "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
            "MXINT8_DEFAULT_CFG",
        ),
        "quantises to integers",
    ),
    **dict.fromkeys(
        ("INT4_AWQ_CFG", "W4A8_AWQ_BETA_CFG", "NVFP4_AWQ_LITE_CFG", "NVFP4_AWQ_CLIP_CFG", "NVFP4_AWQ_FULL_CFG"),
        "searches scales of channels (AWQ)",
    ),
    **dict.fromkeys(
        ("NVFP4_FOUR_OVER_SIX_CFG", "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG", "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG"),
        "searches the scale of each block",
    ),
    "NVFP4_SVDQUANT_DEFAULT_CFG": "adds a low-rank correction of the weights (SVDQuant)",
    "MXFP6_DEFAULT_CFG": "quantises to FP6",
}
