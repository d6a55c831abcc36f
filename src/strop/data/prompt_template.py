"""Prompt templates turn a question into a conversation, using a prompt file and a system prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from strop.data.sources.records import DataError
from strop.storage.files import read_text_file
from strop.types import Message, system, user

AUTO_PROMPT = "auto"  # instead of a prompt file: the usual wording of a built-in set, if it has one


@dataclass(frozen=True)
class PromptTemplate:
    """Text around a question, and a system prompt."""

    prefix: str = ""
    suffix: str = ""
    system: str | None = None

    def render(self, question: str) -> tuple[Message, ...]:
        prompt = user(self.prefix + question + self.suffix)
        return (prompt,) if self.system is None else (system(self.system), prompt)


def read_prompt_file(path: str, option: str) -> str:
    try:
        return read_text_file(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{option} {path!r} cannot be read ({error}); looked for {Path(path).absolute()}") from error


def parse_prompt_template(text: str, name: str, system_prompt: str | None = None) -> PromptTemplate:
    """Split a prompt at its placeholder. Raises DataError if it does not have exactly one.

    The placeholder is ``{question}``, and all other text is literal. Without it, ``{}`` is the placeholder, and ``{{`` and ``}}``
    are single braces, as in Python's format strings, so that existing prompt files work. Trailing newlines are kept in such a
    prompt, and removed with ``{question}``.
    """
    if (count := text.count("{question}")) > 0:
        parts = text.rstrip("\n").split("{question}")
    else:
        parts = [part.replace("{{", "{").replace("}}", "}") for part in re.split(r"(?<!\{)\{\}(?!\})", text)]
    if len(parts) != 2:
        occurrences = f"{count} times" if count else f"as {{}} {len(parts) - 1} times"
        raise DataError(f"the prompt {name} has the placeholder {occurrences}; write {{question}} exactly once in it")
    return PromptTemplate(parts[0], parts[1], system_prompt)
