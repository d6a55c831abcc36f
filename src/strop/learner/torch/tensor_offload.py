"""Save the memory of a device: move tensors to CPU memory and back in place, and keep or recompute activations.

A learner leaves the GPU while an engine samples there (``policy.offload``): parameters stay the same objects, and tensors that share
memory still do. Offloaded tensors can be read, so weights are published and checkpoints are written from CPU memory.

Some layers recompute their activations (arXiv 1604.06174), or all activations move to CPU memory until the backward pass. Neither
changes a loss or gradient by a single bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from strop.device_copies import is_gpu


class TensorOffload:
    """Offloads the tensors that ``find`` returns. CPU memory is pinned, and kept for the next time."""

    def __init__(
        self, find: Callable[[], Iterable[Tensor]], device: torch.device, coming: Callable[[], Iterable[int]] = tuple
    ) -> None:
        """``find`` must return every tensor that refers to the memory to free. Tensors on other devices than ``device`` stay where they
        are. On a CPU the tensors move to other CPU memory.

        ``coming``: sizes in bytes of tensors that do not exist yet but will next time, such as the optimizer state created by the
        first step. Their CPU memory is pinned while the others are offloaded for the first time, because pinning takes many times
        as long as a copy.
        """
        self._coming = coming
        self._pinning: Thread | None = None
        self._find = find
        self.device = device
        self._offloaded: list[list[Tensor]] = []  # tensors grouped by shared memory
        self._free: dict[int, list[Tensor]] = {}  # unused CPU memory by its size in bytes

    def offload(self) -> None:
        """Move the tensors to CPU memory. Does nothing if they are there already."""
        if self._offloaded:
            return
        if self._pinning is not None:
            self._pinning.join()
        self._offloaded = self._group_by_memory()
        for tensors in self._offloaded:
            size = tensors[0].untyped_storage().nbytes()
            pool = self._free.get(size)
            _move(tensors, pool.pop() if pool else self._allocate(size))
        self._wait_for_copies()
        if self._pinning is None and is_gpu(self.device):
            self._pinning = Thread(target=self._pin, args=(list(self._coming()),), name="strop-pinning", daemon=True)
            self._pinning.start()

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu(self.device))

    def _pin(self, sizes: Sequence[int]) -> None:
        with torch.get_device_module(self.device).device(self.device):  # a new thread starts on the first GPU
            for size in sizes:
                self._free.setdefault(size, []).append(self._allocate(size))

    def onload(self) -> None:
        """Move the tensors back to the device. Does nothing if they are there already."""
        used = [_bytes_of(tensors[0]) for tensors in self._offloaded]
        for tensors, memory in zip(self._offloaded, used, strict=True):
            _move(tensors, torch.empty_like(memory, device=self.device, pin_memory=False))
        self._wait_for_copies()
        self._offloaded = []
        for memory in used:
            self._free.setdefault(len(memory), []).append(memory)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the tensors on the device inside the context."""
        offloaded = bool(self._offloaded)
        self.onload()
        try:
            yield
        finally:
            if offloaded:
                self.offload()

    def _group_by_memory(self) -> list[list[Tensor]]:
        groups: dict[int, list[Tensor]] = {}
        for found in self._find():
            for tensor in _plain_tensors(found):
                if tensor.device.type == self.device.type and tensor.dim() and tensor.untyped_storage().nbytes():
                    groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        return list(groups.values())

    def _wait_for_copies(self) -> None:
        if self._offloaded and self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)


class ModelOffload:
    """The models of a process that are offloaded together: learners, a reference, teachers."""

    def __init__(self, parts: Sequence[TensorOffload]) -> None:
        self.parts = parts

    def offload(self) -> None:
        """Move the models to CPU memory, and free their device memory for other processes."""
        for part in self.parts:
            part.offload()
            if is_gpu(part.device):
                torch.get_device_module(part.device).empty_cache()

    def onload(self) -> None:
        for part in self.parts:
            part.onload()


@torch.no_grad()
def _move(tensors: Sequence[Tensor], memory: Tensor) -> None:
    """Make tensors that share their memory refer to ``memory``, with the same content."""
    memory.copy_(_bytes_of(tensors[0]), non_blocking=True)
    storage = memory.untyped_storage()
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        tensor.data = view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor and its base if it is a view, or the tensors inside a wrapper: shards (DTensor), quantized optimizer state."""
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        if tensor._base is not None:
            yield tensor._base
        return
    for name in flatten()[0]:
        if isinstance(inner := getattr(tensor, name), Tensor):
            yield from _plain_tensors(inner)


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
