"""Sampling of tokens from logits: one uniform number per token, by inverting the cumulative distribution.

The number depends only on the request's seed and the token's position, so a request gets the same tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from strop.determinism import running_sums
from strop.device_copies import upload
from strop.generation.torch.decode_kernels import DTYPES, DecodeKernels
from strop.models.network_parts import FixedOrder
from strop.sampling import Sampling, filtered_logits

BLOCK = 256


@dataclass(frozen=True, eq=False)
class SampledTokens:
    tokens: Tensor  # [B] int64
    logprobs: Tensor  # [B] float32, under the sampling distribution
    entropies: Tensor  # [B] float32; zeros unless ``Sampling.entropy``
    kept: dict[int, Tensor] = field(default_factory=dict)  # row -> [k] int32, ids it was sampled from, if recorded

    def rows(self) -> list[tuple[int, float, float]]:
        """Return (token, log-probability, entropy) of each row. They come from a GPU in one copy; float64 holds all three exactly."""
        columns = torch.stack([self.tokens.double(), self.logprobs.double(), self.entropies.double()], 1)
        return [(int(token), logprob, entropy) for token, logprob, entropy in columns.tolist()]


def sample_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    uniforms: Sequence[float],
    kernels: DecodeKernels | None = None,
    *,
    exact: FixedOrder | None = None,
) -> SampledTokens:
    """Sample one token for each row of logits [B, V], each with its own options; with the compiled kernels where they can.

    ``exact``: reports log-probabilities and entropies in the order of additions of the learner.
    """
    numbers = upload(uniforms, torch.float32, logits.device)
    if all(sampling == samplings[0] for sampling in samplings):
        return _sample(logits, samplings[0], numbers, kernels, exact)
    zeros = partial(torch.zeros, len(logits), device=logits.device)
    sampled = SampledTokens(zeros(dtype=torch.int64), zeros(dtype=torch.float32), zeros(dtype=torch.float32))
    for sampling in dict.fromkeys(samplings):
        indices = [row for row, other in enumerate(samplings) if other == sampling]
        rows = upload(indices, torch.int64, logits.device)
        part = _sample(logits[rows], sampling, numbers[rows], kernels, exact)
        sampled.kept.update({indices[row]: tokens for row, tokens in part.kept.items()})
        for full, values in zip(
            (sampled.tokens, sampled.logprobs, sampled.entropies), (part.tokens, part.logprobs, part.entropies), strict=True
        ):
            full[rows] = values
    return sampled


def _sample(
    logits: Tensor, sampling: Sampling, uniforms: Tensor, kernels: DecodeKernels | None, exact: FixedOrder | None
) -> SampledTokens:
    if (
        kernels is not None
        and exact is None
        and not (sampling.greedy or sampling.filtered)
        and logits.dtype in DTYPES
        and logits.device.type == "cpu"
    ):
        tokens, logprobs, entropies = kernels.sample(logits, sampling.temperature, uniforms)
        return SampledTokens(tokens, logprobs, entropies if sampling.entropy else torch.zeros_like(entropies))
    scaled = filtered_logits(logits, sampling)
    if sampling.greedy:
        tokens = scaled.argmax(-1)
        zeros = torch.zeros(len(logits), device=logits.device)
        peak = scaled.gather(1, tokens[:, None]).squeeze(1)
        return SampledTokens(tokens, torch.where(peak.isfinite(), zeros, torch.nan), zeros)
    below_peak = scaled - scaled.max(-1, keepdim=True).values
    weights = torch.exp(below_peak)
    tokens, mass = _inverse_cdf(weights, uniforms)
    if exact is not None:
        return SampledTokens(tokens, *exact.sampled_logprobs(scaled, tokens))
    logprobs = below_peak.gather(1, tokens[:, None]).squeeze(1) - mass.log()
    entropies = torch.zeros_like(logprobs)
    if sampling.entropy:
        finite = below_peak.masked_fill(below_peak == float("-inf"), 0.0)
        entropies = mass.log() - torch.linalg.vecdot(weights, finite) / mass
    return SampledTokens(tokens, logprobs, entropies, _kept_ids(scaled) if sampling.records_sampling_mask else {})


def _kept_ids(scaled: Tensor) -> dict[int, Tensor]:
    """Return the ids that the filters kept in each row [B, V], by row, ascending, on the CPU."""
    row, token = (scaled > float("-inf")).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=len(scaled)).tolist()
    # Clone: a view would keep all rows of this step in memory as long as one of them is referenced.
    return {index: tokens.clone() for index, tokens in enumerate(token.to("cpu", torch.int32).split(counts))}


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index where the running sum of weights [B, V] exceeds uniform x total, and the totals, [B] each.

    Searches blocks first, then positions in a block: a block sum is a parallel reduction, while a running sum over V is sequential and
    its rounding error grows with V.
    """
    rows, vocabulary = weights.shape
    padded = F.pad(weights, (0, -vocabulary % BLOCK)) if vocabulary % BLOCK else weights
    blocks = padded.view(rows, -1, BLOCK)
    block, remainder, total = _search_cdf(blocks.sum(-1), uniforms)
    in_block = blocks[torch.arange(rows, device=weights.device), block]
    offset, _, _ = _search_cdf(in_block, None, remainder)
    return (block * BLOCK + offset).clamp(max=vocabulary - 1), total


def _search_cdf(weights: Tensor, uniforms: Tensor | None, target: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return (index whose interval of the running sum contains the target mass, remainder inside that interval, total mass), each [B]."""
    running = running_sums(weights)
    total = running[:, -1]
    mass = uniforms * total if uniforms is not None else target
    assert mass is not None
    # Rounding must not move the mass to the very end, where an index of weight zero could be selected.
    mass = torch.minimum(mass, torch.nextafter(total, torch.zeros_like(total)))
    # If the weights are not finite, no position exceeds the mass: the log-probability reveals it, and the index stays in range.
    index = torch.searchsorted(running, mass[:, None], right=True).squeeze(1).clamp(max=weights.shape[-1] - 1)
    below = torch.where(index > 0, running.gather(1, (index - 1).clamp(min=0)[:, None]).squeeze(1), torch.zeros_like(mass))
    return index, (mass - below).clamp(min=0), total
