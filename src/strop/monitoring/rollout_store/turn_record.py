"""One message of a stored conversation: its author, its text, and its token range in the rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.monitoring.rollout_store.stored_images import image_name

if TYPE_CHECKING:
    from strop.types import Rollout


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """One message after the prompt. Messages from one environment response share a range, and the ranges cover all tokens."""

    role: str  # assistant, or a role of the environment: user, tool, ...
    text: str
    start: int  # tokens[start:end] of the rollout, including the chat template's tokens around an environment's message
    end: int
    sampled: bool  # by the policy
    versions: tuple[int, ...]  # versions of the weights that sampled it, in order, each once; empty for the environment
    reward: float | None = None  # weighted sum of the rewards of its steps; None if it has none
    calls: tuple[str, ...] = ()  # names of the tools called in it by the policy
    tool: str = ""  # the name of the tool that answers
    path: int = 0  # 0: the main path; i: branch i of the rollout
    state: str | None = None  # the environment's state before a policy turn, if reported
    images: tuple[str, ...] = ()  # names of the images shown by the environment, in order
    reasoning: str = ""  # kept separately only for messages that were not sampled; sampled reasoning is part of the text


def make_turn_records(rollout: Rollout) -> tuple[TurnRecord, ...]:
    """Return the messages of a rollout after its prompt: those of the main path, then those of each branch."""
    records: list[TurnRecord] = []
    start, next_message, first = 0, len(rollout.prompt_messages), 0
    states = iter(rollout.turn_states)
    paths = (rollout.turns, *(branch.turns for branch in rollout.branches))
    for path, turn in ((path, turn) for path, turns in enumerate(paths) for turn in turns):
        messages = rollout.messages[next_message : next_message + turn.num_messages]
        named = [
            (
                message.role,
                turn.text if turn.sampled else message.shown_content,
                tuple(call.name for call in message.tool_calls),
                message.name,
                "" if turn.sampled else message.reasoning,
            )
            for message in messages
        ]
        versions = tuple(dict.fromkeys(turn.versions.unique_consecutive().tolist())) if turn.sampled else ()
        end = start + len(turn.tokens)
        reward = _sum_steps(rollout, first, first + len(turn.tokens)) if turn.sampled else None
        common: dict[str, Any] = {
            "start": start,
            "end": end,
            "sampled": turn.sampled,
            "versions": versions,
            "reward": reward,
            "path": path,
            "state": next(states, None) if turn.sampled else None,
        }
        shown = tuple(image_name(image.digest) for image in turn.images)
        default = [("assistant" if turn.sampled else "user", turn.text, (), "", "")]
        records += [
            TurnRecord(
                role=role, text=text, calls=calls, tool=tool, images=() if number else shown, reasoning=reasoning, **common
            )
            for number, (role, text, calls, tool, reasoning) in enumerate(named or default)
        ]
        first += len(turn.tokens) if turn.sampled else 0
        start, next_message = end, next_message + turn.num_messages
    return tuple(records)


def _sum_steps(rollout: Rollout, start: int, end: int) -> float | None:
    """Sum the rewards of the steps that end at sampled tokens [start, end)."""
    rewards = [step.reward for step in rollout.step_rewards if start <= step.token < end]
    return float(sum(rewards)) if rewards else None
