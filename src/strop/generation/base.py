"""The seam to inference engines: tokens in, tokens out, with the log-probability of every sampled token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strop.sampling import Sampling
from strop.weights.base import WeightHolder


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What an engine sampled for one request."""

    tokens: Tensor  # [L] int64, the stop token included
    logprobs: Tensor  # [L] float32, under the distribution that sampled
    versions: Tensor  # [L] int32, the weight version that sampled each token
    text: str
    stopped: bool  # True: a stop token or stop string; False: the maximum number of tokens
    entropies: Tensor | None = None  # [L] float32
    kept: Tensor | None = (
        None  # [L, K] int32, the ids each token was drawn from, padded with -1; None unless ``sampling.records``
    )


class RequestTooLong(ValueError):
    """A request that can never fit the engine's configured memory; the message says what to raise."""


class Generator(Protocol):
    """An inference engine, in this process or another."""

    version: int  # the weight version it holds

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        """Sample one completion. Equal (prompt, sampling, seed, weights) give equal tokens, whoever shares the batch.

        Raises RequestTooLong where the prompt cannot fit. ``session`` names a conversation whose prefix may be cached.
        """
        ...

    async def close(self) -> None: ...


class Engine(Generator, WeightHolder, Protocol):
    """A generator that holds weights of its own and is sent new ones."""

    def counters(self) -> Mapping[str, float]:
        """What it has done since it was made, by name; differences of two readings make rates."""
        ...
