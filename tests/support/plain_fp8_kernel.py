"""vLLM's FP8 layers on a CPU, computed plainly, so that loading and reading back can be tested.

An engine is launched with ``PlainFp8Worker`` as its worker extension: importing this module gives vLLM the kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.platforms import PlatformEnum

from strop.generation.vllm.worker import StropWorker
from strop.models.quantization.number_format import FP8_BLOCK, QuantizedTensor


class PlainFp8Kernel(Fp8BlockScaledMMLinearKernel):
    """Multiplies by the dequantised weight. Inputs stay as they are, as in vLLM's kernel for CPUs with AMX."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        return None

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **unused: Any) -> Tensor:
        stored = QuantizedTensor(FP8_BLOCK, layer.weight, layer.weight_scale_inv, torch.ones(()))
        weight = stored.dequantize(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    def apply_block_scaled_mm(self, *arguments: Any, **options: Any) -> Tensor:
        raise NotImplementedError


def _install() -> None:
    for table in vars(linear).values():
        kernels = table.get(PlatformEnum.CPU) if isinstance(table, dict) else None
        if isinstance(kernels, list) and any(issubclass(kernel, Fp8BlockScaledMMLinearKernel) for kernel in kernels):
            kernels.insert(0, PlainFp8Kernel)


_install()


class PlainFp8Worker(StropWorker):
    """Strop's part of a worker, with the plain kernel."""
