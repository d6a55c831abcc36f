"""The code in a policy's reply, and how much of it is that of the reference (Jaccard similarity)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from strop.environments.answers import extract_last_tagged
from strop.environments.base import DatasetEnvironment, PromptedTask, reward
from strop.thoughts import read_answer
from strop.types import Rollout

TAGS = {  # of a fenced block, by language
    "python": ("python", "python3", "py"),
    "bash": ("bash", "sh", "shell"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc", "cxx"),
    "javascript": ("javascript", "js", "node"),
}
_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})\s*([\w+#.-]*)")


def extract_code(reply: str, language: str = "python") -> str:
    """Return the program of a reply: of what follows its thoughts, the last fenced block of the language.

    Without one: the last block that names no language, else what stands in ``<code>`` or ``<answer>`` tags, else, if there is no block at
    all, the whole text. A block that is never closed goes to the end.
    """
    text = read_answer(reply)
    blocks = split_blocks(text)
    for tags in (TAGS.get(language, (language,)), ("",)):
        found = [code for tag, code in blocks if tag.lower() in tags]
        if found:
            return found[-1]
    for tag in ("code", "answer"):
        if (tagged := extract_last_tagged(text, tag)) is not None:
            return extract_code(tagged, language) if split_blocks(tagged) else tagged.strip("\r\n")
    return "" if blocks else text


def split_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language tag, content) of each fenced block, in order, without the indentation of a block that stands in a list."""
    blocks: list[tuple[str, str]] = []
    fence, tag, inside, margin = "", "", list[str](), 0
    for line in text.splitlines():
        found = _FENCE.match(line)
        if not fence:
            if found and not line[found.end() :].strip("`~ "):
                margin, fence, tag, inside = len(found[1]), found[2], found[3], []
        elif found and _closes(found, fence, margin) and not line[found.end() :].strip():
            blocks.append((tag, "\n".join(inside)))
            fence = ""
        else:
            inside.append(line[min(margin, len(line) - len(line.lstrip(" \t"))) :])
    return [*blocks, (tag, "\n".join(inside))] if fence else blocks


def _closes(found: re.Match[str], fence: str, margin: int) -> bool:
    """Whether a fence ends a block: one that is indented further stands in the program, in a docstring most likely."""
    return found[2].startswith(fence) and not found[3] and len(found[1]) <= margin + 3


_NEXT_DEFINITION = re.compile(r"^(?=[^\s#)\]}])", re.MULTILINE)


def truncate_completion(completion: str) -> str:
    """Return the rest of a function's body: a continuation of it up to the first line that is not indented."""
    first, newline, rest = completion.partition("\n")
    return first + newline + _NEXT_DEFINITION.split(rest, maxsplit=1)[0]


@dataclass(frozen=True, kw_only=True)
class CodeJaccard(DatasetEnvironment):
    """Words that reply and reference share, over the words of both, times the ratio of their lengths."""

    @reward(weight=1.0, accuracy=True)
    def similarity(self, task: PromptedTask, rollout: Rollout) -> float:
        return compare_words("".join(turn.text for turn in rollout.policy_turns), task.answer)

    @reward(weight=0.0)
    def aligned(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.similarity(task, rollout) > 0.5

    @reward(weight=0.0)
    def highly_aligned(self, task: PromptedTask, rollout: Rollout) -> bool:
        return self.similarity(task, rollout) > 0.8


def compare_words(reply: str, reference: str) -> float:
    """Return a number from 0 to 1. Words are divided by white space; case does not count."""
    found, expected = reply.strip().lower(), reference.strip().lower()
    if found == expected:
        return 1.0
    first, second = set(found.split()), set(expected.split())
    if not second:
        return 0.0
    return len(first & second) / len(first | second) * min(len(found), len(expected)) / max(len(found), len(expected))
