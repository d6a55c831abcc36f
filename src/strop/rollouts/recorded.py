"""Groups from recorded data: what supervised and preference training read in place of sampled rollouts.

A recorded rollout has the shape of a sampled one. Its policy turns are what the data says the assistant said; nobody sampled them, so
their log-probabilities are zeros and their versions -1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from strop.data.examples import Conversation, Judged, Preference
from strop.data.messages import up_to_last_reply
from strop.rollouts.template import ChatTemplate, Span
from strop.types import Ending, Group, Message, Rollout, Task, Turn, observation

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecordedRules:
    """How a recorded conversation becomes tokens."""

    max_length: int  # tokens of prompt and completion together
    final_turn_only: bool = False  # teach only the last assistant turn (sft.only_unmask_final)
    add_eos: bool = True  # end the last taught turn with a stop token if the template does not
    stop_ids: tuple[int, ...] = ()  # the model's stop tokens; empty: the tokenizer's end of sequence

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 2: a token to read and one to say")


class ExampleTooLong(ValueError):
    """An example that does not fit; its group is dropped and counted."""


def demonstration(index: int, name: str, example: Conversation, template: ChatTemplate, rules: RecordedRules) -> Group:
    """One rollout: the conversation up to its last reply, each reply taught, or only the last one."""
    messages = up_to_last_reply(example.messages)

    def make() -> tuple[Rollout, ...]:
        return (_rollout(example, messages, template, rules, taught_from=len(messages) - 1 if rules.final_turn_only else 0),)

    return _group(index, name, example, make)


def preference_pair(index: int, name: str, example: Preference, template: ChatTemplate, rules: RecordedRules) -> Group:
    """Two rollouts: the chosen completion, whose reward is its margin (1 where the data has none), and the rejected one with 0.

    Both have the same prompt tensor where their prompts are the same tokens.
    """

    def make() -> tuple[Rollout, ...]:
        chosen = _completion(example, example.prompt, example.chosen, template, rules)
        rejected = _completion(example, example.prompt, example.rejected, template, rules)
        reward = 1.0 if example.margin is None else example.margin
        return replace(chosen, reward=reward), _beside(chosen, rejected)

    return _group(index, name, example, make)


def judgement(index: int, name: str, example: Judged, other: Judged, template: ChatTemplate, rules: RecordedRules) -> Group:
    """Two rollouts: the completion, with reward 1 where it is desirable and 0 where not, and another example's after the same prompt.

    The second is for the estimate of KTO's reference point (2402.01306): a completion that has nothing to do with the prompt.
    """

    def make() -> tuple[Rollout, ...]:
        own = _completion(example, example.prompt, example.completion, template, rules)
        unrelated = _completion(example, example.prompt, other.completion, template, rules)
        return replace(own, reward=float(example.desirable)), _beside(own, unrelated)

    return _group(index, name, example, make)


def _group(index: int, name: str, task: Task, make: Callable[[], tuple[Rollout, ...]]) -> Group:
    """A group of what ``make`` gives, or of one rollout with the error it raised (law 7). A template may raise anything."""
    try:
        rollouts = make()
    except Exception as error:
        log.debug("example %s cannot be trained on", task.id, exc_info=error)
        rollouts = (_failed(task, f"example {task.id!r}: {type(error).__name__}: {error}"),)
    return Group(index=index, environment=name, version=-1, rollouts=rollouts)


def _failed(task: Task, error: str) -> Rollout:
    nothing = torch.zeros(0, dtype=torch.int64)
    return Rollout(task=task, sample=0, seed=0, messages=(), prompt=nothing, ending=Ending.ERROR, error=error)


def _beside(first: Rollout, second: Rollout) -> Rollout:
    """``second`` as the other rollout of a pair; the packer stores a prompt once that both have."""
    prompt = first.prompt if torch.equal(first.prompt, second.prompt) else second.prompt
    return replace(second, sample=1, prompt=prompt)


def _completion(
    task: Task, prompt: Sequence[Message], completion: Sequence[Message], template: ChatTemplate, rules: RecordedRules
) -> Rollout:
    taught_from = len(prompt) + (len(completion) - 1 if rules.final_turn_only else 0)
    return _rollout(task, (*prompt, *completion), template, rules, taught_from=taught_from)


def _rollout(
    task: Task, messages: tuple[Message, ...], template: ChatTemplate, rules: RecordedRules, *, taught_from: int
) -> Rollout:
    eos: int | None = template.tokenizer.eos_token_id
    stops = rules.stop_ids or (() if eos is None else (eos,))
    prompt, *spans = template.conversation(messages, taught_from=taught_from)
    if not prompt.tokens:
        raise ValueError("its prompt has no tokens, and the first taught token is predicted from the last of the prompt")
    spans = _with_stops(spans, stops)
    while not spans[-1].taught:
        spans.pop()  # nothing is predicted after the last taught token
    if rules.add_eos:
        spans[-1] = _ended(spans[-1], eos, stops)
    if not any(span.tokens for span in spans if span.taught):
        raise ValueError("what it teaches has no tokens")
    rollout = Rollout(
        task=task,
        sample=0,
        seed=0,
        messages=messages,
        prompt=torch.tensor(prompt.tokens, dtype=torch.int64),
        turns=tuple(_taught(span, template) if span.taught else observation(span.tokens, span.text) for span in spans),
        ending=Ending.STOP,
    )
    if rollout.length > rules.max_length:
        raise ExampleTooLong(
            f"it has {rollout.length} tokens ({len(rollout.prompt)} of them the prompt's), and at most {rules.max_length} fit "
            "(policy.max_total_sequence_length)"
        )
    return rollout


def _with_stops(spans: Sequence[Span], stops: Sequence[int]) -> list[Span]:
    """A stop token that opens what follows a reply belongs to the reply: some templates end a turn by opening the next one (GLM)."""
    spans = list(spans)
    for place, (reply, following) in enumerate(pairwise(spans)):
        opens = bool(following.tokens) and following.tokens[0] in stops
        if reply.taught and opens and (not reply.tokens or reply.tokens[-1] not in stops):
            spans[place] = replace(reply, tokens=[*reply.tokens, following.tokens[0]])
            spans[place + 1] = replace(following, tokens=following.tokens[1:])
    return spans


def _ended(reply: Span, eos: int | None, stops: Sequence[int]) -> Span:
    """The reply with a stop token at its end: without one the model is never taught to stop."""
    if not stops:
        raise ValueError("there is no stop token to end it with: set the tokenizer's eos_token, or data.add_eos=false")
    if reply.tokens and reply.tokens[-1] in stops:
        return reply
    return replace(reply, tokens=[*reply.tokens, eos if eos is not None and eos in stops else stops[0]])


def _taught(span: Span, template: ChatTemplate) -> Turn:
    """A turn of the policy that nobody sampled."""
    length = len(span.tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(span.tokens, dtype=torch.int64),
        text=template.tokenizer.decode(span.tokens, skip_special_tokens=True),
        logprobs=torch.zeros(length),
        versions=torch.full((length,), -1, dtype=torch.int32),
    )
