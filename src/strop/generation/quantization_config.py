"""Section ``quantization``: rollouts that are sampled with weights of low precision (docs/fp8.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strop.base_config import BaseConfig

RolloutFormat = Literal["fp8_tensor", "fp8_row", "fp8_block", "fp8_block_pow2", "mxfp8", "nvfp4"]

KERNEL_FORMATS: tuple[RolloutFormat, ...] = ("fp8_block", "fp8_block_pow2", "mxfp8")  # that vLLM reads from a publish


class RolloutQuantizationConfig(BaseConfig):
    """Rollouts with weights of low precision, in the linear layers of the decoder."""

    format: RolloutFormat | None = Field(
        None,
        description="Number format of the engine's weights: fp8_tensor, fp8_row and fp8_block (128 x 128) are E4M3 with a float32 scale "
        "for each matrix, row or block, fp8_block_pow2 has powers of two as scales; mxfp8 (1 x 32) and nvfp4 (1 x 16). null is "
        "what vllm_cfg.precision says: fp8_block for fp8, mxfp8 with is_mx.",
    )
    emulate: bool = Field(
        False,
        description="Round weights to the format and back, and compute in bfloat16 or float32, which needs no FP8 hardware and saves "
        "nothing. The torch engine rounds the inputs of its layers, and with kv_cache_dtype=fp8 keys and values, too.",
    )
    send_quantized: bool = Field(
        False,
        description="Quantise weights where they are trained, once for all engines, and send values and scales: half the bytes of a "
        "publish. false sends them in the engine's data type, and each engine quantises. For vLLM's own FP8 layers.",
    )
