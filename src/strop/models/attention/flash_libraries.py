"""The fused kernels of a GPU for sequences of different lengths in one call: torch's own FlashAttention 2, and FlashAttention 3 (arXiv
2407.08608) and 4 where their packages are installed.

Packages are called directly and not through ``torch.nn.attention.activate_flash_attention_impl``, which replaces the kernels of the
whole process and passes on no soft cap. Before its first use on a GPU, a package's kernel is compared with plain products. torch's
variable-length attention by cuDNN is not used: torch itself has it switched off; it takes no window, and plans for each new shape.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from strop.models.attention.attention_plan import AttentionSpec
from strop.models.kernel_packages import choose_package, compare

log = logging.getLogger(__name__)

aten: Any = torch.ops.aten

Rows = tuple[Tensor, Tensor, Tensor]  # queries [T, heads, D], keys and values [S, kv_heads, D]


@dataclass(frozen=True, eq=False)
class VarlenSequences:
    """The sequences of a call: each has some of its queries and of its keys, one after the other."""

    query_ends: Tensor  # [sequences + 1] int32: the start of each sequence, and the end of the last
    key_ends: Tensor
    longest: tuple[int, int]  # queries, keys
    causal: bool  # queries are the last of the keys, and see none after themselves; otherwise they see all keys


@dataclass(frozen=True)
class FlashLibrary:
    """A kernel. ``forward`` returns the output [T, heads, D] and lse [heads, T] float32, ``backward`` takes the output's gradient, the
    rows, the output and lse of the whole attention, and returns the gradients of the rows.
    """

    name: str
    caps: bool  # it can compute soft caps
    forward: Callable[[Rows, VarlenSequences, AttentionSpec], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Rows, Tensor, Tensor, VarlenSequences, AttentionSpec], Sequence[Tensor]]
    module: str = "torch"


def _window(spec: AttentionSpec, sequences: VarlenSequences) -> tuple[int, int]:
    """Return how many keys before and after its own position a query sees; -1: all."""
    if spec.window is None:
        return -1, 0 if sequences.causal else -1
    return spec.window - 1, 0


def _torch_forward(rows: Rows, sequences: VarlenSequences, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    ends, (left, right) = (sequences.query_ends, sequences.key_ends), _window(spec, sequences)
    options = {"scale": spec.scale, "window_size_left": left, "window_size_right": right}
    output, lse, *_ = aten._flash_attention_forward(*rows, *ends, *sequences.longest, 0.0, sequences.causal, False, **options)
    return output, lse


def _torch_backward(
    grad: Tensor, rows: Rows, output: Tensor, lse: Tensor, sequences: VarlenSequences, spec: AttentionSpec
) -> Sequence[Tensor]:
    ends, (left, right) = (sequences.query_ends, sequences.key_ends), _window(spec, sequences)
    options = {"scale": spec.scale, "window_size_left": left, "window_size_right": right}
    shape = (*ends, *sequences.longest, 0.0, sequences.causal, *_no_dropout(grad.device))
    grads: Sequence[Tensor] = aten._flash_attention_backward(grad, *rows, output, lse, *shape, **options)
    return grads


@cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """A random state that is not read."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _third_forward(rows: Rows, sequences: VarlenSequences, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    ends, nothing = (sequences.query_ends, sequences.key_ends), None
    output, lse, *_ = torch.ops.flash_attn_3.fwd(
        *rows, *[nothing] * 4, *ends, *[nothing] * 3, *sequences.longest, *[nothing] * 9,
        spec.scale, sequences.causal, *_window(spec, sequences), 0, spec.softcap or 0.0, True, nothing,
        1 if torch.are_deterministic_algorithms_enabled() else 0, nothing, 0,
    )  # fmt: skip
    return output, lse


def _third_backward(
    grad: Tensor, rows: Rows, output: Tensor, lse: Tensor, sequences: VarlenSequences, spec: AttentionSpec
) -> Sequence[Tensor]:
    grads = [torch.empty_like(row) for row in rows]
    torch.ops.flash_attn_3.bwd(
        grad, *rows, output, lse, *grads, sequences.query_ends, sequences.key_ends, None, None, *sequences.longest,
        spec.scale, sequences.causal, *_window(spec, sequences), spec.softcap or 0.0,
        torch.are_deterministic_algorithms_enabled(), 0,
    )  # fmt: skip
    return grads


def _fourth_options(sequences: VarlenSequences, spec: AttentionSpec) -> dict[str, Any]:
    left, right = (None if size < 0 else size for size in _window(spec, sequences))
    return {
        "cu_seqlens_q": sequences.query_ends,
        "cu_seqlens_k": sequences.key_ends,
        "max_seqlen_q": sequences.longest[0],
        "max_seqlen_k": sequences.longest[1],
        "softmax_scale": spec.scale,
        "causal": sequences.causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": spec.softcap or 0.0,
    }


