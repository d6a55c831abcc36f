"""Linear recurrences over padded sequences, in blocks of tokens from a state to the next: those of Transformers, and their fused kernels.

Between blocks only the state is kept: the backward pass computes each block again, so memory grows with the states, not with the
products inside of blocks. A row of zeros leaves a state unchanged, which is what pads sequences of several lengths.

The gated delta rule (Gated DeltaNet, arXiv 2412.06464), Kimi's delta attention (arXiv 2510.26692) and Mamba 2 (arXiv 2405.21060)
have a state S [K, V] for each head. It decays, is corrected, and is read by each token:

    S <- exp(g) S,    S <- S + k (beta (v - k S)),    o = q S

With one decay per channel (Kimi), ``g`` has the size of a key. Mamba 2 adds ``k v`` without a correction; C, B, x dt and A dt are its
q, k, v and g. Inside of a chunk these are triangular products, and states pass from chunk to chunk.

Mamba (arXiv 2312.00752) has a state h [I, N] of numbers that decay each on their own. Its blocks are scanned by doubling:

    h <- exp(A dt) h + dt x B,    y = h C

Fused kernels of a GPU for recurrences, where their packages are installed: flash-linear-attention for the delta rules, mamba-ssm for
Mamba 2.

They start from given states, return the last ones, and pass gradients to both. mamba-ssm's scan for Mamba starts from zeros, so Mamba
is computed in blocks. Sequences are padded for blocks already, by rows of zeros that leave a state unchanged, so the kernels need no
lists of where sequences start.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.determinism import running_sums
from strop.device_copies import is_gpu
from strop.models.kernel_packages import choose_package, compare

Rows = Sequence[Tensor]
Block = Callable[[Rows, Tensor, Rows], tuple[Tensor, Tensor]]
Kernel = Callable[[Rows, "Tensor | None"], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MixerSpec:
    """The place of a convolution or recurrence in a model, under which an engine keeps its state."""

    layer: int
    call: int  # which one of the layer: Zamba has a scan for each head


@dataclass(frozen=True, eq=False)
class Recurrence:
    """Tokens of a sequence change a state, and read it."""

    block: Block
    """(rows [S, L, ...], state [S, ...], constants) -> outputs [S, L, ...] and the state after them, differentiable"""
    state_shape: tuple[int, ...]
    length: int  # of a block, in tokens
    constants: tuple[Tensor, ...] = ()  # the same for all tokens
    kernel: Kernel | None = None  # of a package, in place of blocks

    def __call__(self, rows: Rows, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows [S, L, ...] and the states [S, ...] before them (None: zeros) -> outputs [S, L, ...] and the last states."""
        if self.kernel is not None and rows[0].shape[1] > 1:  # kernels have chunks, of which one token would leave most empty
            return self.kernel(rows, state)
        if state is None:
            state = rows[0].new_zeros(len(rows[0]), *self.state_shape)
        apply: Any = _Blocks.apply
        outputs, last = apply(self, len(rows), state, *rows, *self.constants)
        return outputs, last

    def run_block(self, rows: Rows, state: Tensor, constants: Rows) -> tuple[Tensor, Tensor]:
        with torch.autocast(state.device.type, enabled=False):
            return self.block(rows, state, constants)


