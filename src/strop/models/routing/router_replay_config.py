"""Section ``policy.router_replay``."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig


class RouterReplayConfig(BaseConfig):
    """The experts of a mixture in training: those that the engine chose in the rollout."""

    enabled: bool = Field(
        False,
        description="Record the experts that the engine chose for each token, and train with them instead of choosing again (R3, arXiv "
        "2510.11370), so that engine and learner compute with the same experts. Needs a model with experts, and an engine that says "
        "them: torch, or vLLM with its model runner V2. A byte for each token, layer and expert chosen.",
    )
