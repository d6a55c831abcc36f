"""The endpoint at which an agent reaches the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL = "policy"  # the policy's name; requests may use any name


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An endpoint for one episode, with OpenAI's and Anthropic's APIs."""

    base_url: str  # with /v1
    api_key: str = field(repr=False)  # valid until the episode ends
    model: str = MODEL
    sample: int = 0  # of the episode in its group

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment variables read by the clients of OpenAI and Anthropic, and OPENAI_MODEL."""
        openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
        return {
            **openai,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_MODEL": self.model,
        }
