"""The merge of a part of attention into an output as one Triton kernel, which reads and writes each number once. Needs Triton; for GPUs.

Imported only where it is used. Tests run it in Triton's interpreter and compile it for several GPUs; not yet run on one.
"""

from __future__ import annotations

import triton  # type: ignore[import-untyped,import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,import-not-found,unused-ignore]
from torch import Tensor

BLOCK = 4096  # numbers of the output that a program merges at a time, at most


def merge_rows_on_gpu(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | slice) -> None:
    """``merge_rows`` (strop.models.attention.merged_attention) for an output in bfloat16, float16 or float32 and lse in float32."""
    count, heads, size = part.shape
    indexed = isinstance(rows, Tensor)
    width = triton.next_power_of_2(size)
    block = min(triton.next_power_of_2(heads), max(1, BLOCK // width))
    _merge[(count, triton.cdiv(heads, block))](
        output,
        lse,
        part.contiguous(),
        part_lse.contiguous(),
        rows if isinstance(rows, Tensor) else output,
        0 if isinstance(rows, Tensor) else rows.start,
        len(output),
        count,
        heads,
        size,
        INDEXED=indexed,
        HEADS=block,
        SIZE=width,
    )


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _merge(  # type: ignore[no-untyped-def]
    output,
    lse,
    part,
    part_lse,
    places,
    first,
    rows,
    count,
    heads,
    size,
    INDEXED: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program per row of the part and block of heads."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row) if INDEXED else first + row
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, SIZE)
    known = head < heads
    before = tl.load(lse + head * rows + place, mask=known, other=0.0)
    added = tl.load(part_lse + head * count + row, mask=known, other=0.0)
    highest = tl.maximum(before, added)
    shift = tl.where(highest == float("-inf"), 0.0, highest)  # -inf minus -inf is NaN
    total = shift + tl.log(tl.exp(before - shift) + tl.exp(added - shift))
    divisor = tl.where(highest == float("-inf"), 0.0, total)
    inside = known[:, None] & (column[None, :] < size)
    target = output + (place * heads + head[:, None]) * size + column[None, :]
    old = tl.load(target, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(part + (row * heads + head[:, None]) * size + column[None, :], mask=inside, other=0.0).to(tl.float32)
    merged = old * tl.exp(before - divisor)[:, None] + new * tl.exp(added - divisor)[:, None]
    tl.store(target, merged.to(output.dtype.element_ty), mask=inside)
    tl.store(lse + head * rows + place, total, mask=known)
