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

_libraries: list[Any] = []  # alive as long as the process


def register_flash_attention(native: Any) -> None:
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name, function in (("forward", _forward), ("backward", _backward)):
        library.impl(f"_flash_attention_{name}", as_kernel(native, function), "PrivateUse1")
    _libraries.append(library)
    if is_here("triton"):
        from strop.models.attention import merge_kernel

        merge_kernel.merge_rows_on_gpu = as_kernel(native, merge_rows_by_operators)


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


def _scores(query: Tensor, key: Tensor, scale: float, causal: bool) -> Tensor:
    """[T, heads, D] x [S, kv_heads, D] -> [heads, T, S] float32."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("thd,shd->hts", query.float(), key.float()) * scale
    if causal:
        rows, columns = scores.shape[1:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def _forward(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, longest_query: int, longest_key: int,
    dropout: float, causal: bool, debug: bool, *, scale: float | None = None, **options: Any,
) -> Any:  # fmt: skip
    _check((query, key, value), (query_ends, key_ends))
    device, scale = query.device, scale or query.shape[2] ** -0.5
    q, k, v = query.cpu(), key.cpu(), value.cpu()
    output, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for rows, columns in _sequences(query_ends, key_ends):
        if rows.stop - rows.start > longest_query or columns.stop - columns.start > longest_key:
            raise RuntimeError("a sequence is longer than max_q or max_k")
        scores = _scores(q[rows], k[columns], scale, causal)
        lse[:, rows] = scores.logsumexp(-1)
        values = v[columns].float().repeat_interleave(q.shape[1] // k.shape[1], 1)
        output[rows] = torch.einsum("hts,shd->thd", scores.softmax(-1), values).to(q.dtype)
    empty = torch.empty(0, device=device)
    return output.to(device), lse.to(device), torch.zeros(2, dtype=torch.uint64).to(device), empty, empty


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, query_ends: Tensor, key_ends: Tensor,
    longest_query: int, longest_key: int, dropout: float, causal: bool, seed: Any, unused: Any, *,
    scale: float | None = None, **options: Any,
) -> Any:  # fmt: skip
    _check((query, key, value, output, grad), (query_ends, key_ends))
    if lse.dtype != torch.float32 or tuple(lse.shape) != (query.shape[1], len(query)):
        raise RuntimeError("softmax_lse must be float32, [heads, tokens]")
    device, scale, groups = query.device, scale or query.shape[2] ** -0.5, query.shape[1] // key.shape[1]
    q, k, v, o, g = (each.cpu().float() for each in (query, key, value, output, grad))
    grads, totals = [torch.zeros_like(each) for each in (q, k, v)], lse.cpu()
    for rows, columns in _sequences(query_ends, key_ends):
        weights = (_scores(q[rows], k[columns], scale, causal) - totals[:, rows, None]).exp()
        values, keys = (each[columns].repeat_interleave(groups, 1) for each in (v, k))
        arriving = torch.einsum("thd,shd->hts", g[rows], values) - (g[rows] * o[rows]).sum(-1).t()[:, :, None]
        change = weights * arriving * scale
        grads[0][rows] += torch.einsum("hts,shd->thd", change, keys)
        grads[1][columns] += torch.einsum("hts,thd->shd", change, q[rows]).unflatten(1, (-1, groups)).sum(2)
        grads[2][columns] += torch.einsum("hts,thd->shd", weights, g[rows]).unflatten(1, (-1, groups)).sum(2)
    return tuple(each.to(query.dtype).to(device) for each in grads)
