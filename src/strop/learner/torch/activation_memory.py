"""Reduce activation memory: some layers recompute their activations (arXiv 1604.06174), or all activations move to CPU memory
until the backward pass.

Neither changes a loss or gradient by a single bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from strop.device_copies import is_gpu

MIN_OFFLOADED_BYTES = 1 << 20  # smaller tensors stay: the copy is not worth its time


def checkpoint_layers(model: Any, layers: Sequence[nn.Module], share: float) -> int:
    """Make ``share`` of the ``layers``, evenly spread, recompute their activations in the backward pass. Return their number.

    The model must be in training mode. Raises ValueError for a fraction if layers cannot be chosen individually.
    """
    if share <= 0:
        return 0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if share >= 1:
        return len(layers)
    if not any(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise ValueError(
            f"dtensor_cfg.activation_checkpointing: found {share}, but {type(model).__name__} cannot recompute some of its layers only; "
            "set it to true or false"
        )
    chosen = spread(len(layers), share)
    for layer, recomputes in zip(layers, chosen, strict=True):
        layer.gradient_checkpointing = recomputes  # type: ignore[assignment]
    return sum(chosen)


def spread(count: int, share: float) -> list[bool]:
    """Return which of ``count`` layers to choose for a ``share`` of them, rounded to the nearest number and evenly spread."""
    chosen = round(count * share)
    return [(index + 1) * chosen // count > index * chosen // count for index in range(count)]


class ActivationOffload:
    """Keeps activations of the forward pass in CPU memory until the backward pass."""

    def __init__(self, device: torch.device, *, min_bytes: int = MIN_OFFLOADED_BYTES) -> None:
        """Tensors of less than ``min_bytes``, weights, and tensors on other devices than ``device`` stay where they are. On a CPU the
        tensors are copied to other CPU memory."""
        self.device = device
        self.min_bytes = min_bytes
        self.offloaded_bytes = 0  # of all passes
        self._gpu: Any = torch.get_device_module(device) if is_gpu(device) else None
        self._copies: Any = self._gpu.Stream(device) if self._gpu is not None else None

    def in_forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass whose activations are offloaded."""
        return torch.autograd.graph.saved_tensors_hooks(self._offload, self._onload)

    def _offload(self, tensor: Tensor) -> tuple[Tensor, torch.device | None]:
        base = tensor if tensor._base is None else tensor._base
        size = tensor.numel() * tensor.element_size()
        if tensor.device.type != self.device.type or size < self.min_bytes or isinstance(base, nn.Parameter):
            return tensor, None
        self.offloaded_bytes += size
        if self._copies is None:
            return tensor.clone(), tensor.device
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copies.wait_stream(self._gpu.current_stream(tensor.device))
        with self._gpu.stream(self._copies):  # concurrently with the following layers
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)  # its memory is not reused before the copy is done
        return copy, tensor.device

    def _onload(self, packed: tuple[Tensor, torch.device | None]) -> Tensor:
        tensor, device = packed
        if device is None or self._copies is None:
            return tensor
        self._gpu.current_stream(device).wait_stream(self._copies)
        return tensor.to(device, non_blocking=True)
