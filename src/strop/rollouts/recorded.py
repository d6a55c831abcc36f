"""Groups from recorded data, for supervised and preference training.

A recorded rollout has the form of a sampled one. Its policy turns are the assistant's messages in the data. They were not sampled, so
their log-probabilities are zeros and their versions -1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from strop.data.messages import trim_after_last_reply
from strop.data.recorded.examples import Conversation, Preference, UnpairedPreference
from strop.models.chat_template import ChatTemplate, TokenSpan
from strop.types import Ending, Group, Message, Rollout, Task, Turn, observation_turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecordedRules:
    """Options for turning a recorded conversation into tokens."""

    max_length: int  # tokens of prompt and completion together
    final_turn_only: bool = False  # only the last assistant turn is in the loss (sft.only_unmask_final)
    add_bos: bool = False  # begin with the tokenizer's bos_token if the template does not
    add_generation_prompt: bool = True  # what opens an assistant turn is context; else it is in the loss
    add_eos: bool = True  # end the last turn in the loss with a stop token if the template does not
    stop_ids: tuple[int, ...] = ()  # the model's stop tokens; empty: the tokenizer's end of sequence

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(
                f"max_length is {self.max_length}; it must be at least 2: one token of the prompt and one to predict"
            )


class ExampleTooLong(ValueError):
    """An example exceeds the maximum length. Its group is dropped and counted."""


def demonstration_group(index: int, name: str, example: Conversation, template: ChatTemplate, rules: RecordedRules) -> Group:
    """Return a group of one rollout: the conversation up to its last reply, with every reply, or only the last one, in the loss."""
    messages = trim_after_last_reply(example.messages)

    def make() -> tuple[Rollout, ...]:
        if example.is_raw_text:
            spans = _raw_text_spans(example.answer, template)
            return (_join_spans(example, example.messages, spans, template, rules),)
        return (_make_rollout(example, messages, template, rules, loss_from=len(messages) - 1 if rules.final_turn_only else 0),)

    return _make_group(index, name, example, make)


def preference_group(index: int, name: str, example: Preference, template: ChatTemplate, rules: RecordedRules) -> Group:
    """Return a group of two rollouts: the chosen completion, with its margin (default 1) as reward, and the rejected one with reward 0.

    Both share one prompt tensor if their prompts have the same tokens.
    """

    def make() -> tuple[Rollout, ...]:
        chosen = _make_completion(example, example.prompt, example.chosen, template, rules)
        rejected = _make_completion(example, example.prompt, example.rejected, template, rules)
        reward = 1.0 if example.margin is None else example.margin
        return replace(chosen, reward=reward), _as_second(chosen, rejected)

    return _make_group(index, name, example, make)


def unpaired_preference_group(
    index: int, name: str, example: UnpairedPreference, other: UnpairedPreference, template: ChatTemplate, rules: RecordedRules
) -> Group:
    """Return a group of two rollouts after the example's prompt: its completion, with reward 1 if desirable, else 0, and that of ``other``.

    The second completion is unrelated to the prompt; KTO (arXiv 2402.01306) estimates its reference point from such rollouts.
    """

    def make() -> tuple[Rollout, ...]:
        completion = _make_completion(example, example.prompt, example.completion, template, rules)
        unrelated = _make_completion(example, example.prompt, other.completion, template, rules)
        return replace(completion, reward=float(example.desirable)), _as_second(completion, unrelated)

    return _make_group(index, name, example, make)


def _make_group(index: int, name: str, task: Task, make: Callable[[], tuple[Rollout, ...]]) -> Group:
    """Return a group of the rollouts that ``make`` returns, or of one rollout with the error that it raised (law 7).

    All exceptions are caught, because a chat template may raise any.
    """
    try:
        rollouts = make()
    except Exception as error:
        log.debug("example %s cannot be used for training", task.id, exc_info=error)
        reason = f"example {task.id!r}: {type(error).__name__}: {error}"
        empty = torch.zeros(0, dtype=torch.int64)
        rollouts = (Rollout(task=task, sample=0, seed=0, messages=(), prompt=empty, ending=Ending.ERROR, error=reason),)
    return Group(index=index, environment=name, version=-1, rollouts=rollouts)


def _as_second(first: Rollout, second: Rollout) -> Rollout:
    """Make ``second`` the second rollout of a pair. It shares the prompt tensor of ``first`` if equal, so that it is packed once."""
    prompt = first.prompt if torch.equal(first.prompt, second.prompt) else second.prompt
    return replace(second, sample=1, prompt=prompt)


def _make_completion(
    task: Task, prompt: Sequence[Message], completion: Sequence[Message], template: ChatTemplate, rules: RecordedRules
) -> Rollout:
    loss_from = len(prompt) + (len(completion) - 1 if rules.final_turn_only else 0)
    return _make_rollout(task, (*prompt, *completion), template, rules, loss_from=loss_from)


def _make_rollout(
    task: Task, messages: tuple[Message, ...], template: ChatTemplate, rules: RecordedRules, *, loss_from: int
) -> Rollout:
    tools = getattr(task, "tools", ())
    spans = template.encode_spans(messages, loss_from=loss_from, opened=rules.add_generation_prompt, tools=tools)
    return _join_spans(task, messages, spans, template, rules)


def _raw_text_spans(text: str, template: ChatTemplate) -> list[TokenSpan]:
    """Return a text's tokens with those that the tokenizer puts around a text: the first is only read, nothing predicts it."""
    tokens: list[int] = template.tokenizer(text)["input_ids"]
    return [TokenSpan(tokens[:1], False, ""), TokenSpan(tokens[1:], True, text)]


