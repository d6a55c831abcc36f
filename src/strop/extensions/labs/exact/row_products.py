"""Products with a weight, and elementwise functions, in which the bits of a row or element do not depend on the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class NotExactError(ValueError):
    """``policy.exact_on_policy`` cannot hold. The message names the operation, the reason and what to set instead."""


# Which shapes of a product give the bits of the reference shape, found by comparison on this machine.
#
# The reference is a product of 16 rows. Whether a product of more or fewer rows adds in the same order is known only to its library (MKL,
# oneDNN, cuBLAS), so each shape is tried once: rows of random numbers, of which the reference is known, are laid in random order over all
# places of the shape. Were the additions in another order, a large part of the results would differ in their last bits.

log = logging.getLogger(__name__)

REFERENCE_ROWS = 16
TRIED_ROWS = 64  # different rows of a trial

RowFunction = Callable[[Tensor], Tensor]  # [.., rows, K] -> [.., rows, N]


@dataclass(frozen=True)
class ProductKind:
    """What, besides its rows, may decide how a product is computed."""

    name: str
    inputs: int  # K, numbers of a row
    outputs: int  # N
    dtype: torch.dtype
    device: torch.device
    details: Hashable = None


@dataclass(frozen=True, eq=False)
class _Reference:
    rows: Tensor  # [TRIED_ROWS, K]
    results: Tensor  # [TRIED_ROWS, N]


class TrustedShapes:
    """Remembers which shapes of which products have the reference's bits. There is one for all models of a process."""

    def __init__(self) -> None:
        self._references: dict[Hashable, _Reference] = {}
        self._trusted: dict[Hashable, bool] = {}

    def trusts(self, kind: ProductKind, shape: tuple[int, ...], make_product: Callable[[], RowFunction]) -> bool:
        """Return whether a call with rows of ``shape`` (the last is the number of rows) has the reference's bits at every place.

        ``make_product`` returns the product with weights that are always the same and without zeros. Raises NotExactError if even the
        reference depends on a row's place.
        """
        key = (kind, torch.get_num_threads())
        known = self._trusted.get((key, shape))
        if known is None:
            known = self._trusted[key, shape] = self._try(key, kind, shape, make_product())
        return known

    @torch.no_grad()
    def _try(self, key: Hashable, kind: ProductKind, shape: tuple[int, ...], product: RowFunction) -> bool:
        if key not in self._references:
            self._references[key] = _compute_reference(kind, product, len(shape))
        reference, places = self._references[key], torch.Size(shape).numel()
        generator = torch.Generator().manual_seed(places)
        for _ in range(-(-TRIED_ROWS // places)):
            chosen = torch.randint(TRIED_ROWS, (places,), generator=generator).to(kind.device)
            results = product(reference.rows[chosen].view(*shape, -1))
            if not torch.equal(results.flatten(0, -2), reference.results[chosen]):
                log.info("exact: %s with rows of %s differs from its reference shape, which is used instead", kind, shape)
                return False
        return True


def _compute_reference(kind: ProductKind, product: RowFunction, dims: int) -> _Reference:
    generator = torch.Generator().manual_seed(kind.inputs)
    rows = torch.randn(TRIED_ROWS, kind.inputs, generator=generator).to(kind.device, kind.dtype)
    results = in_reference_blocks(product, rows, dims)
    moved = in_reference_blocks(product, rows.roll(5, 0), dims).roll(-5, 0)
    if not torch.equal(results, moved):
        raise NotExactError(
            f"policy.exact_on_policy: a product of {REFERENCE_ROWS} rows ({kind}) gives a row other bits at another place on this machine, "
            "so nothing can be exact here; set it to false, or try policy.num_threads=1"
        )
    return _Reference(rows, results)


def in_reference_blocks(product: RowFunction, rows: Tensor, dims: int) -> Tensor:
    """Return the product of rows [n, K], computed in blocks of the reference shape, which has ``dims`` - 1 leading dimensions of one."""
    blocks = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % REFERENCE_ROWS)).split(REFERENCE_ROWS)
    results = [product(block.view(*[1] * (dims - 1), *block.shape)) for block in blocks]
    return torch.cat([result.flatten(0, -2) for result in results])[: len(rows)]


