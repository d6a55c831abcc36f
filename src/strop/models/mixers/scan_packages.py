"""Fused kernels of a GPU for recurrences, where their packages are installed: flash-linear-attention for the delta rules, mamba-ssm for
Mamba 2.

They start from given states, return the last ones, and pass gradients to both. mamba-ssm's scan for Mamba starts from zeros, so Mamba
is computed in blocks. Sequences are padded for blocks already, by rows of zeros that leave a state unchanged, so the kernels need no
lists of where sequences start.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.models.kernel_packages import choose_package, compare
from strop.models.mixers.recurrence import Recurrence, Rows

log = logging.getLogger(__name__)

PRODUCTS = 3  # query, key and value are multiplied in the layer's dtype; decays and steps add up in float32
CHUNK = 256  # of mamba-ssm
LENGTHS = (5, 130, 64)  # of the compared sequences
UNIT = (-1.0, 1.0)


@dataclass(frozen=True)
class ScanPackage:
    """The kernel for one kind of recurrence: ``compute(function, rows, state)`` -> outputs and last states, as a ``Recurrence``."""

    name: str
    module: str
    function: str
    compute: Callable[[Any, Rows, Tensor | None], tuple[Tensor, Tensor]]
    ranges: tuple[tuple[float, float], ...]  # of the numbers of each row when kernels are compared

    def run(self, dtype: torch.dtype, rows: Rows, state: Tensor | None) -> tuple[Tensor, Tensor]:
        function = getattr(importlib.import_module(self.module), self.function)
        rounded = [*(each.to(dtype) for each in rows[:PRODUCTS]), *rows[PRODUCTS:]]
        with torch.autocast(rows[0].device.type, enabled=False):
            outputs, last = self.compute(function, rounded, state)
        return outputs.to(rows[0].dtype), last.to(rows[0].dtype)


def _delta_rule(function: Any, rows: Rows, state: Tensor | None) -> tuple[Tensor, Tensor]:
    outputs, last = function(*rows, scale=1.0, initial_state=state, output_final_state=True)
    return outputs, last


def _state_space(function: Any, rows: Rows, state: Tensor | None) -> tuple[Tensor, Tensor]:
    read_out, read_in, inputs, step, rates = rows
    # Each token has the rates of its heads, below zero; only padding has zeros. The minimum shares its gradient among the tokens.
    arguments = (inputs, step, rates.amin((0, 1)), read_in, read_out, CHUNK)
    outputs, last = function(*arguments, initial_states=None if state is None else state.mT, return_final_states=True)
    return outputs, last.mT  # its states are [V, K]


_DELTA_RANGES = (UNIT, UNIT, UNIT, (-0.5, 0.0), (0.0, 1.0))
GATED_DELTA_RULE = ScanPackage(
    "flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", _delta_rule, _DELTA_RANGES
)
KIMI_DELTA_ATTENTION = replace(GATED_DELTA_RULE, module="fla.ops.kda", function="chunk_kda")
MAMBA2 = ScanPackage(
    "mamba-ssm",
    "mamba_ssm.ops.triton.ssd_combined",
    "mamba_chunk_scan_combined",
    _state_space,
    (UNIT, UNIT, UNIT, (0.0, 1.0), (-0.5, -0.5)),
)

_chosen: dict[tuple[Any, ...], ScanPackage | None] = {}


def with_kernel(recurrence: Recurrence, package: ScanPackage, rows: Rows, dtype: torch.dtype) -> Recurrence:
    """Let a package compute a recurrence of a layer of ``dtype`` if it can on this device: rows [T, ...]."""
    device = rows[0].device
    # Deterministic runs keep blocks: Triton tunes kernels by time, and mamba-ssm's add up gradients in any order.
    if not is_gpu(device) or dtype not in (torch.bfloat16, torch.float16) or torch.are_deterministic_algorithms_enabled():
        return recurrence
    shapes = tuple(tuple(each.shape[1:]) for each in rows)
    key = package, device, dtype, shapes
    if key not in _chosen:
        use = f"{package.function} with states of {recurrence.state_shape}"
        _chosen[key] = choose_package([package], use, lambda each: find_fault(each, recurrence, shapes, device, dtype))
    _log_choice(package, _chosen[key] is not None)
    return recurrence if _chosen[key] is None else replace(recurrence, kernel=partial(package.run, dtype))


@cache
def _log_choice(package: ScanPackage, used: bool) -> None:
    kernel = f"{package.function} of {package.name}"
    log.info("recurrent layers by %s", kernel if used else f"blocks of products; {kernel}, where it is installed, is faster")


def find_fault(
    package: ScanPackage,
    recurrence: Recurrence,
    shapes: tuple[tuple[int, ...], ...],
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    """Compare a kernel with blocks on three short sequences that go on from states; return its error, or where it differs."""
    numbers = torch.Generator().manual_seed(0)
    real = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).to(device)

    def draw(shape: tuple[int, ...], lowest: float = -1.0, highest: float = 1.0) -> Tensor:
        return (torch.rand(len(LENGTHS), *shape, generator=numbers) * (highest - lowest) + lowest).to(device)

    def of_real(row: Tensor) -> Tensor:
        return row * real.view(*real.shape, *(1,) * (row.dim() - 2))

    drawn = [of_real(draw((max(LENGTHS), *shape), *bounds)) for shape, bounds in zip(shapes, package.ranges, strict=True)]
    lengths = [(3 / shapes[1][-1]) ** 0.5] * 2 + [1.0] * (len(shapes) - 2)  # queries and keys of length one
    rows = [each * length for each, length in zip(drawn, lengths, strict=True)]
    rows = [*(each.to(dtype).float() for each in rows[:PRODUCTS]), *rows[PRODUCTS:]]
    state, grads = draw(recurrence.state_shape), (of_real(draw((max(LENGTHS), *shapes[2]))), draw(recurrence.state_shape))

    def results(compute: Callable[[Rows, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in (*rows, state)]
        outputs, last = compute(leaves[:-1], leaves[-1])
        *found, first = torch.autograd.grad((outputs, last), leaves, grads)
        # What is the same for all tokens has the sum as its gradient.
        found = [
            each.sum((0, 1)) if low == high else of_real(each) for each, (low, high) in zip(found, package.ranges, strict=True)
        ]
        return [of_real(outputs.detach()), last.detach(), *found, first]

    names = ("output", "last state", *(f"row {place + 1}" for place in range(len(rows))), "first state")
    return compare(lambda: results(partial(package.run, dtype)), lambda: results(recurrence), names)