def _join_spans(
    task: Task, messages: tuple[Message, ...], joined: Sequence[TokenSpan], template: ChatTemplate, rules: RecordedRules
) -> Rollout:
    eos: int | None = template.tokenizer.eos_token_id
    stops = rules.stop_ids or (() if eos is None else (eos,))
    prompt, *spans = joined
    if rules.add_bos:
        prompt = _prepend_bos(prompt, template.tokenizer.bos_token_id)
    if not prompt.tokens:
        raise ValueError("its prompt has no tokens, but the first loss token is predicted from the last token of the prompt")
    spans = _move_stop_tokens(spans, stops)
    while not spans[-1].in_loss:
        spans.pop()  # nothing is predicted after the last loss token
    if rules.add_eos:
        spans[-1] = _append_stop_token(spans[-1], eos, stops)
    if not any(span.tokens for span in spans if span.in_loss):
        raise ValueError("it has no loss tokens")
    rollout = Rollout(
        task=task,
        sample=0,
        seed=0,
        messages=messages,
        prompt=torch.tensor(prompt.tokens, dtype=torch.int64),
        turns=tuple(
            _recorded_turn(span, template) if span.in_loss else observation_turn(span.tokens, span.text) for span in spans
        ),
        ending=Ending.STOP,
    )
    if rollout.length > rules.max_length:
        raise ExampleTooLong(
            f"it has {rollout.length} tokens ({len(rollout.prompt)} of them in the prompt), and at most {rules.max_length} fit "
            "(policy.max_total_sequence_length)"
        )
    return rollout


def _move_stop_tokens(spans: Sequence[TokenSpan], stops: Sequence[int]) -> list[TokenSpan]:
    """Move a stop token that starts the span after a reply into the reply. In some templates (GLM) the next turn's opening ends it."""
    spans = list(spans)
    for index, (reply, following) in enumerate(pairwise(spans)):
        starts_with_stop = bool(following.tokens) and following.tokens[0] in stops
        if reply.in_loss and starts_with_stop and (not reply.tokens or reply.tokens[-1] not in stops):
            spans[index] = replace(reply, tokens=[*reply.tokens, following.tokens[0]])
            spans[index + 1] = replace(following, tokens=following.tokens[1:])
    return spans


def _prepend_bos(prompt: TokenSpan, bos: int | None) -> TokenSpan:
    """Begin the conversation with the token, if the tokenizer has one and the template did not write it."""
    return prompt if bos is None or prompt.tokens[:1] == [bos] else replace(prompt, tokens=[bos, *prompt.tokens])


def _append_stop_token(reply: TokenSpan, eos: int | None, stops: Sequence[int]) -> TokenSpan:
    """End the reply with a stop token, without which the model would not learn to stop. Raises ValueError if there is none."""
    if not stops:
        raise ValueError("there is no stop token to end it with: set the tokenizer's eos_token, or data.add_eos=false")
    if reply.tokens and reply.tokens[-1] in stops:
        return reply
    return replace(reply, tokens=[*reply.tokens, eos if eos is not None and eos in stops else stops[0]])


def _recorded_turn(span: TokenSpan, template: ChatTemplate) -> Turn:
    """Return a policy turn that was not sampled: zero log-probabilities, version -1."""
    length = len(span.tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(span.tokens, dtype=torch.int64),
        text=template.tokenizer.decode(span.tokens, skip_special_tokens=True),
        logprobs=torch.zeros(length),
        versions=torch.full((length,), -1, dtype=torch.int32),
    )
