"""Where an agent reaches the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL = "policy"  # the name of the policy; requests may use any


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """An OpenAI-compatible API for one episode."""

    base_url: str  # with /v1
    api_key: str = field(repr=False)  # it works until the episode ends
    model: str = MODEL

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment variables that OpenAI's clients read, and OPENAI_MODEL."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}
