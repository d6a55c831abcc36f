"""Groups from recorded data, for supervised and preference training.

A recorded rollout has the form of a sampled one. Its policy turns are the assistant's messages in the data. They were not sampled, so
their log-probabilities are zeros and their versions -1. A turn that the chat template renders otherwise once the conversation goes on is
a branch. A group is planned first; its tokens may be made in another process (``strop.extensions.recorded.recorded_tokens``).
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from strop.data.messages import trim_after_last_reply
from strop.endings import Ending
from strop.extensions.recorded.examples import Conversation, Preference, UnpairedPreference
from strop.extensions.recorded.recorded_tokens import (
    RecordedConversation,
    RecordedRules,
    RecordedTurn,
    TokenizedConversation,
    tokenize_group,
)
from strop.lazy_torch import Tensor, torch
from strop.models.chat_template import ChatTemplate
from strop.types import Branch, Group, Message, Rollout, Task, Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedGroup:
    """The group of an example before its conversations are tokenized. Each conversation becomes a rollout with a reward."""

    index: int
    name: str
    task: Task
    conversations: tuple[RecordedConversation, ...]
    rewards: tuple[float, ...]

    def make(self, tokenized: Sequence[TokenizedConversation] | str) -> Group:
        """Return the group with these tokens, or a group of one rollout with the reason why there are none (law 7).

        A second rollout shares the prompt tensor of the first if it is equal, so that it is packed once.
        """
        if isinstance(tokenized, str):
            log.debug("example %s cannot be used for training: %s", self.task.id, tokenized)
            reason, empty = f"example {self.task.id!r}: {tokenized}", torch.zeros(0, dtype=torch.int64)
            return self._group(
                [Rollout(task=self.task, sample=0, seed=0, messages=(), prompt=empty, ending=Ending.ERROR, error=reason)]
            )
        rollouts: list[Rollout] = []
        for sample, tokens in enumerate(tokenized):
            rollout = self._make_rollout(sample, tokens)
            shared = bool(rollouts) and torch.equal(rollouts[0].prompt, rollout.prompt)
            rollouts.append(replace(rollout, prompt=rollouts[0].prompt) if shared else rollout)
        return self._group(rollouts)

    def _make_rollout(self, sample: int, tokens: TokenizedConversation) -> Rollout:
        return Rollout(
            task=self.task,
            sample=sample,
            seed=0,
            messages=self.conversations[sample].messages,
            prompt=_to_tensor(tokens.prompt),
            turns=tuple(map(_make_turn, tokens.turns)),
            ending=Ending.STOP,
            reward=self.rewards[sample],
            images=tokens.images,
            branches=tuple(
                Branch(parent=0, start=branch.start, turns=tuple(map(_make_turn, branch.turns))) for branch in tokens.branches
            ),
        )

    def _group(self, rollouts: Sequence[Rollout]) -> Group:
        return Group(index=self.index, environment=self.name, version=-1, rollouts=tuple(rollouts))


def make_group(plan: PlannedGroup, template: ChatTemplate, rules: RecordedRules) -> Group:
    return plan.make(tokenize_group(plan.conversations, template, rules))


def plan_demonstration(index: int, name: str, example: Conversation, rules: RecordedRules) -> PlannedGroup:
    """Plan a group of one rollout: the conversation up to its last reply, with every reply, or only the last one, in the loss."""
    if example.is_raw_text:
        conversation = RecordedConversation(example.messages, raw_text=example.answer)
    else:
        messages = trim_after_last_reply(example.messages)
        loss_from = len(messages) - 1 if rules.final_turn_only else 0
        conversation = RecordedConversation(messages, example.tools, loss_from)
    return PlannedGroup(index, name, example, (conversation,), (0.0,))


def plan_preference(index: int, name: str, example: Preference, rules: RecordedRules) -> PlannedGroup:
    """Plan a group of two rollouts: the chosen completion, with its margin (default 1) as reward, and the rejected one with reward 0."""
    conversations = tuple(_join_completion(example, completion, rules) for completion in (example.chosen, example.rejected))
    return PlannedGroup(index, name, example, conversations, (1.0 if example.margin is None else example.margin, 0.0))


def plan_unpaired_preference(
    index: int, name: str, example: UnpairedPreference, other: UnpairedPreference, rules: RecordedRules
) -> PlannedGroup:
    """Plan a group of two rollouts after the example's prompt: its completion, with reward 1 if desirable, else 0, and that of ``other``.

    The second completion is unrelated to the prompt; KTO (arXiv 2402.01306) estimates its reference point from such rollouts.
    """
    conversations = tuple(_join_completion(example, completion, rules) for completion in (example.completion, other.completion))
    return PlannedGroup(index, name, example, conversations, (float(example.desirable), 0.0))


def _join_completion(
    example: Preference | UnpairedPreference, completion: Sequence[Message], rules: RecordedRules
) -> RecordedConversation:
    loss_from = len(example.prompt) + (len(completion) - 1 if rules.final_turn_only else 0)
    return RecordedConversation((*example.prompt, *completion), example.tools, loss_from)


def _make_turn(turn: RecordedTurn) -> Turn:
    """Return a turn of the policy, which was not sampled (zero log-probabilities, version -1), or an observation."""
    length = len(turn.tokens)
    return Turn(
        author="policy" if turn.in_loss else "environment",
        tokens=_to_tensor(turn.tokens),
        text=turn.text,
        logprobs=torch.zeros(length),
        versions=torch.full((length,), -1, dtype=torch.int32),
        images=turn.images,
    )


def _to_tensor(tokens: array[int]) -> Tensor:
    return torch.frombuffer(tokens, dtype=torch.int64) if tokens else torch.zeros(0, dtype=torch.int64)
