"""Sections ``reward_scaling``, a linear map of rewards, and ``reward_penalties``, for the form of rollouts and turns as in NeMo-RL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from pydantic import Field

from strop.base_config import BaseConfig, subsection
from strop.problems import Problem
from strop.types import Rollout, Turn


class RewardScalingConfig(BaseConfig):
    """A linear map of rewards, clipped to the source range first."""

    enabled: bool = Field(False, description="Map rewards from the source range to the target range.")
    source_min: float = Field(0.0, description="Lower end of the source range (reward).")
    source_max: float = Field(1.0, description="Upper end of the source range (reward).")
    target_min: float = Field(0.0, description="Image of source_min (reward).")
    target_max: float = Field(1.0, description="Image of source_max (reward).")

    def __call__(self, reward: float) -> float:
        clipped = min(max(reward, self.source_min), self.source_max)
        fraction = (clipped - self.source_min) / (self.source_max - self.source_min)
        return self.target_min + fraction * (self.target_max - self.target_min)

    @property
    def slope(self) -> float:
        """The factor for a step's reward, which is part of the rollout's reward."""
        return (self.target_max - self.target_min) / (self.source_max - self.source_min)

    def errors(self, key: str) -> Iterator[Problem]:
        if self.enabled and self.source_min >= self.source_max:
            yield Problem(
                f"{key}.source_max",
                f"found {self.source_max}, which is not above source_min = {self.source_min}",
                "Set it above source_min.",
            )


UNREAD = "tool"  # name of the message that answers an unreadable call


class PenaltyTokenIdsConfig(BaseConfig):
    """Tokens that penalties look for."""

    unwanted: tuple[int, ...] | None = Field(None, strict=False, description="Tokens that no turn of the policy may contain.")
    think_open: int | None = Field(
        None, ge=0, description="The token that opens thinking; null is thinking_tags' if that is one."
    )
    think_close: int | None = Field(
        None, ge=0, description="The token that closes thinking; null is thinking_tags' if that is one."
    )


class RewardPenaltiesConfig(BaseConfig):
    """Conditions that set a rollout's reward to 0. Each is logged as ``penalty/NAME``: 1 for a penalised rollout."""

    penalize_duplicated_reasoning: bool = Field(False, description="An answer that repeats the thinking before it word by word.")
    penalize_empty_final_answer: bool = Field(False, description="Nothing after the thinking of the last turn.")
    penalize_unwanted_tokens: bool = Field(False, description="Any token of token_ids.unwanted in a turn of the policy.")
    penalize_malformed_think_tag: bool = Field(
        False,
        description="Thinking that the policy opens itself, closes twice, or, where the prompt opens it, does not close.",
    )
    penalize_invalid_tool_call: bool = Field(
        False, description="A call of a tool that cannot be read, and in an answer without tools any of tool_call_patterns."
    )
    invalid_tool_call_advantage: float | None = Field(
        None, lt=0, description="Advantage of the tokens of a turn with an invalid tool call, whatever its rollout earned."
    )
    malformed_think_tag_advantage: float | None = Field(
        None, lt=0, description="Advantage of the tokens of another turn with a malformed think tag, likewise."
    )
    tool_call_patterns: tuple[str, ...] = Field(
        ("<tool_call>", "</tool_call>", "<function_call>", "</function_call>"),
        strict=False,
        description="The texts of which an answer contains none.",
    )
    thinking_tags: tuple[str, str] = Field(
        ("<think>", "</think>"), strict=False, description="The texts that open and close thinking."
    )
    token_ids: PenaltyTokenIdsConfig = subsection(PenaltyTokenIdsConfig)

    @property
    def enabled(self) -> bool:
        return self.gives_advantages or any(getattr(self, f"penalize_{name}") for name in PENALTIES)

    @property
    def gives_advantages(self) -> bool:
        """Whether turns get advantages of their own rather than the rollout's."""
        return self.invalid_tool_call_advantage is not None or self.malformed_think_tag_advantage is not None

    def errors(self, key: str) -> Iterator[Problem]:
        if self.penalize_unwanted_tokens and not self.token_ids.unwanted:
            yield Problem(
                f"{key}.token_ids.unwanted",
                f"found none, but {key}.penalize_unwanted_tokens is true",
                "List the ids of the tokens, or set it to false.",
            )
        if (self.token_ids.think_open is None) != (self.token_ids.think_close is None):
            yield Problem(f"{key}.token_ids", "one of think_open and think_close is null", "Set both, or both to null.")

    def find_violations(self, rollout: Rollout, tokenizer: Any) -> dict[str, bool]:
        """Return whether a rollout is penalised, for each penalty that is on."""
        return {name: check(self, rollout, tokenizer) for name, check in PENALTIES.items() if getattr(self, f"penalize_{name}")}

    def apply(self, rollout: Rollout, tokenizer: Any, reward: float) -> Rollout:
        """Return the rollout, with ``reward`` in place of its own reward if it is penalised."""
        if self.gives_advantages:
            rollout = self._give_advantages(rollout, tokenizer)
        found = self.find_violations(rollout, tokenizer)
        metrics = {**rollout.metrics, **{f"penalty/{name}": float(violated) for name, violated in found.items()}}
        if not any(found.values()):
            return replace(rollout, metrics=metrics)
        return replace(rollout, metrics=metrics, reward=reward, rewards=dict.fromkeys(rollout.rewards, 0.0))

    def _give_advantages(self, rollout: Rollout, tokenizer: Any) -> Rollout:
        """Return the rollout with advantages for its penalised turns, and their shares as metrics."""
        turns = rollout.policy_turns
        shares: dict[str, float] = {}
        given = [0.0] * len(turns)
        for name, value, found in (
            ("malformed_think_tag", self.malformed_think_tag_advantage, find_malformed_turns),
            ("invalid_tool_call", self.invalid_tool_call_advantage, find_invalid_calls),  # comes before the other
        ):
            if value is not None:
                bad = found(self, rollout, tokenizer)
                given = [value if is_bad else other for is_bad, other in zip(bad, given, strict=True)]
                shares[f"penalty/{name}_turns"] = sum(bad) / max(len(turns), 1)
        return replace(rollout, metrics={**rollout.metrics, **shares}, turn_advantages=tuple(given) if any(given) else ())

    def think_tokens(self, tokenizer: Any) -> tuple[int, int] | None:
        """Return the tokens that open and close thinking; None if a tag is not one token."""
        ids = self.token_ids
        if ids.think_open is not None and ids.think_close is not None:
            return ids.think_open, ids.think_close
        encoded = [tokenizer(tag, add_special_tokens=False)["input_ids"] for tag in self.thinking_tags]
        return (int(encoded[0][0]), int(encoded[1][0])) if all(len(tokens) == 1 for tokens in encoded) else None

    def split_thinking(self, text: str) -> tuple[str, str]:
        """Return the thinking of a turn and what follows it."""
        opening, closing = self.thinking_tags
        thinking, closed, answer = text.rpartition(closing)
        if not closed and opening in text:
            thinking, answer = text, ""
        return thinking.replace(opening, "").strip(), answer.strip()


