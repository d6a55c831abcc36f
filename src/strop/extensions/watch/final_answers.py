"""The final answer in a text, as far as it can be found without its environment."""

from __future__ import annotations

import re

_ANSWERS = (
    re.compile(r"\\boxed\{([^{}]{1,200})\}"),
    re.compile(r"<answer>(.{1,200}?)</answer>", re.DOTALL),
    re.compile(r"(?:answer(?: is)?\s*[:=]?|####)\s*([^\n]{1,80})", re.IGNORECASE),
)


def find_answer(text: str) -> str:
    """Return the final answer in a normal form: the boxed or tagged one, what follows "answer is" or "####", or the last line."""
    tail = text[-2000:]
    for pattern in _ANSWERS:
        if found := pattern.findall(tail):
            return normalize_answer(found[-1])
    return normalize_answer(tail.strip().rpartition("\n")[2][-80:])


def normalize_answer(answer: str) -> str:
    return " ".join(answer.casefold().split()).strip(" .*$`\"'")