def _fourth_forward(rows: Rows, sequences: VarlenSequences, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    kernels: Any = importlib.import_module(FOURTH)
    output, lse, *_ = kernels._flash_attn_fwd(*rows, return_lse=True, **_fourth_options(sequences, spec))
    return output, lse


def _fourth_backward(
    grad: Tensor, rows: Rows, output: Tensor, lse: Tensor, sequences: VarlenSequences, spec: AttentionSpec
) -> Sequence[Tensor]:
    kernels: Any = importlib.import_module(FOURTH)
    options = _fourth_options(sequences, spec) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    grads: Sequence[Tensor] = kernels._flash_attn_bwd(*rows, output, grad, lse, **options)[:3]
    return grads


THIRD, FOURTH = "flash_attn_interface", "flash_attn.cute.interface"
TORCH = FlashLibrary("FlashAttention 2", False, _torch_forward, _torch_backward)
PACKAGES = (
    FlashLibrary("FlashAttention 3", True, _third_forward, _third_backward, THIRD),
    FlashLibrary("FlashAttention 4", True, _fourth_forward, _fourth_backward, FOURTH),
)
BY_CARD = {9: PACKAGES, 10: PACKAGES[1:]}  # by compute capability: Hopper, Blackwell; the fastest first


def choose_library(query: Tensor, key: Tensor, spec: AttentionSpec) -> FlashLibrary | None:
    """Return the kernel for a layer's attention on a GPU; None if there is none that caps scores as it does."""
    return _choose(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[2], spec.softcap, spec.window is not None)


def describe_missing_cap(device: torch.device) -> str:
    """Describe why no kernel of a GPU caps scores, and what does."""
    able = " or ".join(library.name for library in BY_CARD.get(card(device), ()))
    return f"the layer caps its scores, which needs {able}" if able else "the layer caps its scores"


def card(device: torch.device) -> int:
    """Return the major compute capability of an NVIDIA GPU, 0 for other devices."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.version.hip is None else 0


@cache
def _choose(
    device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int, softcap: float | None, window: bool
) -> FlashLibrary | None:
    spec = AttentionSpec(0, size**-0.5, 50 if window else None, softcap)
    shape = (heads, groups, size)
    packages = BY_CARD.get(card(device), ())
    library = choose_package(packages, f"heads of {size}", lambda each: find_fault(each, device, dtype, shape, spec))
    if library is not None:
        return _log_choice(library)
    return None if softcap is not None else _log_choice(TORCH)


@cache
def _log_choice(library: FlashLibrary) -> FlashLibrary:
    log.info("fused attention by %s", library.name)
    return library


def find_fault(
    library: FlashLibrary, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int], spec: AttentionSpec
) -> str | None:
    """Compare a kernel with plain products on three short sequences; return its error, or where it differs. None if it is right."""
    (heads, groups, size), lengths, before = shape, (5, 130, 64), (0, 70, 300)
    keys = [length + more for length, more in zip(lengths, before, strict=True)]
    ends = [torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32) for counts in (lengths, keys)]
    sequences = VarlenSequences(ends[0].to(device), ends[1].to(device), (max(lengths), max(keys)), True)
    numbers = torch.Generator().manual_seed(0)
    rows, grad = (
        [torch.randn(sum(count), each, size, generator=numbers).to(device, dtype) for count, each in counts]
        for counts in (((lengths, heads), (keys, groups), (keys, groups)), ((lengths, heads),))
    )
    query, key, value = rows

    def compute() -> list[Tensor]:
        importlib.import_module(library.module)
        output, lse = library.forward((query, key, value), sequences, spec)
        return [output, lse, *library.backward(grad[0], (query, key, value), output, lse, sequences, spec)]

    def compute_plain() -> list[Tensor]:
        return _plain([row.float().requires_grad_() for row in rows], grad[0].float(), ends, spec)

    return compare(compute, compute_plain, ("output", "log-sum-exp", "query", "key", "value"))


def _plain(rows: list[Tensor], grad: Tensor, ends: list[Tensor], spec: AttentionSpec) -> list[Tensor]:
    """Output, lse and gradients of causal sequences by products of float32."""
    outputs, sums, repeats = [], [], rows[0].shape[1] // rows[1].shape[1]
    for queries, keys in zip(pairwise(ends[0].tolist()), pairwise(ends[1].tolist()), strict=True):
        query, key, value = (row[slice(*place)] for row, place in zip(rows, (queries, keys, keys), strict=True))
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(repeats, 1)) * spec.scale
        scores = scores if spec.softcap is None else spec.softcap * (scores / spec.softcap).tanh()
        behind = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
        seen = (behind >= 0) & (behind < (spec.window or len(key)))
        scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(repeats, 1)))
        sums.append(scores.logsumexp(-1))
    output = torch.cat(outputs)
    return [output.detach(), torch.cat(sums, 1).detach(), *torch.autograd.grad(output, rows, grad)]
