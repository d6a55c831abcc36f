"""The functions of torch whose bits depend on their shape, exchanged for others while a module runs.

``ExactMode`` is entered around the forward pass of the modules in which such functions are seen (``exact_modules``), so that routers,
experts, norms and activations of any model are covered without knowing their classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from strop.models.exact.exactness_error import NotExactError
from strop.models.exact.packed_weights import PackedWeights
from strop.models.exact.row_products import exact_linear
from strop.models.exact.whole_vectors import apply_whole_vectors

_active = threading.local()

_NAMES = ("sigmoid", "rsqrt", "tanh", "exp", "cos", "sin", "log", "erf", "pow", "sqrt", "log1p", "expm1", "reciprocal")
ELEMENTWISE: frozenset[Any] = frozenset(
    {
        *(getattr(torch, name) for name in _NAMES),
        *(getattr(Tensor, name) for name in _NAMES),
        *(F.silu, F.gelu, F.mish, F.hardswish, F.hardsigmoid, F.softplus, F.elu, F.selu, F.celu, F.sigmoid, F.tanh, F.logsigmoid),
        *(torch.float_power, Tensor.__pow__, torch.sinh, torch.cosh),
    }
)
MATMULS: frozenset[Any] = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm})
REFUSED: frozenset[Any] = frozenset(
    {
        *(torch.einsum, torch.baddbmm, Tensor.baddbmm, torch.addbmm, Tensor.addmm, torch.mv, Tensor.mv, torch.dot),
        *(F.scaled_dot_product_attention, F.bilinear, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
        *(getattr(F, "grouped_mm", torch.einsum), getattr(torch, "_grouped_mm", torch.einsum)),
    }
)
SENSITIVE = ELEMENTWISE | MATMULS | REFUSED | {F.linear, torch.addmm}


class ExactMode(TorchFunctionMode):
    """Exchanges sensitive functions. Entered again inside itself, it has no effect."""

    def __init__(self, weights: PackedWeights) -> None:
        super().__init__()
        self.weights = weights
        self.outer = False

    def __enter__(self) -> Any:
        self.outer = getattr(_active, "on", False)
        _active.on = True
        return self if self.outer else super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _active.on = self.outer
        if not self.outer:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func not in SENSITIVE:
            return func(*args, **options)
        if func in ELEMENTWISE:
            return _apply_elementwise(func, args, options)
        if func is F.linear:
            return self._linear(*args, **options)
        if func is torch.addmm:
            return self._addmm(*args, **options)
        if func in MATMULS:
            return self._matmul(func, *args)
        raise _refuse(func)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return exact_linear(input, weight, bias, self.weights)

    def _addmm(self, bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return exact_linear(rows, weight.t(), bias, self.weights)

    def _matmul(self, func: Any, left: Tensor, right: Tensor) -> Tensor:
        if left.shape[-1] == 1:  # one product, nothing is added
            return left * right
        if right.dim() == 2:
            return exact_linear(left, right.t(), None, self.weights)
        raise _refuse(func)


def _apply_elementwise(func: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if "input" in options:
        args = (options.pop("input"), *args)
    values, rest = args[0], args[1:]
    options.pop("inplace", None)
    if not isinstance(values, Tensor) or any(isinstance(part, Tensor) for part in rest) or options.get("out") is not None:
        return func(*args, **options)
    return apply_whole_vectors(lambda part: func(part, *rest, **options), values)


def _refuse(func: Any) -> NotExactError:
    name = getattr(func, "__name__", str(func))
    return NotExactError(f"it calls torch's {name}, for which there is no way of computing that is the same at every shape")
