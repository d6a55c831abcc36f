"""Section ``gateway``: how agents reach the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig
from strop.problems import Problem
from strop.safety.site_guard import is_loopback


class GatewayConfig(BaseConfig):
    """The OpenAI-compatible server for agents (environments of type agent)."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("host", "port", "url")

    host: str = Field("127.0.0.1", min_length=1, description="Address that the gateway listens on.")
    port: int = Field(0, ge=0, le=65535, description="Port that the gateway listens on; 0 takes a free one.")
    url: str | None = Field(
        None,
        min_length=1,
        description="Base URL given to agents, if they reach the gateway under another name; null is http://HOST:PORT/v1.",
    )
    sampling: Literal["run", "agent"] = Field(
        "run",
        description="Whose temperature, top_p, top_k and min_p apply: the run's, which the learner uses too, or those of an agent's "
        "request.",
    )
    max_requests: int = Field(1024, ge=1, description="Most requests of one episode, refused ones included (requests).")
    max_body_mb: float = Field(32.0, gt=0, description="Largest body of a request (MB).")
    body_timeout_s: float = Field(60.0, gt=0, description="Time within which a request must arrive completely (s).")

    def errors(self, key: str) -> Iterator[Problem]:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield Problem(f"{key}.url", f"found {self.url!r}, which is no URL", "Write http://HOST:PORT/v1.")

    def warnings(self, key: str) -> Iterator[Problem]:
        if not is_loopback(self.host):
            yield Problem(
                f"{key}.host",
                f"found {self.host}, which other machines can reach: anyone who intercepts an episode's key can use it until the episode "
                "ends",
                "Keep to a network that you trust.",
            )
        if self.sampling == "agent":
            yield Problem(
                f"{key}.sampling",
                "found agent: log-probabilities belong to the distribution requested by an agent, and the learner computes its own with "
                "policy.generation's options",
                "Set it to run to train; agent is for evaluation.",
            )
