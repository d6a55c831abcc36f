"""Recurrences of Transformers' mixers, in chunks of tokens.

The gated delta rule (Gated DeltaNet, arXiv 2412.06464), Kimi's delta attention (arXiv 2510.26692) and Mamba 2 (arXiv 2405.21060)
have a state S [K, V] for each head. It decays, is corrected, and is read by each token:

    S <- exp(g) S,    S <- S + k (beta (v - k S)),    o = q S

With one decay per channel (Kimi), ``g`` has the size of a key. Mamba 2 adds ``k v`` without a correction; C, B, x dt and A dt are its
q, k, v and g. Inside of a chunk these are triangular products, and states pass from chunk to chunk.

Mamba (arXiv 2312.00752) has a state h [I, N] of numbers that decay each on their own. Its blocks are scanned by doubling:

    h <- exp(A dt) h + dt x B,    y = h C
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.determinism import running_sums
from strop.models.mixers.recurrence import Recurrence, Rows

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
