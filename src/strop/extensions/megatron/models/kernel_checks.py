"""What an option of ``megatron_cfg`` needs that a model, a GPU or an installation may lack."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from megatron.core.tensor_parallel import random

from strop.extensions.megatron.megatron_config import Fp8Config, MegatronConfig

logger = logging.getLogger(__name__)
SECTION = "policy.megatron_cfg"
FP8_GPUS = {  # recipe -> (least compute capability, its GPUs)
    "tensorwise": ((8, 9), "Ada, Hopper or newer"),
    "delayed": ((8, 9), "Ada, Hopper or newer"),
    "blockwise": ((9, 0), "Hopper or newer"),
    "mxfp8": ((10, 0), "Blackwell or newer"),
}


class NoFp8:
    """Stands for Transformer Engine's state of FP8 where it is not installed: Megatron Core 0.16.1 reads it anyway."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


if not random.HAVE_TE:  # recomputed norms and latent attention end with a NameError otherwise
    random.FP8GlobalStateManager = NoFp8
    random.activation_recompute_forward = random.fp8_autocast = lambda **options: contextlib.nullcontext()


def check_fp8(fp8: Fp8Config, capability: tuple[int, int]) -> None:
    """Raise RuntimeError if a GPU of this compute capability has no kernels for the recipe."""
    least, gpus = FP8_GPUS[fp8.fp8_recipe]
    if capability < least:
        others = [name for name, (needed, _) in FP8_GPUS.items() if needed <= capability]
        fix = f"set it to {' or '.join(others)}" if others else f"set {SECTION}.fp8_cfg.enabled=false"
        raise RuntimeError(
            f"{SECTION}.fp8_cfg.fp8_recipe: found {fp8.fp8_recipe}, which needs {gpus}, and this GPU has compute capability "
            f"{capability[0]}.{capability[1]}; {fix}"
        )


def choose_grouped_gemm(config: MegatronConfig, dtype: torch.dtype, *, installed: bool) -> bool:
    """Return whether Transformer Engine computes the experts of a rank by grouped kernels. ``installed``: whether it is here."""
    asked: Any = config.moe_grouped_gemm
    if not installed or dtype == torch.float64:
        if asked:
            logger.warning(
                "%s.moe_grouped_gemm is true, but %s; the experts of a rank are computed one after another, with the same numbers",
                SECTION,
                "float64 has no grouped kernels" if installed else "Transformer Engine is not installed",
            )
        return False
    return bool(asked) if asked is not None else config.transformer_impl != "local"