class MixerPlan(Protocol):
    """Decides which tokens precede which, for layers that carry a state from token to token."""

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, spec: MixerSpec) -> Tensor:
        """Causal depthwise convolution of one flat row: inputs [T, C], weight [C, k] -> [T, C]."""
        ...

    def scan(self, recurrence: Recurrence, rows: Rows, spec: MixerSpec) -> Tensor:
        """Outputs [T, ...] of a recurrence over the tokens of one flat row, rows [T, ...]."""
        ...


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, count: int, state: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        rows, constants = tensors[:count], tensors[count:]
        states, outputs = [], []
        for start in range(0, rows[0].shape[1], recurrence.length):
            states.append(state)
            output, state = recurrence.run_block(_cut(rows, start, recurrence.length), state, constants)
            outputs.append(output)
        ctx.save_for_backward(*tensors, *states)
        ctx.recurrence, ctx.count, ctx.tensors = recurrence, count, len(tensors)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        recurrence: Recurrence = ctx.recurrence
        saved = ctx.saved_tensors
        rows, constants, states = saved[: ctx.count], saved[ctx.count : ctx.tensors], saved[ctx.tensors :]
        grads: list[tuple[Tensor, ...]] = []
        totals = [torch.zeros_like(each) for each in constants]
        for place in reversed(range(len(states))):
            start = place * recurrence.length
            leaves = [
                each.detach().requires_grad_() for each in (states[place], *_cut(rows, start, recurrence.length), *constants)
            ]
            with torch.enable_grad():
                computed = recurrence.run_block(leaves[1 : 1 + ctx.count], leaves[0], leaves[1 + ctx.count :])
            arriving = (grad[:, start : start + recurrence.length], grad_state)
            grad_state, *found = torch.autograd.grad(computed, leaves, arriving)
            grads.append(tuple(found[: ctx.count]))
            for total, each in zip(totals, found[ctx.count :], strict=True):
                total += each
        joined = (torch.cat(parts[::-1], 1) for parts in zip(*grads, strict=True))
        return None, None, grad_state, *joined, *totals


def _cut(rows: Rows, start: int, length: int) -> list[Tensor]:
    return [each[:, start : start + length] for each in rows]


CHUNK, CHANNEL_CHUNK = 64, 16  # tokens; a decay per channel makes [chunk, chunk, K] numbers
BLOCK, SCAN_BLOCK = 256, 32  # the selective scan has [S, block, I, N] numbers at a time


def delta_rule(key: Tensor, value: Tensor, *, channels: bool) -> Recurrence:
    """Return the recurrence over rows query, key [S, L, H, K], value [S, L, H, V], log decay [S, L, H] (or [S, L, H, K] with
    ``channels``) and beta [S, L, H].
    """
    shape = (value.shape[-2], key.shape[-1], value.shape[-1])
    return Recurrence(_delta_block, shape, 4 * CHANNEL_CHUNK if channels else BLOCK)


def state_space(key: Tensor, value: Tensor) -> Recurrence:
    """Return the recurrence over rows C, B [S, L, G, K], x [S, L, H, V], dt and A [S, L, H]; G groups of heads."""
    return Recurrence(_state_space_block, (value.shape[-2], key.shape[-1], value.shape[-1]), BLOCK)


def _delta_block(rows: Rows, state: Tensor, constants: Rows) -> tuple[Tensor, Tensor]:
    length = rows[0].shape[1]
    channels = rows[3].dim() == rows[1].dim()
    size = _chunk_size(length, CHANNEL_CHUNK if channels else CHUNK)
    query, key, value, decay = (_chunks(each, size) for each in rows[:4])  # [S, H, n, C, ...]
    decay = _add_up(decay if channels else decay.unsqueeze(-1))  # [S, H, n, C, K or 1], from the start of the chunk
    beta = _chunks(rows[4], size).unsqueeze(-1)
    scaled = key * beta
    scores, system = _products(query, key, decay), _products(scaled, key, decay)
    # Each value is what the token adds to the state, less what the state and earlier tokens of the chunk say already.
    both = torch.cat([value * beta, scaled * decay.exp()], -1)
    both = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, read = both.split([value.shape[-1], key.shape[-1]], -1)
    query, key, last = query * decay.exp(), key * (decay[..., -1:, :] - decay).exp(), decay[..., -1, :].exp().unsqueeze(-1)
    outputs = []
    for chunk in range(query.shape[2]):
        new = values[:, :, chunk] - read[:, :, chunk] @ state
        outputs.append(query[:, :, chunk] @ state + scores[:, :, chunk] @ new)
        state = state * last[:, :, chunk] + key[:, :, chunk].mT @ new
    return torch.stack(outputs, 2).flatten(2, 3).transpose(1, 2)[:, :length], state


def _products(left: Tensor, right: Tensor, decay: Tensor) -> Tensor:
    """Decayed products of each token of a chunk with those before it and with itself, [..., C, K] -> [..., C, C]."""
    hidden = _later(left.shape[-2], left.device)
    if decay.shape[-1] == 1:
        apart = (decay - decay.mT).masked_fill(hidden, float("-inf"))
        return (left @ right.mT) * apart.exp()
    apart = (decay.unsqueeze(-2) - decay.unsqueeze(-3)).masked_fill(hidden.unsqueeze(-1), float("-inf"))
    return (left.unsqueeze(-2) * right.unsqueeze(-3) * apart.exp()).sum(-1)