def round_up_rows(rows: int) -> int:
    """Return the number of rows that ``rows`` are padded to: few shapes, so that few are tried."""
    step = 8 if rows <= 64 else 64
    return -(-rows // step) * step


SHAPES = TrustedShapes()


# Elementwise functions whose result depends on nothing but the element. A vectorised kernel computes the last elements of an array,
# and those at the end of each thread's share, one by one with another implementation, whose last bit may differ (measured for SiLU,
# GELU, sigmoid and the reciprocal square root). Here arrays are padded so that no share has such a remainder.

VECTOR = 64  # elements; at least two vectors of every width and dtype, which kernels take at once
GRAIN = 32768  # elements of a thread's share, at least (at::internal::GRAIN_SIZE)


def padded_size(count: int, threads: int) -> int:
    """Return the smallest size of at least ``count`` elements whose share of every thread is a multiple of whole vectors."""
    size = -(-count // VECTOR) * VECTOR
    while True:
        step = VECTOR * min(threads, -(-size // GRAIN))
        if size % step == 0:
            return size
        size = -(-size // step) * step


def apply_whole_vectors(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return ``function(values)`` for an elementwise function, any shape. Differentiable if the function is."""
    if values.device.type != "cpu" or not values.is_floating_point():
        return function(values)
    size = padded_size(values.numel(), torch.get_num_threads())
    if size == values.numel():
        return function(values.contiguous())
    padded = torch.nn.functional.pad(values.reshape(-1), (0, size - values.numel()), value=1.0)  # 1: finite with every function
    return function(padded)[: values.numel()].view(values.shape)


# Weights as exact products read them: in the precision of the pass and, on a CPU, in oneDNN's layout.
#
# Learner and engine read the same copies. A copy is made again when its weight has changed.

PACKED_FOR_ROWS = 32  # batch size that oneDNN chooses its layout for; others work too


@dataclass(frozen=True, eq=False)
class _WeightCopy:
    owner: Tensor  # kept, so that its id stays its own
    address: int
    version: int
    copy: Tensor


class PackedWeights:
    """Copies of a model's weights, made when they are first read."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], _WeightCopy] = {}

    def __deepcopy__(self, memo: Any) -> PackedWeights:
        return PackedWeights()  # of another model

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the copy of a weight [N, K]: a parameter, or a view of one."""
        owner = weight if weight._base is None else weight._base
        if weight.dtype == dtype and not can_pack(weight.device, dtype):
            return weight
        if not isinstance(owner, nn.Parameter):
            return pack_weight(weight, dtype)
        key = (id(owner), weight.storage_offset(), weight.shape, weight.stride(), dtype)
        known = self._copies.get(key)
        if known is None or known.version != owner._version or known.address != weight.data_ptr():
            known = _WeightCopy(owner, weight.data_ptr(), owner._version, pack_weight(weight, dtype))
            self._copies[key] = known
        return known.copy

    def clear(self) -> None:
        """Drop all copies, after weights changed by other means than in-place operations."""
        self._copies.clear()

    def find_stale(self, weight: Tensor) -> Tensor | None:
        """Return a copy of a parameter that generation would read although it differs from it, dense, or None."""
        for (owner, _, shape, _, dtype), known in self._copies.items():
            fresh = owner == id(weight) and shape == weight.shape and known.version == weight._version
            if fresh and not torch.equal(dense := _to_dense(known.copy), weight.to(dtype)):
                return dense
        return None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN has a layout for weights of this dtype on the device: not in bfloat16 on a CPU without AVX-512."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    supported: bool = dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return supported


@torch.no_grad()
def pack_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight [N, K] as ``multiply_packed`` reads it."""
    weight = weight.detach().to(dtype)
    if not can_pack(weight.device, dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return packed


def multiply_packed(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product [n, N] of rows [n, K] with a weight of ``pack_weight``."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return product
    return nn.functional.linear(rows, weight, bias)


def _to_dense(copy: Tensor) -> Tensor:
    return copy.to_dense() if copy.is_mkldnn else copy


# Products with a weight in which a row's bits do not depend on how many rows are multiplied with it.
#
# Rows are multiplied in calls of shapes that have the bits of the reference shape (``trusted_shapes``), the rest of the rows padded with
# zeros. The backward pass is the ordinary one: gradients are those of the same function, and no bits of theirs are promised.

MOST_ROWS = 1024  # of one call
MOST_OPERATIONS = 1 << 32  # multiplications of one call, which bounds what trying its shape costs
PATTERN = 65521  # random numbers that the weight of a trial repeats; a prime, so that rows differ


def exact_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, weights: PackedWeights) -> Tensor:
    """Return inputs [.., K] times weight [N, K] plus bias [N], in the precision of autocast if it is on -> [.., N]. Differentiable."""
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.promote_types(inputs.dtype, weight.dtype)
    apply: Any = _RowProduct.apply
    product: Tensor = apply(inputs.reshape(-1, inputs.shape[-1]), weight, bias, weights, dtype)
    return product.view(*inputs.shape[:-1], -1)


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, weights: PackedWeights, dtype: torch.dtype
    ) -> Tensor:
        ctx.row_dtype = rows.dtype
        rows = rows.to(dtype)
        ctx.save_for_backward(rows, weight, bias)
        return multiply_rows(rows, weights.get(weight, dtype), weight.shape[0], None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, bias = ctx.saved_tensors
        with torch.autocast(grad.device.type, enabled=False):
            grad_rows = (grad @ weight.to(grad.dtype)).to(ctx.row_dtype) if ctx.needs_input_grad[0] else None
            grad_weight = (grad.t() @ rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
            grad_bias = grad.sum(0).to(bias.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        return grad_rows, grad_weight, grad_bias, None, None


def multiply_rows(rows: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
    """Return rows [n, K] times a weight of ``pack_weight`` with N = ``outputs``, plus a bias [N] -> [n, N]."""
    inputs = rows.shape[1]
    kind = ProductKind("linear", inputs, outputs, rows.dtype, rows.device, bias is not None)
    most = max(64, min(MOST_ROWS, MOST_OPERATIONS // (inputs * outputs) // 64 * 64))
    results = []
    for part in rows.contiguous().split(most):
        size = min(round_up_rows(len(part)), most)

        def product(block: Tensor) -> Tensor:
            return multiply_packed(block, packed, bias)

        if SHAPES.trusts(kind, (size,), lambda: _trial_product(kind)):
            padded = part if size == len(part) else nn.functional.pad(part, (0, 0, 0, size - len(part)))
            results.append(product(padded)[: len(part)])
        else:
            results.append(in_reference_blocks(product, part, dims=1))
    return results[0] if len(results) == 1 else torch.cat(results) if results else rows.new_zeros(0, outputs)


def _trial_product(kind: ProductKind) -> RowFunction:
    """Return the product with a weight and a bias of random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(kind.outputs)
    pattern = torch.randn(PATTERN, generator=generator)
    count = kind.inputs * kind.outputs
    weight = pattern.repeat(-(-count // PATTERN))[:count].view(kind.outputs, kind.inputs).to(kind.device, kind.dtype)
    bias = weight[:, 0].clone() if kind.details else None
    packed = pack_weight(weight, kind.dtype)
    return lambda rows: multiply_packed(rows, packed, bias)
