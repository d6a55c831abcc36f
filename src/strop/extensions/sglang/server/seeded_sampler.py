"""Sampling in SGLang's scheduler from Strop's distribution, with a random number that depends only on (seed, position).

SGLang's own sampler takes ``top_p`` of the whole distribution, not of what ``top_k`` left, reports log-probabilities from before its
filters, and follows a request's seed only in its deterministic mode, which a CPU does not have. This one filters as
``strop.sampling.keep_mask`` does, in place, so that SGLang then reads the log-probabilities of the distribution that sampled, and draws by
inversion: the smallest token id at which the cumulated probability exceeds a uniform number.

It takes the place of SGLang's when a scheduler starts (``sglang_cfg.sampler``). Speculative decoding verifies drafts elsewhere and does not
come here.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

SAMPLER_VARIABLE = "STROP_SGLANG_SAMPLER"
GREEDY = 1  # the top_k that SGLang gives a greedy request; no other has it (``sglang_requests.to_request``)
GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, odd, as int64


def use_seeded_sampling() -> None:
    """Replace SGLang's sampling in this process, unless the configuration asks for SGLang's own."""
    if os.environ.get(SAMPLER_VARIABLE, "strop") != "strop":
        return
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make_batch = SamplingBatchInfo.from_schedule_batch

    def from_schedule_batch(batch: Any, *arguments: Any, **named: Any) -> Any:
        info = make_batch(batch, *arguments, **named)
        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.temperatures.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = staticmethod(from_schedule_batch)
    Sampler._sample_from_probs = sample_from_probabilities


def sample_from_probabilities(sampler: Any, probabilities: Tensor, info: Any, positions: Tensor, unfiltered: bool) -> Any:
    """Return (token ids [B] int32, capture of the sampling mask or None), as SGLang's method of the same place does.

    ``probabilities`` [B, V] float32 after temperature; they are filtered and normalized in place.
    """
    if not unfiltered:
        filter_probabilities(probabilities, info.top_ks, info.top_ps, info.min_ps, top_p=info.need_top_p_sampling)
    tokens = draw(probabilities, uniforms(info.sampling_seed, positions))
    tokens = torch.where(info.top_ks == GREEDY, probabilities.argmax(-1), tokens)
    rows = info.sampling_mask_batch_indices
    if rows is None:
        return tokens.int(), None
    from sglang.srt.layers.sampler import _SamplingMaskCapture

    kept, chosen = probabilities.index_select(0, rows), tokens.index_select(0, rows)
    weight = kept.gather(1, chosen[:, None]).squeeze(1)
    return tokens.int(), _SamplingMaskCapture(weights=kept, token_ids=None, selected_weight=weight, batch_rows=rows)


def filter_probabilities(probabilities: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, *, top_p: bool) -> None:
    """Set what top-k and min-p, then top-p remove to 0 and let the rest add up to 1, in place. [B, V]; options [B].

    The same sets as ``strop.sampling.keep_mask`` keeps: ties of the k-th are kept, and top_p is relative to what the other two left. Rows
    of greedy requests stay as they are: their log-probabilities are those of the whole distribution.
    """
    likeliest = probabilities.amax(-1, keepdim=True)
    ordered = probabilities.sort(dim=-1, descending=True).values
    kth = ordered.gather(-1, (top_ks.long().clamp(1, probabilities.shape[-1]) - 1)[:, None])
    removed = (probabilities < kth) | (probabilities < likeliest * min_ps[:, None])
    probabilities.masked_fill_(removed & (top_ks != GREEDY)[:, None], 0.0)
    probabilities.div_(probabilities.sum(-1, keepdim=True))
    if top_p:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        removed = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, order, before >= top_ps[:, None])
        probabilities.masked_fill_(removed & (top_ps < 1)[:, None], 0.0)
        probabilities.div_(probabilities.sum(-1, keepdim=True))


def draw(probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the token of each row [B, V] at its uniform number [B] in [0, 1), [B] int64. It always has a positive probability."""
    cumulated = probabilities.double().cumsum(-1)
    total = cumulated[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulated, torch.minimum(numbers[:, None] * total, below), right=True).squeeze(1)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1) that depend only on (seed, position), [B] float64, by two rounds of SplitMix64's finalizer."""
    mixed = _mix(_mix(seeds) + positions.long() * GOLDEN)
    return _shift_right(mixed, 11).double() * 2.0**-53


def _mix(values: Tensor) -> Tensor:
    mixed = values + GOLDEN
    mixed = (mixed ^ _shift_right(mixed, 30)) * -4658895280553007687
    mixed = (mixed ^ _shift_right(mixed, 27)) * -7723592293110705685
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