def _state_space_block(rows: Rows, state: Tensor, constants: Rows) -> tuple[Tensor, Tensor]:
    length, groups = rows[0].shape[1], rows[0].shape[2]
    size = _chunk_size(length, CHUNK)
    query, key = (_chunks(each, size).unsqueeze(2) for each in rows[:2])  # [S, G, 1, n, C, K]
    value, step, rates = (_chunks(each, size).unflatten(1, (groups, -1)) for each in rows[2:])  # [S, G, H / G, n, C, ...]
    value, decay = value * step.unsqueeze(-1), step * rates
    decay = _add_up(decay.unsqueeze(-1))
    apart = (decay - decay.mT).masked_fill(_later(size, decay.device), float("-inf"))
    inside = ((query @ key.mT) * apart.exp()) @ value
    added = key.mT @ (value * (decay[..., -1:, :] - decay).exp())  # [S, G, H / G, n, K, V]
    last = decay[..., -1, :].exp().unsqueeze(-1)
    state = state.unflatten(1, (groups, -1))
    before = []
    for chunk in range(value.shape[3]):
        before.append(state)
        state = state * last[:, :, :, chunk] + added[:, :, :, chunk]
    outputs = inside + (query @ torch.stack(before, 3)) * decay.exp()
    return outputs.flatten(3, 4).flatten(1, 2).transpose(1, 2)[:, :length], state.flatten(1, 2)


class _RunningSums(torch.autograd.Function):
    """Running sums along the last dimension, both ways allowed in deterministic mode."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return running_sums(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return running_sums(grad.flip(-1)).flip(-1)


def _add_up(decay: Tensor) -> Tensor:
    """Sums of the decays of a chunk up to each token, [..., C, K or 1]."""
    apply: Any = _RunningSums.apply
    sums: Tensor = apply(decay.mT)
    return sums.mT


def _chunk_size(length: int, most: int) -> int:
    return min(most, 1 << max(0, length - 1).bit_length())


def _chunks(rows: Tensor, size: int) -> Tensor:
    """[S, L, H, ...] -> [S, H, chunks, size, ...], with zeros after the last token."""
    rows = rows.transpose(1, 2)
    missing = -rows.shape[2] % size
    if missing:
        rows = F.pad(rows, (*(0,) * (2 * (rows.dim() - 3)), 0, missing))
    chunks: Tensor = rows.unflatten(2, (-1, size))  # type: ignore[no-untyped-call]
    return chunks


@lru_cache(maxsize=16)
def _later(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def selective_scan(rates: Tensor) -> Recurrence:
    """Return the recurrence over rows x, dt [S, L, I] and B, C [S, L, N], with A = ``rates`` [I, N]."""
    return Recurrence(_selective_block, tuple(rates.shape), SCAN_BLOCK, (rates,))


def _selective_block(rows: Rows, state: Tensor, constants: Rows) -> tuple[Tensor, Tensor]:
    inputs, step, read_in, read_out = rows
    decay = (step.unsqueeze(-1) * constants[0]).exp()  # [S, L, I, N]
    states = (step * inputs).unsqueeze(-1) * read_in.unsqueeze(-2)
    distance = 1
    while distance < states.shape[1]:
        states = torch.cat([states[:, :distance], states[:, distance:] + decay[:, distance:] * states[:, :-distance]], 1)
        decay = torch.cat([decay[:, :distance], decay[:, distance:] * decay[:, :-distance]], 1)
        distance *= 2
    states = states + decay * state.unsqueeze(1)
    return (states @ read_out.unsqueeze(-1)).squeeze(-1), states[:, -1]


log = logging.getLogger(__name__)

PRODUCTS = 3  # query, key and value are multiplied in the layer's dtype; decays and steps add up in float32
PACKAGE_CHUNK = 256  # of mamba-ssm
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
    arguments = (inputs, step, rates.amin((0, 1)), read_in, read_out, PACKAGE_CHUNK)
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
