"""``CUDAGraph`` and ``graph`` of the simulated GPU: a capture records operators and computes nothing; a replay computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    def __init__(self, native: Any) -> None:
        self.native = native
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []  # operator, arguments, and the tensors that it made

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again on the memory that they were recorded with. The program has launched one thing."""
        self.native.count("launches")
        before = self.native.set_inside(True)
        try:
            for func, args, kwargs, made in self.calls:
                for old, new in zip(made, _tensors(func(*args, **kwargs)), strict=False):
                    old.copy_(new)
        finally:
            self.native.set_inside(before)

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class _Recorder(TorchDispatchMode):
    """Records the operators that compute on the device. They run, so that they return tensors, and ``forget`` undoes what they wrote."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.made: dict[int, Tensor] = {}  # by its memory
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # by the memory: that from before the capture, and what was in it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._save_what_is_written(func, args, kwargs)
        result = func(*args, **kwargs)
        known = {_address(each) for each in _tensors((args, kwargs))}
        outputs = [each for each in _tensors(result) if each.device.type == "sim"]
        if outputs:
            made = outputs if not known & {_address(each) for each in outputs} else []
            self.made |= {_address(each): each for each in made}
            self.graph.calls.append((func, args, kwargs, made))
        return result

    def _save_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in _tensors(by_name.get(argument.name)):
                address = _address(tensor)
                if tensor.device.type == "sim" and address not in self.made and address not in self.written:
                    memory = _bytes_of(tensor)
                    self.written[address] = (memory, memory.clone())

    def forget(self) -> None:
        for memory, content in self.written.values():
            memory.copy_(content)
        for tensor in self.made.values():
            _bytes_of(tensor).fill_(255)  # nothing was computed: NaNs


def make_capture(native: Any) -> Callable[..., Any]:
    """Return ``torch.cuda.graph`` for the device."""

    @contextmanager
    def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        torch.accelerator.synchronize()
        recorder = _Recorder(graph)
        native.set_capturing(True)
        try:
            with stream or nullcontext(), recorder:
                yield
        finally:
            native.set_capturing(False)
            before = native.set_inside(True)
            recorder.forget()
            native.set_inside(before)

    return capture


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]
