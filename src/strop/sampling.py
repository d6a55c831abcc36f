"""The sampling distribution, defined once so that sampler and learner cannot disagree (law 3).

The engine samples from the softmax of ``filtered_logits(logits, sampling)``; the learner computes log-probabilities with the same function
on its own logits. Filters make that function discontinuous: a small difference in the logits can change the set of tokens that pass, and
with it the probability of every token. ``Sampling.record_sampling_mask`` avoids this: the engine records the set that it sampled from,
and the learner renormalizes over that set (keep-sampling-mask of DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.lazy_torch import Tensor, torch

KEPT_TOKENS = "kept_tokens"  # a batch column, [N, K] int32: the token ids each target was sampled from, padded with NO_TOKEN
NO_TOKEN = -1
MAX_RECORDED_TOP_K = 4096  # largest top_k of a request that records the sampling mask: 16 KiB per sampled token


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options of one request. Raises ValueError if they do not define a distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int | None = None  # keep the k most likely tokens
    top_p: float = 1.0  # keep the smallest set of tokens with a total probability of at least top_p
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the most likely one
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    entropy: bool = False  # also report the entropy of each token's distribution, in nats
    record_sampling_mask: bool = False  # also report which tokens the filters kept at each step; no effect without filters

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or positive")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or null to keep every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1], and 1 keeps every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1], and 0 keeps every token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.records_sampling_mask and (self.top_k is None or self.top_k > MAX_RECORDED_TOP_K):
            raise ValueError(
                f"the sampling mask is to be recorded for each sampled token, but top_k is {self.top_k}: a mask may then hold most of the "
                f"vocabulary. Set top_k to at most {MAX_RECORDED_TOP_K}; 512 seldom changes the result of a top_p below 0.95 and costs "
                "at most 2 KiB per token"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p removes tokens from the distribution."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def records_sampling_mask(self) -> bool:
        """Whether the engine reports the sampling mask of each token."""
        return self.record_sampling_mask and self.filtered and not self.greedy


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def keep_mask(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return which tokens top-k and min-p, then top-p keep: logits [.., V], already divided by temperature -> bool [.., V].

    top_p is relative to the probability mass that the other two filters kept, as in vLLM.
    """
    keep = torch.ones_like(logits, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        keep &= logits >= threshold
    if sampling.min_p > 0:
        likeliest = logits.max(-1, keepdim=True).values
        keep &= logits >= likeliest + torch.full((), sampling.min_p, device=logits.device).log()
    if sampling.top_p < 1:
        probabilities, order = logits.masked_fill(~keep, float("-inf")).softmax(-1).sort(dim=-1, descending=True)
        mass_before = probabilities.cumsum(-1) - probabilities
        keep &= torch.zeros_like(keep).scatter(-1, order, mass_before < sampling.top_p)
    return keep


def filtered_logits(logits: Tensor, sampling: Sampling, sampled: Tensor | None = None) -> Tensor:
    """Return logits [.., V] after temperature and filters, in float32. Their softmax is the sampling distribution.

    ``sampled`` [..] gives the tokens that were sampled. They are always kept, so that the learner does not assign probability
    zero to a sampled token because its logits differ from the sampler's in the last bit.
    """
    scaled = _apply_temperature(logits, sampling)
    if not sampling.filtered or sampling.greedy:
        return scaled
    keep = keep_mask(scaled.detach(), sampling)
    if sampled is not None:
        keep.scatter_(-1, sampled.unsqueeze(-1), True)
    return scaled.masked_fill(~keep, float("-inf"))


def kept_logits(logits: Tensor, kept: Tensor, sampling: Sampling) -> Tensor:
    """Return the logits [.., V] of the recorded tokens ``kept`` [.., K] after temperature, [.., K] in float32; -inf for padding.

    Their softmax is the distribution over the set that the sampler used, even where filtering these logits would keep another set.
    """
    chosen = _apply_temperature(logits.gather(-1, kept.long().clamp(min=0)), sampling)
    return chosen.masked_fill(kept == NO_TOKEN, float("-inf"))


def pad_kept_tokens(rows: Sequence[Tensor]) -> Tensor:
    """Pad sets of token ids, one [k] per token, to [L, K] int32, with K the size of the largest set."""
    return torch.nn.utils.rnn.pad_sequence([row.to(torch.int32) for row in rows], batch_first=True, padding_value=NO_TOKEN)


def _apply_temperature(logits: Tensor, sampling: Sampling) -> Tensor:
    scaled = at_least_float32(logits)
    return scaled if sampling.temperature in (0.0, 1.0) else scaled / sampling.temperature


_UINT64_MASK = (1 << 64) - 1


def mix_seed(*identity: int) -> int:
    """Return a 64-bit seed for an identity such as (run seed, task, sample, turn), with SplitMix64's finalizer (Steele 2014).

    Randomness depends on identity, never on arrival order (law 5).
    """
    state = 0x9E3779B97F4A7C15
    for part in identity:
        state = (state ^ (part & _UINT64_MASK)) * 0xBF58476D1CE4E5B9 & _UINT64_MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _UINT64_MASK
        state = (state ^ (state >> 31)) + 0x9E3779B97F4A7C15 & _UINT64_MASK
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64_MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _UINT64_MASK
    return state ^ (state >> 31)


def uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) that depends only on (seed, position), so no generator state has to be saved or shared."""
    return (mix_seed(seed, position) >> 11) * 2.0**-53
