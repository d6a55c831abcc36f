"""A stored rollout as the page reads it. Everything a model wrote has its control characters as codes."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from strop.extensions.reading.rollout_view import describe_origin
from strop.extensions.view.viewed_run import clean_number
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, TurnRecord
from strop.monitoring.trackers.rollout_media import join_turns
from strop.safety.printable import make_printable, shorten
from strop.storage.files import clean_json
from strop.thoughts import Thought, find_opening, find_thoughts


@dataclass(frozen=True)
class ReasoningPart:
    """Consecutive characters of a turn. Its tags are not part of the text, but of the tokens."""

    text: str
    is_reasoning: bool
    is_closed: bool = True  # False: reasoning that never ended
    start: int | None = None  # tokens [start, end) of the rollout; None if the texts of tokens are unknown
    end: int | None = None
    origin: str = ""  # for reasoning outside of the turn's text: its origin


def split_reasoning_parts(
    text: str, *, is_inside: bool = False, pieces: Sequence[str] | None = None, first: int = 0
) -> tuple[ReasoningPart, ...]:
    """Return the parts of a turn in order; none if it has no reasoning.

    ``is_inside``: its prompt opened the reasoning. ``pieces``: the texts of its tokens, of which the first is token ``first`` of the
    rollout. If the tags are tokens missing from ``text``, the texts of the parts are those of their tokens.
    """
    spans = find_thoughts(text, is_inside=is_inside)
    if pieces is None:
        return tuple(_cut(text, spans))
    joined = "".join(pieces)
    spans_of_tokens = find_thoughts(joined, is_inside=is_inside)
    if not spans_of_tokens:
        return ()
    texts = _cut(text, spans) if len(spans) == len(spans_of_tokens) else _cut(joined, spans_of_tokens)
    said = _cut(joined, spans_of_tokens)
    if [part.is_reasoning for part in texts] != [part.is_reasoning for part in said]:  # the text ends before the tokens do
        texts = said
    ends = list(accumulate(map(len, pieces)))
    places = (first + _token_at(ends, place, is_end) for place, is_end in _list_edges(joined, spans_of_tokens))
    edges = [*accumulate(places, max, initial=first), first + len(pieces)]
    return tuple(
        ReasoningPart(part.text, part.is_reasoning, part.is_closed, start, end)
        for part, start, end in zip(texts, edges, edges[1:], strict=False)
    )


def _cut(text: str, spans: Sequence[Thought]) -> list[ReasoningPart]:
    """Return the reasoning and the text before, between and after; nothing without reasoning. White space before it is left out."""
    parts: list[ReasoningPart] = []
    at = 0
    for span in spans:
        if text[at : span.start].strip() or (parts and span.start > at):
            parts.append(ReasoningPart(text[at : span.start].strip("\n"), False))
        parts.append(ReasoningPart(text[span.inner : span.inner_end].strip("\n"), True, span.is_closed))
        at = span.end
    if spans and at < len(text):
        parts.append(ReasoningPart(text[at:].strip("\n"), False))
    return parts


def _list_edges(text: str, spans: Sequence[Thought]) -> list[tuple[int, bool]]:
    """Return the boundaries between parts: character positions, and whether the token there belongs to the part before."""
    edges: list[tuple[int, bool]] = []
    at = 0
    for span in spans:
        if text[at : span.start].strip() or (edges and span.start > at):
            edges.append((span.start, False))
        if span.end < len(text):
            edges.append((span.end, True))
        at = span.end
    return edges


def _token_at(ends: Sequence[int], place: int, is_end: bool) -> int:
    """Return the token containing character ``place``; for an end, the first token after it."""
    return bisect_left(ends, place) + 1 if is_end else bisect_right(ends, place)


PREVIEW = 200  # characters
GROUP_TEXT = 4000  # characters of a completion, or of one of its turns, shown among others
GROUP_TURNS = 40  # of a rollout shown among others
SIGNIFICANT = 6  # digits of the numbers of tokens
REASONS = {  # of a token without gradient, as runs store them
    "environment": "written by the environment",
    "left_out": "its rollout is left out of the loss",
    "overlong": "its rollout is too long to count",
    "sequence_error": "sampler and learner differ too much on its rollout",
    "rejected": "a correction rejected it",
    "not_selected": "the selection of tokens left it out",
    "not_predicted": "only the end of the rollout is predicted",
}
STORED_COLUMNS = {  # of tokens, under the names that the page knows; a run may have stored them or not
    "entropy": "entropy",
    "reference_logprobs": "reference_logprobs",
    "token_advantages": "advantages",
    "mask": "mask",
    "mask_reason": "mask_reason",
    "clipped": "clipped",
    "correction": "correction",
    "trained_logprobs": "trained_logprobs",
}


def summarize_record(record: RolloutRecord, *, starred: bool = False, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a list of rollouts says of one."""
    return {
        "step": record.step,
        "group": record.group,
        "sample": record.sample,
        "env": make_printable(record.environment),
        "task": make_printable(record.task_id),
        "reward": clean_number(record.reward),
        "rewards": clean_json(dict(record.rewards)),
        "answer": make_printable(record.answer),
        "advantage": clean_number(record.advantage),
        "tokens": count_tokens(record),
        "ending": record.ending,
        "kept": record.kept,
        "dropped_because": record.dropped_because,
        "preview": make_preview_text(join_turns(record.turns, record.completion)),
        "starred": starred,
        "flags": list(flags),
    }


