"""A completion as a turn of the policy."""

from __future__ import annotations

from strop.generation.base import Completion, Generator
from strop.sampling import Sampling
from strop.types import Turn


def make_policy_turn(completion: Completion, generator: Generator, sampling: Sampling) -> Turn:
    """Return what is trained on. Raises RuntimeError if the engine did not report a sampling mask that was asked for."""
    if sampling.records_sampling_mask and completion.kept is None:
        raise RuntimeError(
            f"{type(generator).__name__} does not report the sampling mask, which policy.generation.keep_sampling_mask requires; set that "
            "key to false, or set policy.generation.backend to torch"
        )
    return Turn(
        author="policy",
        tokens=completion.tokens,
        text=completion.text,
        logprobs=completion.logprobs,
        versions=completion.versions,
        entropies=completion.entropies,
        kept=completion.kept,
        routes=completion.routes,
    )
