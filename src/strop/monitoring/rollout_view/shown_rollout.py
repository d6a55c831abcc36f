"""A stored rollout prepared for display: its messages, and facts above them. All text is safe to display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.turn_record import TurnRecord
from strop.safety.printable import make_printable, shorten

LONGEST_STATE = 60  # characters
_ENDINGS = {
    "stop": "stop: the model stopped, and the environment had nothing to add",
    "length": "length: a turn reached the maximum number of new tokens",
    "context": "context: the conversation no longer fits",
    "turns": "turns: the maximum number of turns was reached",
    "tool_calls": "tool_calls: the maximum number of tool calls was reached",
    "error": "error",
}


@dataclass(frozen=True)
class ShownMessage:
    role: str
    text: str
    sampled: bool
    note: str = ""  # its tokens, the weights that sampled it, the reward of its steps, and its state
    reasoning: str = ""  # from the message's separate field
    origin: str = ""  # where that comes from


@dataclass(frozen=True)
class ShownRollout:
    title: str
    facts: tuple[tuple[str, str], ...]  # facts about the rollout: name and value
    messages: tuple[ShownMessage, ...]


def show_rollout(record: RolloutRecord, limit: int | None, flags: Sequence[str] = ()) -> ShownRollout:
    """Prepare a rollout for display. ``flags`` are the reward hacking detectors that flagged it.

    A message longer than ``limit`` characters is shortened in the middle.
    """
    title = f"step {record.step}, task {record.task_id}, sample {record.sample}, {record.environment}"
    messages = tuple(
        replace(
            message,
            role=make_printable(message.role),
            text=make_printable(_shorten(message.text, limit)),
            reasoning=make_printable(_shorten(message.reasoning, limit)),
        )
        for message in _list_messages(record)
    )
    facts = tuple((make_printable(name), make_printable(_shorten(value, limit))) for name, value in _list_facts(record, flags))
    return ShownRollout(make_printable(title).replace("\n", " "), facts, messages)


def _list_messages(record: RolloutRecord) -> list[ShownMessage]:
    prompt = [
        ShownMessage(
            message["role"],
            message["content"],
            sampled=False,
            reasoning=message.get("reasoning") or "",
            origin=describe_origin(message.get("reasoning") or "", record.prompt),
        )
        for message in record.prompt_messages
    ]
    turns = [
        ShownMessage(
            turn.role,
            turn.text,
            turn.sampled,
            _describe_turn(turn) + _describe_state(turn.state) + branch,
            turn.reasoning,
            describe_origin(turn.reasoning),
        )
        for turn, branch in zip(record.turns, _describe_branches(record), strict=True)
    ]
    if turns or record.prompt_messages:
        return [*prompt, *turns]
    return [  # in files of earlier versions
        ShownMessage("prompt", record.prompt, sampled=False),
        ShownMessage("completion", record.completion, sampled=True, note=_describe_tokens(sum(record.sampled), ())),
    ]


def describe_origin(reasoning: str, prompt: str = "") -> str:
    """Describe the origin of reasoning kept outside of a message's text; "" without any. ``prompt``: as read by the policy.

    Chat templates drop or write the reasoning of earlier messages; what is in the prompt was read."""
    if not reasoning:
        return ""
    origin = "given in its own field"
    if not prompt:
        return origin
    return (
        f"{origin}, and in the prompt"
        if reasoning.strip() in prompt
        else f"{origin}, and not in the prompt: the policy did not read it"
    )


def _describe_branches(record: RolloutRecord) -> Iterator[str]:
    """Yield, per turn, the start of its branch if it is the first sampled turn of a branch."""
    shown = 0
    for turn in record.turns:
        if turn.path > shown and turn.sampled:  # the turns before it have no note
            shown = turn.path
            parent, start = record.branches[shown - 1]
            where = f"branch {parent}" if parent else "the conversation"
            yield f"; branch {shown} begins after {start} tokens of {where}" if start else f"; branch {shown} starts again"
        else:
            yield ""


def _describe_turn(turn: TurnRecord) -> str:
    tools = f", calls {', '.join(turn.calls)}" if turn.calls else f", tool {turn.tool}" if turn.tool else ""
    return _describe_tokens(turn.end - turn.start, turn.versions, turn.reward) + tools


def _describe_tokens(tokens: int, versions: tuple[int, ...], reward: float | None = None) -> str:
    weights = f", weights of step {'-'.join(map(str, dict.fromkeys((versions[0], versions[-1]))))}" if versions else ""
    return f"{tokens} tokens{weights}" + ("" if reward is None else f", reward {_number(reward)}")


def _describe_state(state: str | None) -> str:
    return "" if state is None else f", in state {shorten(' '.join(make_printable(state).split()), LONGEST_STATE)}"


def _list_facts(record: RolloutRecord, flags: Sequence[str]) -> list[tuple[str, str]]:
    facts = [("flagged", f"{', '.join(flags)} (perhaps the reward is hacked)")] if flags else []
    facts.append(("reward", _number(record.reward)))
    if record.rewards:
        facts.append(("rewards", _numbers(record.rewards)))
    if record.metrics:
        facts.append(("metrics", _numbers(record.metrics)))
    if record.advantage is not None:
        facts.append(("advantage", f"{record.advantage:+.4g}"))
    if calls := Counter(name for turn in record.turns for name in turn.calls):
        facts.append(("tools", ", ".join(f"{name} {count}" for name, count in calls.most_common())))
    facts.append(("ended by", _ENDINGS.get(record.ending, record.ending) or "nothing"))
    if record.error is not None:
        facts.append(("error", record.error))
    if not record.kept:
        facts.append(("dropped", f"not trained on: {record.dropped_because}"))
    if record.answer:
        facts.append(("answer", record.answer))
    if record.output:
        facts.append(("output", record.output))
    return facts


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _number(value: float) -> str:
    return f"{value:.4g}"


def _shorten(text: str, limit: int | None) -> str:
    return text if limit is None else shorten(text, limit, around="\n")
