"""Citations of the right sources, and searches that retrieved them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.verifiers.base import AnswerVerifier, Reply, Score, Verifier, read_references
from strop.environments.verifiers.match import normalize_text
from strop.types import Task

_BRACKETS = re.compile(r"\[([^\[\]\n]{1,200})\]")


@dataclass(frozen=True, kw_only=True)
class CitationVerifier(AnswerVerifier):
    """Compares the sources cited by the answer, as [3] or [doc-a, doc-b], with the sources that should be cited."""

    references: str = "citations"  # the column of the rows with the right sources
    measure: Literal["f1", "precision", "recall", "any", "all"] = "f1"  # any: a right one is cited; all: exactly the right ones

    def score(self, task: Task, reply: Reply) -> Score:
        wanted = {each.strip().casefold() for each in read_references(task, self.references)}
        cited = find_citations(self.read(reply) or "")
        hits = len(cited & wanted)
        precision, recall = hits / len(cited) if cited else 0.0, hits / len(wanted)
        values = {
            "f1": 2 * hits / (len(cited) + len(wanted)),
            "precision": precision,
            "recall": recall,
            "any": float(hits > 0),
            "all": float(cited == wanted),
        }
        return Score(values[self.measure], {"precision": precision, "recall": recall, "cited": float(len(cited))})


def find_citations(text: str) -> set[str]:
    """Return the sources between square brackets; several are separated by commas or semicolons."""
    inside = (part for bracket in _BRACKETS.findall(text) for part in re.split(r"[,;]", bracket))
    return {part.strip().casefold() for part in inside} - {""}


@dataclass(frozen=True, kw_only=True)
class RetrievalHitVerifier(Verifier):
    """Whether messages from tools or the environment contain a reference, such as a passage's name or the answer itself."""

    references: str | None = None  # the column of the rows; None: the reference answer of the data
    roles: tuple[str, ...] = ("tool",)  # whose messages are searched; user, if the environment answers as the user
    measure: Literal["any", "recall"] = "any"  # recall: the share of references found

    def __post_init__(self) -> None:
        if not self.roles or "assistant" in self.roles:
            raise EnvironmentConfigError(
                f"roles is {list(self.roles)}; set it to those whose messages were retrieved, such as tool"
            )

    @property
    def needs_answer(self) -> bool:
        return self.references is None

    def score(self, task: Task, reply: Reply) -> float:
        start = next((index for index, each in enumerate(reply.messages) if each.role == "assistant"), len(reply.messages))
        contents = (each.content for each in reply.messages[start:] if each.role in self.roles)
        found = "\n".join(f" {normalize_text(content, 'squad')} " for content in contents)
        hits = [f" {normalize_text(each, 'squad')} " in found for each in read_references(task, self.references)]
        return float(any(hits)) if self.measure == "any" else sum(hits) / len(hits)
