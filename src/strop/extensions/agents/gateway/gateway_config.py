"""Section ``gateway``: how agents reach the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from strop.base_config import BaseConfig
from strop.problems import Problem
from strop.safety.site_guard import is_loopback

PORT = "{port}"  # in a URL: the port of the process that serves an episode


class GatewayConfig(BaseConfig):
    """The server for agents (environments of type agent), with OpenAI's and Anthropic's APIs."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("host", "port", "url", "processes", "max_concurrent", "max_waiting")

    host: str = Field("127.0.0.1", min_length=1, description="Address that the gateway listens on.")
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port that the gateway listens on in the training process; its own processes take the ports after it. 0 takes free "
        "ones.",
    )
    url: str | None = Field(
        None,
        min_length=1,
        description="Base URL given to agents, if they reach the gateway under another name; null is http://HOST:PORT/v1. {port} stands "
        "for the port of the process that serves the episode; without it, the training process serves all.",
    )
    processes: int | None = Field(
        None,
        ge=0,
        description="Processes that serve episodes, each its own share; 0 is the training process itself. null begins there and starts "
        "one for every 256 open episodes once there are 64, up to a quarter of the cores.",
    )
    sampling: Literal["run", "agent"] = Field(
        "run",
        description="Whose temperature, top_p, top_k and min_p apply: the run's, which the learner uses too, or those of an agent's "
        "request.",
    )
    max_requests: int = Field(1024, ge=1, description="Most requests of one episode, refused ones included (requests).")
    max_concurrent: int = Field(
        128, ge=1, description="Most unanswered requests of one episode; others are refused with status 429 (requests)."
    )
    max_waiting: int = Field(
        4096,
        ge=1,
        description="Most unanswered requests of one process of the gateway; others are refused with status 503 (requests).",
    )
    max_body_mb: float = Field(32.0, gt=0, description="Largest body of a request (MB).")
    body_timeout_s: float = Field(60.0, gt=0, description="Time within which a request must arrive completely (s).")

    def errors(self, key: str) -> Iterator[Problem]:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            yield Problem(f"{key}.url", f"found {self.url!r}, which is no URL", "Write http://HOST:PORT/v1.")
        if self.processes and self.url is not None and PORT not in self.url:
            yield Problem(
                f"{key}.processes",
                f"found {self.processes}, and each process has its own port, but gateway.url is {self.url!r} for all",
                f"Write {PORT} where gateway.url has the port, or set processes to 0.",
            )

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
