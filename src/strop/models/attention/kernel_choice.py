"""Choose the attention kernel by device, dtype and length, from a measured table (docs/performance.md)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.flash_kernel import flash_obstacle
from strop.packages import has_cpp_compiler

log = logging.getLogger(__name__)

AttentionKernel = Literal["auto", "plain", "flash", "blockwise", "flex"]
AttentionKernelName = Literal["plain", "flash", "blockwise", "flex"]

# Up to this many scores of the largest family of siblings, including padding, plain products are at least as fast as the others.
PLAIN_SCORES = {
    ("cpu", torch.float64): 1 << 20,
    ("cpu", torch.float32): 1 << 20,
    ("cpu", torch.bfloat16): 1 << 22,
    ("cpu", torch.float16): 1 << 20,
    ("gpu", torch.float32): 1 << 22,  # not measured: there is no fused kernel for these
    ("gpu", torch.float64): 1 << 22,
}

SMALLEST_FLEX_HEAD = 16  # on a GPU, because its kernel uses tl.dot


@dataclass(frozen=True)
class KernelChoice:
    """A kernel and the reason for its choice."""

    kernel: AttentionKernelName
    reason: str
    replaces: AttentionKernel = "auto"  # the requested kernel, if it cannot compute this attention


def choose_kernel(
    asked: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, scores: int
) -> AttentionKernelName:
    """Return the kernel for a layer's attention, and log it once. ``scores``: number of scores of the largest family with plain
    products.
    """
    if asked == "plain" or asked == "blockwise":
        return asked
    obstacle = flash_obstacle(query, key, value, spec)
    if asked == "auto":
        choice = _choose(query, value, spec, scores, obstacle)
    elif asked == "flash":
        choice = KernelChoice("flash", "as configured") if obstacle is None else KernelChoice("blockwise", obstacle, "flash")
    else:
        missing = _flex_obstacle(query, value, spec)
        choice = KernelChoice("flex", "as configured") if missing is None else KernelChoice("blockwise", missing, "flex")
    _log_once(choice, query.device.type, query.dtype)
    return choice.kernel


def choose_piece_kernel(
    asked: AttentionKernel, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec
) -> AttentionKernelName:
    """Return the kernel for attention over keys in several places, ``flash`` or ``blockwise``, and log it once."""
    obstacle = "as configured" if asked == "blockwise" else flash_obstacle(query, key, value, spec)
    if spec.window is not None:
        obstacle = obstacle or "the layer has a sliding window, whose keys are in several places"
    reason = obstacle or "as the keys are in several places"
    replaced = asked in ("plain", "flex") or (asked == "flash" and obstacle is not None)
    choice = KernelChoice("blockwise" if obstacle else "flash", reason, asked if replaced else "auto")
    _log_once(choice, query.device.type, query.dtype)
    return choice.kernel


def _choose(query: Tensor, value: Tensor, spec: AttentionSpec, scores: int, obstacle: str | None) -> KernelChoice:
    device, dtype = query.device.type, query.dtype
    limit = PLAIN_SCORES.get(("gpu" if is_gpu(query.device) else device, dtype), 0)
    if scores <= limit:
        return KernelChoice("plain", f"a family of siblings has at most {limit:,} scores")
    if obstacle is None:
        return KernelChoice("flash", f"more than {limit:,} scores, which it does not keep" if limit else "no padding and no mask")
    if device == "cpu":
        return KernelChoice("blockwise", f"no fused kernel: {obstacle}")
    missing = _flex_obstacle(query, value, spec)
    if missing is None:
        return KernelChoice("flex", f"no fused kernel: {obstacle}")
    return KernelChoice("blockwise", f"no fused kernel: {obstacle}; no FlexAttention: {missing}")


def _flex_obstacle(query: Tensor, value: Tensor, spec: AttentionSpec) -> str | None:
    """Return why FlexAttention cannot compute this attention; None if it can."""
    if spec.chosen is not None:
        return "its mask is that of all layers"
    return _compile_obstacle(query.device.type, min(query.shape[2], value.shape[2]))


@cache
def _compile_obstacle(device: str, size: int) -> str | None:
    """Return why FlexAttention cannot be compiled for this head size on a device; None if it can."""
    if device == "cuda":
        if size < SMALLEST_FLEX_HEAD:
            return f"its products need heads of size {SMALLEST_FLEX_HEAD} or more, and these have size {size}"
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed"
    if device != "cpu":
        return f"it is not made for {device}"
    return None if has_cpp_compiler() else "there is no C++ compiler to compile it with"


_logged: set[tuple[KernelChoice, str, torch.dtype]] = set()


def _log_once(choice: KernelChoice, device: str, dtype: torch.dtype) -> None:
    if (choice, device, dtype) in _logged:
        return
    _logged.add((choice, device, dtype))
    kind = f"{device}, {str(dtype).removeprefix('torch.')}"
    if choice.replaces == "auto":
        log.info("attention on %s: %s (%s)", kind, choice.kernel, choice.reason)
    else:
        log.warning("attention on %s: %s instead of %s: %s", kind, choice.kernel, choice.replaces, choice.reason)
