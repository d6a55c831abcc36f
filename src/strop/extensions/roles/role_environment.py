"""Environments whose episodes are played by several roles: proposer and solver, debaters, opponents, a user, a judge.

Each role has its own conversations, and reads what another one said only if ``play`` shows it. The configuration binds it to a player:

    policy                        the run's policy, which is trained on what the role says (the default)
    own                           a separate policy, trained in the same run only on this role; with LoRA, an adapter on the same base
    base                          the policy as it was before the run
    {base_url: ..., model: ...}   a model at an OpenAI-compatible endpoint
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

from strop.environments.base import Environment, EnvironmentConfigError, TaskT
from strop.environments.policy_client import BASE
from strop.extensions.judges.llm_endpoint import make_endpoint
from strop.extensions.roles.player import OWN, POLICY, Player, Stage
from strop.user_code import suggest_names

RESERVED = ("policy", "value", "past_selves", "data", "token_budgets", BASE)  # names of other parts of a run


_outcome: ContextVar[Any] = ContextVar("strop_outcome", default=None)


@dataclass(frozen=True, kw_only=True)
class RoleEnvironment(Environment[TaskT]):
    """A subclass names its roles, plays an episode and defines rewards.

    Rewards are computed for the rollout of each trained role (``rollout.role``), or only for that of ``@reward(role=...)``. Evaluations
    report the first trained role.
    """

    episode_runner: ClassVar[str] = "strop.extensions.roles.role_episode:run_roles"
    role_names: ClassVar[tuple[str, ...]]

    roles: Mapping[str, Any] = field(default_factory=dict)  # who plays each one: policy, own, base, or an endpoint

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = type(self).__name__
        for role, binding in self.roles.items():
            if role not in self.role_names:
                raise EnvironmentConfigError(f"{kind} has no role {role!r}{suggest_names(str(role), self.role_names)}")
            if isinstance(binding, Mapping):
                make_endpoint(binding)
            elif binding not in (POLICY, OWN, BASE):
                raise EnvironmentConfigError(
                    f"roles binds {role} to {binding!r}; set it to policy, own, base, or an endpoint's base_url and model"
                )
        for role in self.role_names:
            if self.binding(role) == OWN and (role in RESERVED or not role.isidentifier()):
                raise EnvironmentConfigError(
                    f"the role {role!r} of {kind} cannot have a separate policy: choose another name for it"
                )
        if not any(self.is_trained(role) for role in self.role_names):
            raise EnvironmentConfigError(
                f"no role of {kind} is trained; bind one of {', '.join(self.role_names)} to policy or own"
            )

    def binding(self, role: str) -> Any:
        return self.roles.get(role, POLICY)

    def is_trained(self, role: str) -> bool:
        return self.binding(role) in (POLICY, OWN)

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that a run keeps for the roles, besides its own."""
        own = tuple(role for role in self.role_names if self.binding(role) == OWN)
        return (*own, BASE) if any(self.binding(role) == BASE for role in self.role_names) else own

    @abstractmethod
    async def play(self, task: TaskT, cast: Mapping[str, Player]) -> Any:
        """Play an episode with the players of ``role_names``. Rewards read what it returns as ``self.outcome``."""

    @property
    def outcome(self) -> Any:
        """What ``play`` returned in this episode; None if it failed."""
        return _outcome.get()

    async def run_agent(self, task: TaskT, stage: Stage) -> None:
        _outcome.set(None)
        cast = {role: stage.enter(role, self.binding(role)) for role in self.role_names}
        _outcome.set(await self.play(task, cast))
