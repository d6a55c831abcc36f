"""Separates a policy's thoughts from its answer. Rewards, tools, judges and pages all use this one implementation.

A thought begins with a tag that the policy wrote or that the prompt ended with (``find_opening``), and ends with its closing tag,
or at the end of the text. GPT-OSS writes messages in channels: ``analysis`` holds thoughts, ``final`` the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TAGS = {  # tags that open and close thoughts, by model family
    "<think>": "</think>",  # most models
    "[THINK]": "[/THINK]",  # Mistral
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",  # Cohere
    "<|channel|>analysis<|message|>": "<|end|>",  # GPT-OSS
}
_HARMONY = "<|channel|>"
_CLOSING = {closing: opening for opening, closing in TAGS.items() if not opening.startswith(_HARMONY)}
_FINAL = re.compile(r"<\|channel\|>\s*final\b[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>")
_END_OF_MESSAGE = re.compile(r"<\|(?:end|return|call|start|channel)\|>")


@dataclass(frozen=True)
class Thought:
    """A thought at [start, end) of a text, its tags included; [inner, inner_end) is without them."""

    start: int
    inner: int
    inner_end: int
    end: int

    @property
    def is_closed(self) -> bool:
        return self.end > self.inner_end


def find_opening(prompt: str) -> str:
    """Return the opening tag of a thought in which a prompt ends, as reasoning models' templates do; empty if it ends outside of
    thoughts.
    """
    return next((opening for opening in TAGS if prompt.rstrip().endswith(opening)), "")


def find_thoughts(text: str, *, is_inside: bool = False, call: tuple[str, str] | None = None) -> list[Thought]:
    """Return the thoughts of a turn in order. Takes time linear in the length of the text.

    ``is_inside``: the prompt opened the first thought. Tags between the two marks of ``call`` are call arguments, not thoughts.
    """
    thoughts: list[Thought] = []
    at = 0
    if (headless := _find_unopened(text, is_inside)) is not None:
        thoughts.append(headless)
        at = headless.end
    begins = re.compile("|".join(map(re.escape, [*TAGS, *([] if call is None else call[:1])])))
    while (found := begins.search(text, at)) is not None:
        closing = TAGS.get(found[0]) or (call[1] if call else "")
        closed = text.find(closing, found.end())
        inner_end, at = (closed, closed + len(closing)) if closed >= 0 else (len(text), len(text))
        if found[0] in TAGS:
            thoughts.append(Thought(found.start(), found.end(), inner_end, at))
    return thoughts


def _find_unopened(text: str, is_inside: bool) -> Thought | None:
    """Return the thought that began before the text: up to its closing tag, or everything."""
    for closing, opening in _CLOSING.items():  # a message of GPT-OSS ends with the same tag as its thoughts
        closed = text.find(closing)
        if closed >= 0 and text.find(opening, 0, closed) < 0:
            return Thought(0, 0, closed, closed + len(closing))
    begins = text.lstrip().startswith(tuple(TAGS))
    return Thought(0, 0, len(text), len(text)) if is_inside and text and not begins else None


def split_thoughts(text: str, opening: str = "", *, call: tuple[str, str] | None = None) -> tuple[str, str]:
    """Return the thoughts, and the text outside of them. ``opening``: the tag that the prompt ended with."""
    thoughts = find_thoughts(text, is_inside=bool(opening), call=call)
    ends = [0, *(each.end for each in thoughts)]
    starts = [*(each.start for each in thoughts), len(text)]
    outside = "".join(text[end:start] for end, start in zip(ends, starts, strict=True))
    return "\n\n".join(filter(None, (text[each.inner : each.inner_end].strip() for each in thoughts))), outside


def read_answer(text: str, opening: str = "") -> str:
    """Return the answer after the last complete thought and before one that never ended; with GPT-OSS, the channel ``final``."""
    if _HARMONY in text:
        *_, final = [None, *_FINAL.finditer(text)]
        return "" if final is None else _END_OF_MESSAGE.split(text[final.end() :], maxsplit=1)[0]
    thoughts = find_thoughts(text, is_inside=bool(opening))
    end = len(text)
    if thoughts and not thoughts[-1].is_closed:
        end = thoughts.pop().start
    answer = text[thoughts[-1].end if thoughts else 0 : end]
    for closing in _CLOSING:  # text before an unmatched closing tag is thought, too
        answer = answer.rpartition(closing)[2]
    return answer
