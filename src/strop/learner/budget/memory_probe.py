"""The memory of a forward and backward pass, and the largest token budget that fits into free memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from strop.data.packing_config import LARGEST_TOKENS
from strop.types import Batch, Totals

# Share of the free memory that a micro-batch may use. The rest covers what a probe does not measure: fragmentation, loss columns,
# rollouts of unequal length and, on a CPU, other processes.
USABLE_SHARE = {"cpu": 0.5}
USABLE_SHARE_OF_GPU = 0.8
PROBED_TOKENS = (
    8192  # on a GPU: with fewer, what the output layer holds for its first rows would count as growing with the tokens
)
ROUNDED_TO = 64  # tokens


class MemoryTooSmall(ValueError):
    """Not even one rollout of the maximum length fits into free memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryProbe:
    """Measurements of one forward and backward pass of a learner."""

    device: str  # cpu or cuda
    tokens: int  # read by the pass
    peak_bytes: int  # peak, beyond the memory before the pass and its gradients
    free_bytes: int  # between two passes, with weights and gradients in place
    gradient_bytes: int  # of the learner; excluded only from its own free memory
    optimizer_bytes: int  # allocated by the first optimizer step; 0 once it has run


@dataclass(frozen=True)
class MemoryFit:
    """The peak of a pass as a line: ``fixed_bytes`` + ``bytes_per_token`` x tokens."""

    fixed_bytes: float
    bytes_per_token: float


@dataclass(frozen=True)
class FoundBudget:
    """A token budget, and the values it was derived from."""

    tokens: int
    bytes_per_token: float
    free_bytes: int  # after later allocations
    usable_bytes: int  # of these, minus the margin


def take_worst(probes: Sequence[MemoryProbe]) -> MemoryProbe:
    """Return the ranks' largest use and smallest free memory, so that what fits there fits on every rank."""
    return MemoryProbe(
        device=probes[0].device,
        tokens=min(probe.tokens for probe in probes),
        peak_bytes=max(probe.peak_bytes for probe in probes),
        free_bytes=min(probe.free_bytes for probe in probes),
        gradient_bytes=max(probe.gradient_bytes for probe in probes),
        optimizer_bytes=max(probe.optimizer_bytes for probe in probes),
    )


def fit_memory(probes: Sequence[MemoryProbe]) -> MemoryFit:
    """Fit a line through the last two probes, or the only one, with a slope and offset of at least zero."""
    small, large = probes[-2:][0], probes[-1]
    slope = (large.peak_bytes - small.peak_bytes) / (large.tokens - small.tokens) if large.tokens > small.tokens else 0.0
    if slope <= 0:
        return MemoryFit(0.0, max(probe.peak_bytes / probe.tokens for probe in probes))
    fixed = small.peak_bytes - slope * small.tokens
    return MemoryFit(fixed, slope) if fixed >= 0 else MemoryFit(0.0, large.peak_bytes / large.tokens)


def needs_more(probes: Sequence[MemoryProbe], later_bytes: int) -> bool:
    """Return whether a pass over twice the tokens would tell more, and can be tried."""
    last = probes[-1]
    enough = len(probes) > 1 and (last.device == "cpu" or last.tokens >= PROBED_TOKENS)
    return not enough and fits_twice(last, later_bytes)


def _usable_share(device: str) -> float:
    return USABLE_SHARE.get(device, USABLE_SHARE_OF_GPU)


def count_usable(probe: MemoryProbe, later_bytes: int) -> tuple[int, int]:
    """Return the free memory minus ``later_bytes`` of later allocations, and the part of it that a micro-batch may use (bytes)."""
    free = max(0, probe.free_bytes - later_bytes)
    return free, int(free * _usable_share(probe.device))


def choose_budget(probes: Sequence[MemoryProbe], *, longest: int, later_bytes: int, key: str) -> FoundBudget:
    """Return the largest token budget that fits, at least one rollout of ``longest`` tokens.

    ``probes``: of one learner, each of twice the tokens of the one before; the first fits. ``later_bytes``: later
    allocations of optimizer states, other learners and an engine.

    Raises MemoryTooSmall, whose message names ``key``.
    """
    fit = fit_memory(probes)
    free, usable = count_usable(probes[-1], later_bytes)
    needed = fit.fixed_bytes + fit.bytes_per_token * longest
    if needed > usable:
        raise MemoryTooSmall(
            f"{key}: found auto, but a micro-batch of one rollout of max_total_sequence_length = {longest} tokens takes "
            f"{format_bytes(needed)}, but only {format_bytes(usable)} may be used: {_usable_share(probes[0].device):.0%} of the "
            f"{format_bytes(free)} left by weights, gradients and optimizer state. Set dtensor_cfg.activation_checkpointing=true, lower "
            "logprob_chunk_size or policy.max_total_sequence_length, or set the key to a number of tokens to try it anyway"
        )
    tokens = min(LARGEST_TOKENS, int((usable - fit.fixed_bytes) / fit.bytes_per_token))
    return FoundBudget(max(longest, tokens // ROUNDED_TO * ROUNDED_TO), fit.bytes_per_token, free, usable)


def fits_twice(probe: MemoryProbe, later_bytes: int) -> bool:
    """Return whether a pass over twice the tokens can be tried."""
    return 2 * probe.peak_bytes <= count_usable(probe, later_bytes)[1]


def count_later(name: str, probes: Mapping[str, MemoryProbe], reserved_bytes: int) -> int:
    """Return the bytes allocated permanently after the probe of learner ``name``: all optimizer states, and other learners'
    gradients.
    """
    optimizers = sum(probe.optimizer_bytes for probe in probes.values())
    gradients = sum(probe.gradient_bytes for other, probe in probes.items() if other != name)
    return reserved_bytes + optimizers + gradients


def format_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def make_full_rollouts(rollouts: int, length: int, vocabulary: int) -> Batch:
    """Return a batch of ``rollouts`` groups of one rollout, each of ``length`` tokens without a shared prefix, all of them predicted.

    It needs the most memory possible for this many tokens in a packed row: each attends to ``length`` others, and N = T.
    """
    total = rollouts * length
    places = torch.arange(total)
    tokens = (places * 7919 + 13) % vocabulary
    starts = torch.arange(0, total, length)
    return Batch(
        tokens=tokens,
        positions=places % length,
        segment_start=starts,
        segment_parent=torch.full((rollouts,), -1),
        source=places,
        target=tokens.roll(-1),
        sequence=places // length,
        rollout_logprobs=torch.zeros(total),
        versions=torch.zeros(total, dtype=torch.int32),
        advantages=torch.ones(total),
        mask=torch.ones(total),
        leaf=torch.arange(rollouts),
        group=torch.arange(rollouts),
        rewards=torch.zeros(rollouts),
        totals=Totals(total, rollouts, rollouts),
    )
