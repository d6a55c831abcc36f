"""Devices, and copies between them that do not block the host. torch is imported only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

DataclassT = TypeVar("DataclassT", bound=Any)


def is_gpu(device: torch.device) -> bool:
    """Return whether a device has its own memory and streams."""
    return device.type not in ("cpu", "meta", "mps")


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device without blocking the host: a GPU copies from pinned memory, which is kept as long as needed."""
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu(device) else tensor.to(device)


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of numbers on a device, copied as by ``send``."""
    import torch

    return send(torch.tensor(values, dtype=dtype), device)


def move(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """Return tensors on a device. Those on one other device are moved in a single copy, packed into one byte tensor."""
    import torch

    device, moved = torch.device(device), list(tensors)
    away = [index for index, tensor in enumerate(tensors) if tensor.device.type != device.type]
    away.sort(key=lambda index: -tensors[index].itemsize)  # so that each starts at a multiple of its item size
    if not away:
        return moved
    packed = torch.cat([tensors[index].reshape(-1).view(torch.uint8) for index in away])
    packed = packed.cpu() if device.type == "cpu" else send(packed, device)
    for index, part in zip(away, packed.split([tensors[index].nbytes for index in away]), strict=True):
        moved[index] = part.view(tensors[index].dtype).view(tensors[index].shape)
    return moved


def move_fields(parts: Sequence[DataclassT], device: torch.device | str) -> list[DataclassT]:
    """Return dataclasses with their tensor fields on a device, moved in one copy."""
    import torch

    found = [
        {field.name: value for field in fields(part) if isinstance(value := getattr(part, field.name), torch.Tensor)}
        for part in parts
    ]
    moved = iter(move([value for columns in found for value in columns.values()], device))
    return [replace(part, **{name: next(moved) for name in columns}) for part, columns in zip(parts, found, strict=True)]
