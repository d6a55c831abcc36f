"""Interfaces of inference engines: tokens in, tokens out, with the log-probability of every sampled token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from strop.sampling import Sampling
from strop.types import PromptImage
from strop.weight_sync.base import UpdatableEngine

COUNTERS = (  # that an engine in processes of its own sums from its start
    "prompt_tokens",
    "sampled_tokens",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "drafted_tokens",
    "accepted_tokens",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The tokens that an engine sampled for one request."""

    tokens: Tensor  # [L] int64, the stop token included
    logprobs: Tensor  # [L] float32, under the sampling distribution
    versions: Tensor  # [L] int32, the weight version that sampled each token
    text: str
    stopped: bool  # True: ended by a stop token or stop string; False: by the maximum number of tokens
    entropies: Tensor | None = None  # [L] float32
    kept: Tensor | None = None  # [L, K] int32, ids each token was sampled from, padded with -1; with records_sampling_mask
    routes: Tensor | None = (
        None  # [P + L - 1, layers, k], experts of each token read (models/routing/routes.py); with router replay
    )


class RequestTooLong(ValueError):
    """A request that can never fit into the engine's configured memory; the message says which limit to raise."""


class Generator(Protocol):
    """An inference engine, in this process or another."""

    @property
    def version(self) -> int:
        """Version of the weights that it samples with."""
        ...

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        """Sample one completion. Equal (prompt, images, sampling, seed, weights) give equal tokens, whatever else is in the batch.

        ``session`` names a conversation whose prefix may be cached. ``images`` stand in the prompt, which has all the tokens that stand
        for them (``strop.models.vision.vision_processor``). Raises RequestTooLong if the prompt cannot fit.
        """
        ...

    async def close(self) -> None: ...


class Pacer(Protocol):
    """Decides when an engine takes its steps."""

    async def pace(self, step: Callable[[], object]) -> None:
        """Call ``step`` when it is time."""
        ...


class PastGenerator(Protocol):
    """A generator with the weights of an earlier version, which stay as they are."""

    @property
    def version(self) -> int: ...

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion: ...


@dataclass(frozen=True)
class PastSelf:
    """An earlier self of the policy, drawn for the rollouts of a group."""

    generator: PastGenerator
    quantile: float  # uniform in [0, 1): it plays where this is below the share of games against earlier selves


class PastSelves(Protocol):
    """Earlier selves of the policy that a run keeps."""

    def draw(self, seed: int) -> PastSelf: ...


class Engine(Generator, UpdatableEngine, Protocol):
    """A generator with its own copy of the weights, which receives updates."""

    def counters(self) -> Mapping[str, float]:
        """Return cumulative counters since the engine was created, by name. Differences of two readings give rates."""
        ...
