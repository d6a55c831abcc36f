"""Devices, and copies between them that a host does not wait for. torch is imported where it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

DataclassT = TypeVar("DataclassT", bound=Any)


def is_gpu(device: torch.device) -> bool:
    """Return whether a device has memory and streams of its own."""
    return device.type not in ("cpu", "meta", "mps")


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on a device. The host does not wait for a GPU: it copies from pinned memory, kept as long as needed."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor.to(device)


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of numbers on a device, sent as ``send`` does."""
    import torch

    return send(torch.tensor(values, dtype=dtype), device)


def move(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Return tensors on a device. Those that are not there, all on one other, are moved in one copy, as the bytes of one tensor."""
    import torch

    device, moved = torch.device(device), list(tensors)
    away = [index for index, tensor in enumerate(tensors) if tensor.device.type != device.type]
    away.sort(key=lambda index: -tensors[index].itemsize)  # so that each begins at a multiple of its size
    if not away:
        return moved
    packed = torch.cat([tensors[index].reshape(-1).view(torch.uint8) for index in away])
    packed = packed.cpu() if device.type == "cpu" else send(packed, device)
    for index, part in zip(away, packed.split([tensors[index].nbytes for index in away]), strict=True):
        moved[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return moved


def move_fields(parts: Sequence[DataclassT], device: torch.device | str) -> list[DataclassT]:
    """Return dataclasses with the tensors that they have as fields on a device, moved in one copy."""
    import torch

    found = [
        {field.name: value for field in fields(part) if isinstance(value := getattr(part, field.name), torch.Tensor)}
        for part in parts
    ]
    moved = iter(move([value for columns in found for value in columns.values()], device))
    return [replace(part, **{name: next(moved) for name in columns}) for part, columns in zip(parts, found, strict=True)]
