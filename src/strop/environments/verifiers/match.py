"""Texts against reference answers: equal, nearly equal, or by shared words."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.verifiers.base import AnswerVerifier, Reply, Score, read_references
from strop.packages import install_command, is_installed
from strop.types import Task

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


Normalization = Literal["squad", "case", "space", "none"]


def normalize_text(text: str, how: Normalization) -> str:
    if how == "none":
        return text
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    if how == "space":
        return text
    text = text.casefold()
    return text if how == "case" else " ".join(_ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION)).split())


@dataclass(frozen=True, kw_only=True)
class MatchVerifier(AnswerVerifier):
    """A verifier that compares texts after normalizing both, and takes the best of several references."""

    references: str | None = None  # column of the rows with one answer or a list; None: the reference answer of the data
    normalize: Normalization = "squad"  # squad: no case, punctuation, articles or double spaces

    @property
    def needs_answer(self) -> bool:
        return self.references is None

    def read_pairs(self, task: Task, reply: Reply) -> list[tuple[str, str]]:
        """Return (answer, reference) for each reference, normalized; none if the reply has no answer."""
        references = read_references(task, self.references)
        text = self.read(reply)
        return (
            []
            if text is None
            else [(normalize_text(text, self.normalize), normalize_text(each, self.normalize)) for each in references]
        )

    def find_answer(self, reply: Reply) -> str | None:
        text = self.read(reply)
        return None if text is None else normalize_text(text, self.normalize) or None


@dataclass(frozen=True, kw_only=True)
class ExactMatchVerifier(MatchVerifier):
    """1 where the answer equals one of the references; with SQuAD's normalization, its exact match (Rajpurkar et al. 2016)."""

    is_accuracy: ClassVar[bool] = True

    def score(self, task: Task, reply: Reply) -> bool:
        return any(answer == reference for answer, reference in self.read_pairs(task, reply))


@dataclass(frozen=True, kw_only=True)
class F1Verifier(MatchVerifier):
    """The harmonic mean of precision and recall of the words of the answer, as SQuAD computes it; the best of the references."""

    def score(self, task: Task, reply: Reply) -> float:
        return max((word_f1(answer, reference) for answer, reference in self.read_pairs(task, reply)), default=0.0)


def word_f1(answer: str, reference: str) -> float:
    given, wanted = answer.split(), reference.split()
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


@dataclass(frozen=True, kw_only=True)
class FuzzyMatchVerifier(MatchVerifier):
    """The similarity of the answer with a reference, from 0 to 1, by RapidFuzz; the best of the references."""

    method: Literal["ratio", "partial_ratio", "token_sort_ratio", "token_set_ratio", "jaro_winkler"] = "ratio"
    threshold: float | None = None  # 1 if the similarity is at least this, otherwise 0
    max_characters: int = (
        10_000  # longer answers score 0 and count as too_long, because comparing takes the product of both lengths
    )

    def __post_init__(self) -> None:
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise EnvironmentConfigError(f"threshold is {self.threshold}; set it to a similarity above 0 and at most 1")
        if self.max_characters < 1:
            raise EnvironmentConfigError(f"max_characters is {self.max_characters}; it must be at least 1")
        if not is_installed("rapidfuzz"):
            raise EnvironmentConfigError(f"the verifier fuzzy_match needs the package RapidFuzz: {install_command('verifiers')}")

    def score(self, task: Task, reply: Reply) -> Score:
        from rapidfuzz import distance, fuzz

        pairs = self.read_pairs(task, reply)
        if pairs and len(pairs[0][0]) > self.max_characters:
            return Score(0.0, {"too_long": 1.0})
        if self.method == "jaro_winkler":
            similar = max((distance.JaroWinkler.similarity(*pair) for pair in pairs), default=0.0)
        else:
            compare = getattr(fuzz, self.method)
            similar = max((compare(*pair) / 100 for pair in pairs), default=0.0)
        return Score(similar if self.threshold is None else float(similar >= self.threshold), {"too_long": 0.0})
