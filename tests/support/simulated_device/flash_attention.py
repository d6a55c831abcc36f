"""torch's fused attention of sequences of different lengths, which the CPU does not have, with the checks of CUDA's kernel; and the
merge of its parts, one launch of a Triton kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from strop.models.attention.merged_attention import merge_rows_by_operators
from strop.packages import is_here
from strop.sampling import at_least_float32

_libraries: list[Any] = []  # alive as long as the process


def register_flash_attention(native: Any) -> None:
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name, function in (("forward", _forward), ("backward", _backward)):
        library.impl(f"_flash_attention_{name}", as_kernel(native, function), "PrivateUse1")
    _libraries.append(library)
    if is_here("triton"):
        from strop.models.attention import flash_kernel

        flash_kernel.merge_rows = as_kernel(native, merge_rows_by_operators)


def as_kernel(native: Any, function: Callable[..., Any], launches: int = 1) -> Callable[..., Any]:
    """Count a call as so many launches, and nothing that it does."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for _ in range(launches):
            native.count("launches")
        before = native.set_inside(True)
        try:
            return function(*args, **kwargs)
        finally:
            native.set_inside(before)

    return kernel


def _check(rows: tuple[Tensor, ...], ends: tuple[Tensor, ...]) -> None:
    query, key = rows[0], rows[1]
    checks = {
        "FlashAttention only support fp16 and bf16 data type": query.dtype in (torch.float16, torch.bfloat16),
        "query, key, value, output and gradient must have the same dtype": all(each.dtype == query.dtype for each in rows),
        "Input tensor must have contiguous last dimension": all(each.stride(-1) == 1 for each in rows),
        "all tensors must be on the GPU": all(each.device.type == "sim" for each in (*rows, *ends)),
        "cu_seqlens must have dtype int32": all(each.dtype == torch.int32 and each.is_contiguous() for each in ends),
        "Number of heads in key/value must divide number of heads in query": query.shape[1] % key.shape[1] == 0,
        "head dimension must be a multiple of 8 and at most 256": query.shape[2] % 8 == 0 and query.shape[2] <= 256,
    }
    for message, holds in checks.items():
        if not holds:
            raise RuntimeError(message)


def _sequences(query_ends: Tensor, key_ends: Tensor) -> Iterator[tuple[slice, slice]]:
    queries, keys = query_ends.cpu().tolist(), key_ends.cpu().tolist()
    for number in range(len(queries) - 1):
        yield slice(*queries[number : number + 2]), slice(*keys[number : number + 2])


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool, left: int) -> Tensor:
    """[T, heads, D] x [S, kv_heads, D] -> [heads, T, S]. ``left``: how many keys before its own place a query sees, -1: all."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("thd,shd->hts", at_least_float32(query), at_least_float32(key)) * scale
    if causal:
        behind = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
        seen = (behind >= 0) & (behind <= (left if left >= 0 else len(key)))
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _forward(query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *rest: Any, **options: Any) -> Any:
    _check((query, key, value), (query_ends, key_ends))
    found = varlen_forward(query.cpu(), key.cpu(), value.cpu(), query_ends, key_ends, *rest, **options)
    return tuple(each.to(query.device) for each in found)


def varlen_forward(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, longest_query: int, longest_key: int,
    dropout: float, causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The operator, by products on the CPU."""
    output, lse = torch.empty_like(query), at_least_float32(query.new_empty(query.shape[1], len(query)))
    for rows, columns in _sequences(query_ends, key_ends):
        if rows.stop - rows.start > longest_query or columns.stop - columns.start > longest_key:
            raise RuntimeError("a sequence is longer than max_q or max_k")
        scores = _scores(query[rows], key[columns], scale, causal, window_size_left)
        lse[:, rows] = scores.logsumexp(-1)
        values = at_least_float32(value[columns]).repeat_interleave(query.shape[1] // key.shape[1], 1)
        output[rows] = torch.einsum("hts,shd->thd", scores.softmax(-1), values).to(query.dtype)
    return output, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *rest: Any, **options: Any
) -> Any:
    _check((query, key, value, output, grad), rest[:2])
    if lse.dtype != torch.float32 or tuple(lse.shape) != (query.shape[1], len(query)):
        raise RuntimeError("softmax_lse must be float32, [heads, tokens]")
    found = varlen_backward(*(each.cpu() for each in (grad, query, key, value, output, lse)), *rest, **options)
    return tuple(each.to(query.device) for each in found)


def varlen_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, query_ends: Tensor, key_ends: Tensor,
    longest_query: int, longest_key: int, dropout: float, causal: bool, seed: Any, unused: Any, *,
    scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradient of the operator, by products on the CPU."""
    groups = query.shape[1] // key.shape[1]
    q, k, v, o, g = (at_least_float32(each) for each in (query, key, value, output, grad))
    grads = [torch.zeros_like(each) for each in (q, k, v)]
    for rows, columns in _sequences(query_ends, key_ends):
        weights = (_scores(q[rows], k[columns], scale, causal, window_size_left) - lse[:, rows, None]).exp()
        values, keys = (each[columns].repeat_interleave(groups, 1) for each in (v, k))
        arriving = torch.einsum("thd,shd->hts", g[rows], values) - (g[rows] * o[rows]).sum(-1).t()[:, :, None]
        change = weights * arriving * scale
        grads[0][rows] += torch.einsum("hts,shd->thd", change, keys)
        grads[1][columns] += torch.einsum("hts,thd->shd", change, q[rows]).unflatten(1, (-1, groups)).sum(2)
        grads[2][columns] += torch.einsum("hts,thd->shd", weights, g[rows]).unflatten(1, (-1, groups)).sum(2)
    return tuple(each.to(query.dtype) for each in grads)
