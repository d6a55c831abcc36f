"""The policy as an opponent of itself: what it would write in another conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.environments.games.policy_client import NoPolicyError
from strop.generation.base import Generator, PastGenerator, PastSelf
from strop.models.chat_template import ChatTemplate
from strop.sampling import Sampling
from strop.types import Messages


@dataclass(frozen=True)
class SampledPolicy:
    """A ``PolicyClient`` over the generator of a run."""

    generator: Generator | PastGenerator
    template: ChatTemplate
    sampling: Sampling
    max_length: int  # tokens of a conversation
    earlier: PastSelf | None = None  # drawn for the group

    @property
    def version(self) -> int:
        return self.generator.version

    def past(self, share: float) -> SampledPolicy:
        if self.earlier is None:
            raise NoPolicyError(
                "this environment plays against earlier selves of the policy, which are kept in training only; set opponent to self, or to "
                "endpoint with a model that strop serve serves"
            )
        return replace(self, generator=self.earlier.generator) if self.earlier.quantile < share else self

    async def complete(self, messages: Messages, *, seed: int, stop_strings: Sequence[str] = ()) -> str:
        """Return the reply. Raises ValueError for a conversation that leaves no room for one."""
        encoded = self.template.encode_with_images(messages)
        prompt = encoded.tokens
        room = self.max_length - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation of the policy's opponent has {len(prompt)} tokens, and policy.max_total_sequence_length is "
                f"{self.max_length}; raise it"
            )
        stops = tuple(dict.fromkeys((*self.sampling.stop_strings, *stop_strings)))
        wanted = replace(
            self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room), stop_strings=stops, record_sampling_mask=False
        )
        shown: dict[str, Any] = {"images": encoded.images} if encoded.images else {}
        return (await self.generator.generate(prompt, sampling=wanted, seed=seed, **shown)).text