def count_tokens(record: RolloutRecord) -> int:
    """Return how many tokens the policy sampled; for the samples of a validation, whose tokens are not stored, by their turns."""
    if record.sampled:
        return sum(record.sampled)
    return sum(turn.end - turn.start for turn in record.turns if turn.sampled)


def make_preview_text(text: str | None) -> str:
    return make_printable(" ".join((text or "")[: 2 * PREVIEW].split())[:PREVIEW])


def write_group(records: Sequence[RolloutRecord], summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rollouts of a task side by side, the best reward first."""
    rows = [
        {
            **summary,
            "text": make_printable(shorten(record.completion, GROUP_TEXT, around="\n")),
            "turns": _write_short_turns(record),
            "num_turns": sum(turn.path == 0 for turn in record.turns),
            "error": _text(record.error),
        }
        for record, summary in zip(records, summaries, strict=True)
    ]
    first = records[0]
    return {
        "task": make_printable(first.task_id),
        "env": make_printable(first.environment),
        "answer": make_printable(first.answer),
        "prompt_messages": write_prompt(first),
        "rollouts": sorted(rows, key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0), row["sample"])),
    }


def write_prompt(record: RolloutRecord) -> list[dict[str, Any]]:
    """Return the messages of the prompt; the whole prompt as one, in files of earlier versions."""
    messages = [
        {
            "role": make_printable(message.get("role") or ""),
            "content": make_printable(message.get("content") or ""),
            "images": [image for place, image in record.prompt_images if place == number],
            **_write_parts(_split_prompt_message(message, record.prompt)),
        }
        for number, message in enumerate(record.prompt_messages)
    ]
    if messages or not record.prompt:
        return messages
    return [{"role": "prompt", "content": make_printable(record.prompt), "images": []}]


def _split_prompt_message(message: Mapping[str, str], prompt: str) -> tuple[ReasoningPart, ...]:
    content, reasoning = message.get("content") or "", message.get("reasoning") or ""
    parts = split_reasoning_parts(content) if message.get("role") == "assistant" else ()
    return _add_reasoning(parts, content, reasoning, describe_origin(reasoning, prompt))


def _add_reasoning(parts: tuple[ReasoningPart, ...], text: str, reasoning: str, origin: str) -> tuple[ReasoningPart, ...]:
    """Return the parts of a message after the reasoning that it has in its own field."""
    if not reasoning:
        return parts
    return (ReasoningPart(reasoning, True, origin=origin), *(parts or ([ReasoningPart(text, False)] if text else [])))


def write_rollout(record: RolloutRecord, summary: Mapping[str, Any], pieces: Sequence[str] | None) -> dict[str, Any]:
    """Return everything of a rollout. Columns of tokens are aligned with each other; None: not known."""
    return {
        **summary,
        "prompt_messages": write_prompt(record),
        "turns": _write_turns(record, pieces),
        "branches": [{"path": path, "parent": parent, "start": start} for path, (parent, start) in enumerate(record.branches, 1)],
        "metrics": clean_json(dict(record.metrics)),
        "error": _text(record.error),
        "output": make_printable(record.output),
        "images": sorted(
            {image for _, image in record.prompt_images} | {image for turn in record.turns for image in turn.images}
        ),
        "prompt_tokens": len(record.prompt_tokens),
        "token_ids": list(record.tokens),
        "pieces": None if pieces is None else list(pieces),
        **_write_columns(record),
    }


def _write_short_turns(record: RolloutRecord) -> list[dict[str, Any]]:
    """Return what is read of the main path's turns when shown among other rollouts; of very many the first."""
    is_inside = bool(find_opening(record.prompt))
    return [
        {
            "role": make_printable(turn.role),
            "sampled": turn.sampled,
            "tool": make_printable(turn.tool or ""),
            "calls": [make_printable(name) for name in turn.calls],
            "text": make_printable(shorten(turn.text or "", GROUP_TEXT, around="\n")),
            "images": list(turn.images),
            **_write_parts(_split_turn(turn, is_inside, None), GROUP_TEXT),
        }
        for turn in [turn for turn in record.turns if turn.path == 0][:GROUP_TURNS]
    ]


def _split_turn(turn: TurnRecord, is_inside: bool, pieces: Sequence[str] | None) -> tuple[ReasoningPart, ...]:
    if not turn.sampled and turn.role != "assistant":
        return ()  # others speak of the tags, and do not reason
    known = None if pieces is None or turn.end <= turn.start else pieces[turn.start : turn.end]
    parts = split_reasoning_parts(turn.text or "", is_inside=is_inside and turn.sampled, pieces=known, first=turn.start)
    return _add_reasoning(parts, turn.text or "", turn.reasoning, describe_origin(turn.reasoning))


def _write_parts(parts: Sequence[ReasoningPart], limit: int | None = None) -> dict[str, Any]:
    """Return the parts of a message; nothing of one without reasoning."""
    written = [
        {
            "text": make_printable(part.text if limit is None else shorten(part.text, limit, around="\n")),
            "is_reasoning": part.is_reasoning,
            "is_closed": part.is_closed,
            "start": part.start,
            "end": part.end,
            **({"origin": part.origin} if part.origin else {}),
        }
        for part in parts
    ]
    return {"parts": written} if written else {}


def _write_turns(record: RolloutRecord, pieces: Sequence[str] | None) -> list[dict[str, Any]]:
    is_inside = bool(find_opening(record.prompt))
    turns = [
        {
            "role": make_printable(turn.role),
            "start": turn.start,
            "end": turn.end,
            "sampled": turn.sampled,
            "versions": list(turn.versions),
            "calls": [make_printable(name) for name in turn.calls],
            "tool": make_printable(turn.tool or ""),
            "path": turn.path,
            "reward": clean_number(turn.reward),
            "state": _text(turn.state),
            "text": make_printable(turn.text or ""),
            "images": list(turn.images),
            **_write_parts(_split_turn(turn, is_inside, pieces)),
        }
        for turn in record.turns
    ]
    if turns or not record.completion:
        return turns
    whole: dict[str, Any] = {
        "start": 0,
        "end": len(record.tokens),
        "sampled": True,
        "versions": [],
        "calls": [],
        "tool": "",
        "path": 0,
    }
    rest: dict[str, Any] = {"reward": None, "state": None, "images": [], "text": make_printable(record.completion)}
    return [{"role": "assistant", **whole, **rest}]  # in files of earlier versions


def _write_columns(record: RolloutRecord) -> dict[str, Any]:
    """Return the columns of tokens: those that are stored, and those that follow from them."""
    sampled = record.sampled
    learner = record.learner_logprobs
    columns: dict[str, Any] = {name: None for name in (*STORED_COLUMNS.values(), "ratio", "reference_kl")}
    columns |= {
        "sampled": list(sampled) or None,
        "versions": [version if version >= 0 else None for version in record.versions] or None,
        "sampler_logprobs": _write_floats(record.sampler_logprobs, sampled),
        "learner_logprobs": _write_floats(learner, sampled),
    }
    if learner is not None:
        pairs = zip(record.sampler_logprobs, learner, strict=True)
        columns["ratio"] = _write_floats([_exp(after - before) for before, after in pairs], sampled)
    if sampled:
        columns["mask"] = [1 if each and record.kept else 0 for each in sampled]
        columns["mask_reason"] = [_explain_mask(record, each) for each in sampled]
        if record.advantage is not None:
            columns["advantages"] = _write_floats([record.advantage] * len(sampled), sampled)
    for stored, shown in STORED_COLUMNS.items():
        values = getattr(record, stored, None)
        if values is not None and len(values) == len(sampled) > 0:
            columns[shown] = [_write_value(shown, value, each) for value, each in zip(values, sampled, strict=True)]
    reference = getattr(record, "reference_logprobs", None)
    policy = getattr(record, "trained_logprobs", None) or learner
    if reference is not None and policy is not None and len(reference) == len(policy) == len(sampled):
        columns["reference_kl"] = _write_floats([_estimate_kl(p, r) for p, r in zip(policy, reference, strict=True)], sampled)
    return columns


def _explain_mask(record: RolloutRecord, sampled: bool) -> str | None:
    """Return why a token has no gradient, as far as that is stored; None for one that was trained on."""
    if not sampled:
        return "written by the environment"
    return None if record.kept else f"not trained on: {record.dropped_because or 'dropped'}"


def _write_floats(values: Sequence[float | None] | None, sampled: Sequence[bool]) -> list[float | None] | None:
    """Return the values of sampled tokens, rounded; None for the environment's."""
    if values is None or not sampled or len(values) != len(sampled):
        return None
    return [_round(value) if by_policy else None for value, by_policy in zip(values, sampled, strict=True)]


def _write_value(column: str, value: Any, sampled: bool) -> Any:
    """Return a stored value of a token; the environment's tokens have none but the reason why they are masked."""
    if column == "mask_reason":
        return REASONS.get(value, make_printable(str(value))) if value else None
    if column == "mask":
        return int(bool(value))
    if not sampled or value is None:
        return None
    return bool(value) if column == "clipped" else _round(float(value))


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{SIGNIFICANT}g}")


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _estimate_kl(policy: float | None, reference: float | None) -> float | None:
    """Return Schulman's k3 estimate of KL(policy, reference) at a token."""
    if policy is None or reference is None:
        return None
    difference = reference - policy
    return _exp(difference) - 1.0 - difference


def _text(text: str | None) -> str | None:
    return None if text is None else make_printable(text)