def is_duplicated(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> bool:
    pairs = [section.split_thinking(turn.text) for turn in rollout.policy_turns]
    return any(thinking and thinking == answer for thinking, answer in pairs)


def is_unanswered(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> bool:
    return not section.split_thinking(rollout.text)[1]


def has_unwanted_tokens(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> bool:
    unwanted = set(section.token_ids.unwanted or ())
    return any(not unwanted.isdisjoint(turn.tokens.tolist()) for turn in rollout.policy_turns)


def is_malformed(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> bool:
    """Return whether the thinking tags of a turn do not match its context. Compares tokens where tags are tokens, otherwise text."""
    return any(find_malformed_turns(section, rollout, tokenizer))


def find_malformed_turns(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> list[bool]:
    """Return for each turn of the policy whether its tags are malformed. In branches only its text is looked at."""
    opening, closing = section.thinking_tags
    found = [opening in turn.text or turn.text.count(closing) > 1 for turn in rollout.policy_turns]
    if (tokens := section.think_tokens(tokenizer)) is not None:
        for number, (context, turn) in enumerate(_turns_with_context(rollout)):
            found[number] = found[number] or _unbalanced(context, turn, *tokens)
    return found


def has_invalid_call(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> bool:
    """Return whether a call could not be parsed, or the rest of a message looks like a call."""
    if rollout.metrics.get("malformed_tool_calls", 0.0) > 0:
        return True
    said = [message.content for message in rollout.messages[len(rollout.prompt_messages) :] if message.role == "assistant"]
    return any(pattern in text for pattern in section.tool_call_patterns for text in said)


def find_invalid_calls(section: RewardPenaltiesConfig, rollout: Rollout, tokenizer: Any) -> list[bool]:
    """Return for each policy turn whether a call in it could not be parsed, or its remaining text looks like one.

    Turns in branches keep no messages, so nothing is found in them.
    """
    found: list[bool] = []
    messages = iter(rollout.messages[len(rollout.prompt_messages) :])
    for turn in rollout.turns:
        own = list(islice(messages, turn.num_messages))
        if turn.sampled:
            found.append(any(pattern in message.content for pattern in section.tool_call_patterns for message in own))
        elif found:  # an unreadable call is answered by a tool message without a call
            found[-1] = found[-1] or any(
                message.role == "tool" and message.name == UNREAD for message in own if not message.tool_call_id
            )
    return found + [False] * (len(rollout.policy_turns) - len(found))


def _unbalanced(context: list[int], turn: Turn, opening: int, closing: int) -> bool:
    left_open = context.count(opening) - context.count(closing)
    sampled = turn.tokens.tolist()
    return left_open not in (0, 1) or sampled.count(opening) > 0 or sampled.count(closing) != left_open


def _turns_with_context(rollout: Rollout) -> Iterator[tuple[list[int], Turn]]:
    """Yield each policy turn with the tokens since the previous one."""
    context = rollout.prompt.tolist()
    for turn in rollout.turns:
        if turn.sampled:
            yield context, turn
            context = []
        else:
            context = context + turn.tokens.tolist()


PENALTIES = {  # penalize_NAME -> whether a rollout is penalised
    "duplicated_reasoning": is_duplicated,
    "empty_final_answer": is_unanswered,
    "unwanted_tokens": has_unwanted_tokens,
    "malformed_think_tag": is_malformed,
    "invalid_tool_call": has_invalid_call,
}
