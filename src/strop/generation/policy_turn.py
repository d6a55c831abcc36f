"""Converts a completion into a turn of the policy."""

from __future__ import annotations

from collections.abc import Sequence

from strop.generation.base import Completion, Generator
from strop.models.chat_template import ChatTemplate
from strop.sampling import KEPT, Sampling
from strop.types import Turn


def check_columns(completion: Completion, generator: Generator, sampling: Sampling) -> None:
    """Raise RuntimeError if a required sampling mask was not reported."""
    if sampling.records_sampling_mask and KEPT not in completion.columns:
        raise RuntimeError(
            f"{type(generator).__name__} does not report the sampling mask, which policy.generation.keep_sampling_mask requires; set that "
            "key to false, or set policy.generation.backend to torch"
        )


def make_policy_turn(
    completion: Completion, context: Sequence[int], template: ChatTemplate, generator: Generator, sampling: Sampling
) -> Turn:
    """Return the turn to train on; ``context`` is the policy's input. Raises RuntimeError if a required sampling mask was not
    reported.
    """
    check_columns(completion, generator, sampling)
    return Turn(
        author="policy",
        tokens=completion.tokens,
        text=template.decode_turn(completion.tokens.tolist()),
        opening=template.find_opening(context),
        logprobs=completion.logprobs,
        versions=completion.versions,
        columns=completion.columns,
    )
