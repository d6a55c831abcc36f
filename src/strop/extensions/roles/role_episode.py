"""Episodes of several roles: the conversations of each trained role become one rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from strop.endings import Ending, RolloutFailed
from strop.environments.handle import EnvironmentHandle, LocalEnvironment
from strop.environments.policy_client import NoPolicyError, get_policy
from strop.extensions.judges.llm_client import get_llm_client
from strop.extensions.judges.llm_endpoint import LlmEndpoint, make_endpoint
from strop.extensions.roles.player import OWN, POLICY, Player
from strop.generation.base import Generator
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, append_observation, sample_turn, start_rollout
from strop.sampling import Sampling, mix_seed
from strop.types import TRAINED_POLICY, Branch, Message, Rollout, assistant, observation_turn


async def run_roles(
    environment: EnvironmentHandle[Any],
    rollout: Rollout,
    generator: Generator,
    template: ChatTemplate,
    sampling: Sampling,
    rules: EpisodeRules,
) -> tuple[Rollout, Exception | None]:
    """Run an episode (``strop.rollouts.episode.EpisodeRunner``). Returns the first trained role's, which has the others."""
    if not isinstance(environment, LocalEnvironment):
        raise NoPolicyError(
            f"{environment.traits.title} plays several roles, in the process that samples; set cluster.environment_hosts to 0"
        )
    stage = RoleStage(rollout, generator, template, sampling, rules)
    error: Exception | None = None
    try:
        await environment.run_agent(rollout.task, stage)
    except Exception as raised:
        error = raised
    return stage.finish(error), error


@dataclass
class RoleStage:
    """The players of an episode."""

    rollout: Rollout
    generator: Generator
    template: ChatTemplate
    sampling: Sampling
    rules: EpisodeRules
    trained: list[PolicyPlayer] = field(default_factory=list)
    entered: int = 0

    def enter(self, role: str, binding: Any) -> Player:
        self.entered += 1
        seed = mix_seed(self.rollout.seed, self.entered)
        if not isinstance(binding, str):
            return EndpointPlayer(make_endpoint(binding), seed)
        player = PolicyPlayer(self, role, seed, self.generator)
        if binding != POLICY:
            kept: Any = get_policy().named(role if binding == OWN else binding)  # a SampledPolicy
            player.generator, player.number = kept.generator, kept.number
        if binding in (POLICY, OWN):
            self.trained.append(player)
        return player

    def finish(self, error: Exception | None) -> Rollout:
        """Return the rollout of the episode. A role that said nothing has one without turns: its reward counts in its baseline."""
        spoken = [conversation for player in self.trained for conversation in player.conversations]
        if not spoken:
            if error is not None:
                raise error
            raise RolloutFailed(f"in task {self.rollout.task.id!r} no trained role was asked to say anything")
        silent = replace(spoken[0], turns=(), messages=spoken[0].prompt_messages)
        first, *others = (player.join(silent) for player in self.trained)
        return replace(first, others=tuple(others))


@dataclass
class PolicyPlayer:
    """A role that a policy of this run plays, token in, token out."""

    stage: RoleStage
    role: str
    seed: int
    generator: Generator
    number: int = 0  # of the policy
    conversations: list[Rollout] = field(default_factory=list)
    begun: bool = False

    def begin(self) -> None:
        self.begun = False

    async def say(self, *messages: Message, stop_strings: Sequence[str] = ()) -> str:
        """Raises RolloutFailed for a conversation that is full, and ValueError for one with too many turns."""
        stage, rules = self.stage, self.stage.rules
        if self.begun:
            conversation = self._continue(messages)
        else:
            seed = mix_seed(self.seed, len(self.conversations))
            empty = replace(stage.rollout, seed=seed, messages=(), turns=())
            conversation = start_rollout(empty, messages, stage.template, rules, None)
            self.conversations.append(conversation)
            self.begun = True
        sampling = replace(stage.sampling, stop_strings=stage.sampling.join_stops(stop_strings))
        conversation, _ = await sample_turn(conversation, self.generator, stage.template, sampling, rules, None)
        self.conversations[-1] = conversation
        return conversation.content

    def _continue(self, messages: Sequence[Message]) -> Rollout:
        last, rules = self.conversations[-1], self.stage.rules
        encoded = self.stage.template.encode_observation_with_images(messages, last.turns[-1].tokens.tolist())
        conversation = append_observation(replace(last, ending=None), messages, encoded, rules)
        if conversation.ending == Ending.TURNS:
            raise ValueError(
                f"the role {self.role} was asked for more than {rules.max_turns} turns; raise max_rollout_turns to the most of a role"
            )
        if conversation.ending is not None:
            raise RolloutFailed(f"the conversation of the role {self.role} is full", conversation.ending)
        return conversation

    def join(self, silent: Rollout) -> Rollout:
        """Return the role's conversations as a rollout: the first one, and the others as branches that share nothing."""
        first, *others = self.conversations or [silent]
        branches = tuple(
            Branch(parent=0, start=0, turns=(observation_turn(each.prompt.tolist(), "", each.images), *each.turns))
            for each in others
        )
        return replace(
            first,
            seed=self.stage.rollout.seed,
            branches=branches,
            ending=(others or [first])[-1].ending or Ending.STOP,
            role=self.role,
            columns={TRAINED_POLICY: torch.tensor([self.number], dtype=torch.int32)} if self.number else {},
        )


@dataclass
class EndpointPlayer:
    """A role that a model at an endpoint plays."""

    endpoint: LlmEndpoint
    seed: int
    messages: list[Message] = field(default_factory=list)

    def begin(self) -> None:
        self.messages.clear()

    async def say(self, *messages: Message, stop_strings: Sequence[str] = ()) -> str:
        self.messages += messages
        seed = mix_seed(self.seed, len(self.messages)) % 2**31
        stops: dict[str, Any] = {"stop": list(stop_strings)} if stop_strings else {}
        reply = await get_llm_client(self.endpoint).complete(self.messages, temperature=1.0, seed=seed, sample=seed, **stops)
        self.messages.append(assistant(reply.text))
        return reply.text
