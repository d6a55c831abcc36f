"""Stands for torch.compile in tests that count: what a segment of a layer launches once it is one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.models.layers import segments

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"})


class GraphLaunches(TorchDispatchMode):
    """Counts the launches that Inductor makes of a graph: each product, what is between two of them as one, each sum over rows, and each
    cast of a weight's gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._between = False
        self._of_weight = False  # the last product is the gradient of a weight

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        if name in PRODUCTS:
            self.count, self._between = self.count + 1, False
            self._of_weight = not args[0].is_contiguous()
        elif name == "aten::sum" and args[1:2] == ([0],):
            self.count += 1
        elif name == "aten::_to_copy" and self._of_weight:
            self.count, self._of_weight = self.count + 1, False
        elif not function.is_view and not self._between:
            self.count, self._between = self.count + 1, True
        return function(*args, **kwargs or {})


def compile_as_graph(launched: Callable[[int], None]) -> Callable[..., Any]:
    """Return what stands for ``segments.compile_segment``: segments run as they are written, and report their launches."""

    def compile_segment(function: Any, constants: Any, *layouts: Any) -> Any:
        def run(*tensors: Tensor) -> Any:
            with GraphLaunches() as launches:
                results = function(constants, *segments.with_weights(layouts, tensors))
            launched(launches.count)
            return results

        return run

    return compile_segment
