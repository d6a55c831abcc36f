"""Triton kernels of the two passes over a row of logits: read once forward, read and written once backward. Needs Triton; for GPUs.

Imported only where they are used. Tested on an H200 (2026-11-28); tests run them in Triton's interpreter and compile them for other GPUs.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

from strop.models.logprobs.lm_head import RowSlopes, TileSummary

BLOCK = 4096  # logits of one row read by a program at a time


class TritonRows:
    """The operations of ``logit_tiles.TileOperations`` on whole rows: bfloat16, float16 or float32 in, float32 inside."""

    def summarize(self, product: Tensor, temperature: float) -> TileSummary:
        rows, columns = product.shape
        normalizer, mean = (torch.empty(rows, dtype=torch.float32, device=product.device) for _ in range(2))
        _summarize[(rows,)](product, normalizer, mean, columns, product.stride(0), temperature, BLOCK=BLOCK)
        return TileSummary(normalizer, mean)

    def differentiate(self, product: Tensor, temperature: float, slopes: RowSlopes) -> Tensor:
        """Return the gradient of ``product``, in a new tensor of its dtype."""
        rows, columns = product.shape
        gradient = torch.empty_like(product)
        of_entropy = slopes.of_logprob if slopes.of_entropy is None else slopes.of_entropy  # not read without entropies
        columns_of_rows = (slopes.log_normalizer, slopes.of_logprob, of_entropy, slopes.shift, slopes.place, slopes.chosen)
        _differentiate[(rows, triton.cdiv(columns, BLOCK))](
            product,
            gradient,
            *(each.contiguous() for each in columns_of_rows),
            columns,
            product.stride(0),
            temperature,
            WITH_ENTROPY=slopes.of_entropy is not None,
            BLOCK=BLOCK,
        )
        return gradient


# Triton evaluates a kernel's annotations and accepts only ``tl.constexpr``.
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _summarize(logits, normalizers, means, columns, stride, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row: the online softmax of its logits. ``weighted`` is the sum of exp(x - highest) * (x - highest)."""
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * stride
    highest, total, weighted = -1.0e30, 0.0, 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        values = tl.load(start_of_row + offsets, mask=inside, other=float("-inf")).to(tl.float32) / temperature
        new = tl.maximum(highest, tl.max(values, 0))
        shifted = tl.where(inside, values - new, 0.0)
        exponentials = tl.where(inside, tl.exp(shifted), 0.0)
        scale = tl.exp(highest - new)
        weighted = scale * (weighted + (highest - new) * total) + tl.sum(exponentials * shifted, 0)
        total = scale * total + tl.sum(exponentials, 0)
        highest = new
    tl.store(normalizers + row, highest + tl.log(total))
    tl.store(means + row, highest + weighted / total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _differentiate(  # type: ignore[no-untyped-def]
    logits,
    gradients,
    normalizers,
    of_logprob,
    of_entropy,
    shifts,
    places,
    chosen,
    columns,
    stride,
    temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a row: softmax times the row's slopes, plus the target's share (``RowSlopes``)."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    place = row.to(tl.int64) * stride + offsets
    values = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32) / temperature
    slope = tl.load(of_logprob + row)
    probabilities = tl.exp(values - tl.load(normalizers + row))
    if WITH_ENTROPY:
        shifted = tl.where(inside, values + tl.load(shifts + row), 0.0)
        gradient = probabilities * (slope + tl.load(of_entropy + row) * shifted)
    else:
        gradient = probabilities * slope
    gradient += tl.where(offsets == tl.load(places + row), tl.load(chosen + row), 0.0)
    tl.store(gradients + place, gradient.to(gradients.dtype.element_ty), mask=inside)
