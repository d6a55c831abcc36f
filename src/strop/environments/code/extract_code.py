"""The code in a policy's reply."""

from __future__ import annotations

import re

from strop.environments.answers import extract_last_tagged

TAGS = {  # of a fenced block, by language
    "python": ("python", "python3", "py"),
    "bash": ("bash", "sh", "shell"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc", "cxx"),
    "javascript": ("javascript", "js", "node"),
}
_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)")


def extract_code(reply: str, language: str = "python") -> str:
    """Return the program of a reply: what follows ``</think>``, and there the last fenced block of the language.

    Without one: the last block that names no language, else what stands in ``<code>`` or ``<answer>`` tags, else, if there is no block at
    all, the whole text. A block that is never closed goes to the end. Reasoning that never ended has no program.
    """
    before, ended, text = reply.rpartition("</think>")
    if not ended and "<think>" in before + text:
        return ""
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
    """Return (language tag, content) of each fenced block, in order."""
    blocks: list[tuple[str, str]] = []
    fence, tag, inside = "", "", list[str]()
    for line in text.splitlines():
        found = _FENCE.match(line)
        if not fence:
            if found and not line[found.end() :].strip("`~ "):
                fence, tag, inside = found[1], found[2], []
        elif found and found[1].startswith(fence) and not found[2] and not line[found.end() :].strip():
            blocks.append((tag, "\n".join(inside)))
            fence = ""
        else:
            inside.append(line)
    return [*blocks, (tag, "\n".join(inside))] if fence else blocks


_NEXT_DEFINITION = re.compile(r"^(?=[^\s#)\]}])", re.MULTILINE)


def truncate_completion(completion: str) -> str:
    """Return the rest of a function's body: a continuation of it up to the first line that is not indented."""
    first, newline, rest = completion.partition("\n")
    return first + newline + _NEXT_DEFINITION.split(rest, maxsplit=1)[0]
