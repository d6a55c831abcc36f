"""The score of a trained reward model as one reward among others; several models can be used, each on its own devices."""

from __future__ import annotations

from dataclasses import dataclass

from strop.environments.reward_model_environment import RatingModel
from strop.environments.verifiers.base import Reply, Verifier
from strop.types import Task


@dataclass(frozen=True, kw_only=True)
class RewardModelVerifier(RatingModel, Verifier):
    """The score of the conversation up to the end of the reply. Rewards with the same model share it."""

    def __post_init__(self) -> None:
        self.check_options()

    def prepare(self) -> None:
        self.load_scorer()

    async def score(self, task: Task, reply: Reply) -> float:
        return await self.rate(reply.messages)
