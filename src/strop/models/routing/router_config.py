"""Keys of a model with routed experts: the router's losses, and the replay of the sampler's routes."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig
from strop.columns import TokenColumn


class RouterLossConfig(BaseConfig):
    """Losses of the routers of a mixture of experts, in the torch learner; others have their own keys."""

    aux_loss_coeff: float = Field(
        0.0,
        ge=0,
        description="Weight of the load-balancing loss of each layer, computed within a rollout over its trained tokens (DeepSeek-V3, "
        "arXiv 2412.19437, equations 17 to 20), so that it does not depend on how a batch is cut. Unlike Transformers' "
        "router_aux_loss_coef, it is not computed over a batch.",
    )
    z_loss_coeff: float = Field(
        0.0, ge=0, description="Weight of the loss on large router logits (z-loss) of each layer (ST-MoE, arXiv 2202.08906)."
    )
    log_expert_load: bool = Field(
        False, description="Log how evenly the trained tokens are spread over experts; always with one of the losses."
    )

    @property
    def has_loss(self) -> bool:
        return self.aux_loss_coeff > 0 or self.z_loss_coeff > 0

    @property
    def observes(self) -> bool:
        """Whether the routers are observed in training."""
        return self.has_loss or self.log_expert_load


# Section ``policy.router_replay``.

NO_ROUTE = -1  # a layer without experts, or a token whose experts were not recorded

# [T, layers, k]: the indices of the experts that each layer of the engine chose for each token that it read (``recorded_experts``)
ROUTES = TokenColumn(
    "routes", dtype="int16", aligned="read", fill=NO_ROUTE, stored="logger.routes", key="policy.router_replay.enabled"
)

# [T, layers, bytes]: the tokens that the engine's indexers chose for each token that it read (``mixers.recorded_choices``)
CHOICES = TokenColumn(
    "chosen_tokens", dtype="int8", aligned="read", stored="logger.routes", key="policy.router_replay.indexers", bits=True
)


class RouterReplayConfig(BaseConfig):
    """Choices in training: replay the experts and tokens that the engine chose in the rollout."""

    enabled: bool = Field(
        False,
        description="Record the experts that the engine chose for each token, and train with them instead of choosing again (R3, arXiv "
        "2510.11370), so that engine and learner compute with the same experts. Needs a model with experts, and an engine that reports "
        "them: torch, or vLLM with its model runner V2. Takes a byte per token, layer and chosen expert.",
    )
    indexers: bool = Field(
        False,
        description="Record the tokens that the indexers of sparse attention chose for each token, and train with them instead of choosing "
        "again, so that engine and learner attend to the same tokens. Needs the torch engine. Takes a bit per token, layer with an indexer "
        "and token of the longest rollout: 62 KB a token for 61 layers and 8,192 tokens. Rollouts of up to index_topk tokens attend to "
        "everything and do not need it.",
    )
