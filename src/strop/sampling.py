"""The sampling distribution, defined once so that sampler and learner cannot disagree (law 3).

The engine samples from the softmax of ``filtered_logits(logits, sampling)``; the learner computes log-probabilities with the same function
on its own logits. Filters make that function discontinuous: a small difference in the logits can change the set of tokens that pass, and
with it the probability of every token. ``Sampling.record_sampling_mask`` avoids this: the engine records the set that it sampled from,
and the learner renormalizes over that set (keep-sampling-mask of DeepSeek-V3.2, arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeGuard

from strop.columns import TokenColumn
from strop.determinism import running_sums
from strop.lazy_torch import Tensor, torch

NO_TOKEN = -1
MAX_RECORDED_TOP_K = 4096  # largest top_k of a request that records the sampling mask: 16 KiB per sampled token
SMALLEST = 1e-6  # positive temperature or top_p: far smaller ones overflow or vanish in float32
MAX_COUNT = 2**31 - 1  # limit of 32-bit values in engines: token ids, top_k, tokens of a completion
MAX_STOP_STRINGS, MAX_STOP_BYTES = 1024, 64 * 1024  # engines search for them after each token


def _check_kept(kept: Tensor, target: Tensor) -> None:
    if not bool((kept == target[:, None]).any(1).all()):
        raise ValueError(
            "a sampled token is not among the recorded tokens that it was sampled from: the engine records wrong tokens"
        )


KEPT = TokenColumn(  # [N, K]: the token ids that each target was sampled from
    "kept_tokens",
    dtype="int32",
    aligned="predicted",
    fill=NO_TOKEN,
    key="policy.generation.keep_sampling_mask",
    when="policy.generation.records_sampling_mask",
    ragged=True,
    complete=True,
    check=_check_kept,
)
KEPT_TOKENS = KEPT.name


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
        if not (is_finite(self.temperature) and (self.temperature == 0 or SMALLEST <= self.temperature <= 1 / SMALLEST)):
            raise ValueError(
                f"temperature is {shown(self.temperature)}; it must be 0 (greedy) or positive, a number of {SMALLEST:g} to {1 / SMALLEST:g}"
            )
        if self.top_k is not None and not is_whole(self.top_k, 1, MAX_COUNT):
            raise ValueError(f"top_k is {shown(self.top_k)}; it must be at least 1, or null to keep every token, and whole")
        if not (is_finite(self.top_p) and SMALLEST <= self.top_p <= 1):
            raise ValueError(
                f"top_p is {shown(self.top_p)}; it must be in (0, 1], and 1 keeps every token ({SMALLEST:g} is the least)"
            )
        if not (is_finite(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p is {shown(self.min_p)}; it must be in [0, 1], and 0 keeps every token")
        if not is_whole(self.max_new_tokens, 1, MAX_COUNT):
            raise ValueError(f"max_new_tokens is {shown(self.max_new_tokens)}; it must be at least 1, and whole")
        self._check_stops()
        if self.records_sampling_mask and (self.top_k is None or self.top_k > MAX_RECORDED_TOP_K):
            raise ValueError(
                f"the sampling mask is recorded for each sampled token, but top_k is {self.top_k}, so a mask may hold most of the "
                f"vocabulary. Set top_k to at most {MAX_RECORDED_TOP_K}; 512 seldom changes the result of a top_p below 0.95 and costs at "
                "most 2 KiB per token"
            )

    def join_stops(self, strings: Iterable[str]) -> tuple[str, ...]:
        """Return its stop strings and further ones, each once."""
        return tuple(dict.fromkeys((*self.stop_strings, *strings)))

    def _check_stops(self) -> None:
        if not all(is_whole(token, 0, MAX_COUNT) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids are {shown(self.stop_token_ids)}; they must be token ids, whole numbers from 0")
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ValueError(f"a stop string is {shown(text)}; it must be a text of at least one character")
            if not is_encodable(text):
                raise ValueError(f"the stop string {shown(text)} has a lone surrogate, which no token is decoded to")
        size = sum(len(text.encode()) for text in self.stop_strings)
        if len(self.stop_strings) > MAX_STOP_STRINGS or size > MAX_STOP_BYTES:
            raise ValueError(
                f"there are {len(self.stop_strings)} stop strings of {size} bytes in total, which are searched for after each token; the "
                f"limit is {MAX_STOP_STRINGS} strings of {MAX_STOP_BYTES} bytes"
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


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value is a number that fits a float; a bool does not count."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def is_whole(value: object, lowest: int, highest: int) -> TypeGuard[int]:
    """Return whether a value is an int within bounds; a bool does not count."""
    return isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def is_encodable(text: str) -> bool:
    """Return whether a text has no lone surrogates, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """Return a request's value as shown in messages: ASCII, shortened if long."""
    try:
        text = ascii(value)
    except ValueError:  # an int of thousands of digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def keep_mask(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the mask of tokens kept by top-k and min-p, then top-p: logits [.., V], already divided by temperature -> bool [..,
    V].

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
        mass_before = running_sums(probabilities) - probabilities
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
