"""Interfaces of inference engines: tokens in, tokens out, with the log-probability of every sampled token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from strop.columns import Columns
from strop.sampling import MAX_COUNT, Sampling, shown
from strop.types import PromptImage
from strop.weight_sync.base import UpdatableEngine

GAUGES = ("running_requests", "waiting_requests", "cache_usage")  # summed over the steps of an engine
COUNTERS = (  # summed by an engine in separate processes since its start
    "prompt_tokens",
    "sampled_tokens",
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "drafted_tokens",
    "accepted_tokens",
    "engine_steps",
    *GAUGES,
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
    columns: Columns = field(
        default_factory=dict
    )  # what else was recorded of the tokens: [L, ...], or [P + L - 1, ...] of all read


class InvalidRequest(ValueError):
    """A request that no engine can serve, with the reason. The engine continues to serve others."""


class RequestTooLong(InvalidRequest):
    """A request that can never fit into the engine's configured memory; the message says which limit to raise."""


def check_request(
    prompt: Sequence[int], sampling: Sampling, seed: int, session: str = "", *, length: int, vocabulary: int | None = None
) -> None:
    """Check a request, in one place for all engines. Its sampling options were checked on creation.

    ``length``: tokens of the longest sequence; ``vocabulary``: number of token ids with an embedding, if known.
    Raises InvalidRequest.
    """
    if not isinstance(sampling, Sampling):
        raise InvalidRequest(f"the sampling options of a request are {shown(sampling)}; they must be a Sampling")
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes):
        raise InvalidRequest(f"the prompt of a request is {shown(prompt)}; it must be a list of token ids")
    if not len(prompt):
        raise InvalidRequest("a request needs a prompt of at least one token; this one is empty")
    if set(map(type, prompt)) != {int}:
        wrong = next(token for token in prompt if type(token) is not int)
        raise InvalidRequest(f"a prompt holds {shown(wrong)}, which is not a token id: ids are whole numbers")
    most = MAX_COUNT if vocabulary is None else vocabulary - 1
    if min(prompt) < 0 or max(prompt) > most:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise InvalidRequest(f"a prompt holds the token id {shown(wrong)}, and the model has embeddings for 0 to {most}")
    if type(seed) is not int:
        raise InvalidRequest(f"the seed of a request is {shown(seed)}; it must be a whole number")
    if not isinstance(session, str):
        raise InvalidRequest(f"the session of a request is {shown(session)}; it must be a text")
    if len(prompt) >= length:
        raise RequestTooLong(
            f"a prompt of {len(prompt)} tokens leaves no room in a sequence of {length}; raise policy.max_total_sequence_length, or lower "
            "data.max_input_seq_length to drop such prompts"
        )


class Generator(Protocol):
    """An inference engine, in this process or another."""

    @property
    def version(self) -> int:
        """Version of the weights used for sampling."""
        ...

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        """Sample one completion. Equal (prompt, images, sampling, seed, weights) give equal tokens, regardless of the rest of the
        batch.

        ``session`` names a conversation whose prefix may be cached. ``images`` belong to the prompt, which contains all their
        placeholder tokens (``strop.models.vision.vision_processor``). Raises InvalidRequest for what cannot be served,
        RequestTooLong if the prompt cannot fit.
        """
        ...

    async def close(self) -> None: ...


class PastGenerator(Protocol):
    """A generator with the fixed weights of an earlier version."""

    @property
    def version(self) -> int: ...

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion: ...


@dataclass(frozen=True)
class PastSelf:
    """An earlier self of the policy, drawn for the rollouts of a group."""

    generator: PastGenerator
    quantile: float  # uniform in [0, 1): it plays if this is below the share of games against earlier selves


class PastSelves(Protocol):
    """Earlier selves of the policy kept by a run."""

    def draw(self, seed: int) -> PastSelf: ...


class Engine(Generator, UpdatableEngine, Protocol):
    """A generator with its own copy of the weights, which receives updates."""

    def counters(self) -> Mapping[str, float]:
        """Return cumulative counters since the engine was created, by name. Differences of two readings give rates."""
        ...
