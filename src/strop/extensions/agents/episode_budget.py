"""What an episode may cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor


@dataclass(frozen=True, kw_only=True)
class EpisodeBudget:
    """The most that the policy may sample in an episode, in tokens and in money. A retry and a sub-agent count like any request."""

    max_tokens: int | None = None  # sampled
    max_cost: float | None = None  # in the currency of the prices
    read_price: float = 0.0  # of a million tokens of prompts
    sampled_price: float = 0.0  # of a million sampled tokens

    def find_rest(self, read: int, sampled: int, prompt: int) -> list[int]:
        """Return how many tokens may still be sampled after a prompt, one number for each limit. Raises ValueError if none may."""
        rest: list[int] = []
        if self.max_tokens is not None:
            rest.append(self.max_tokens - sampled)
            if rest[-1] < 1:
                raise ValueError(
                    f"the episode has sampled {sampled} tokens of the {self.max_tokens} that max_episode_tokens of the environment allows"
                )
        if self.max_cost is not None:
            left = 1e6 * self.max_cost - self.read_price * (read + prompt) - self.sampled_price * sampled
            if left < self.sampled_price or left < 0:
                cost = (self.read_price * read + self.sampled_price * sampled) / 1e6
                raise ValueError(
                    f"the episode has cost {cost:.6g}, and a completion of {prompt} tokens of prompt would exceed the {self.max_cost:g} "
                    "that max_episode_cost of the environment allows"
                )
            if self.sampled_price:
                rest.append(floor(left / self.sampled_price))
        return rest
