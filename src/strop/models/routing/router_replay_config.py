"""Section ``policy.router_replay``."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig
from strop.columns import TokenColumn

NO_ROUTE = -1  # a layer without experts, or a token whose experts were not recorded

# [T, layers, k]: the indices of the experts that each layer of the engine chose for each token that it read (``recorded_experts``)
ROUTES = TokenColumn(
    "routes", dtype="int16", aligned="read", fill=NO_ROUTE, stored="logger.routes", key="policy.router_replay.enabled"
)


class RouterReplayConfig(BaseConfig):
    """Experts in training: replay those that the engine chose in the rollout."""

    enabled: bool = Field(
        False,
        description="Record the experts that the engine chose for each token, and train with them instead of choosing again (R3, arXiv "
        "2510.11370), so that engine and learner compute with the same experts. Needs a model with experts, and an engine that reports "
        "them: torch, or vLLM with its model runner V2. Takes a byte per token, layer and chosen expert.",
    )
