"""Section ``policy.router_losses``."""

from __future__ import annotations

from pydantic import Field

from strop.base_config import BaseConfig


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
