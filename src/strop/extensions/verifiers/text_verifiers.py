"""Verifiers of a reply as text: equality with the reference, length, tags and citations."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.environments.base import EnvironmentConfigError
from strop.environments.rewards import to_number
from strop.environments.verifiers.base import AnswerVerifier, Reply, Score, Verifier, check_positive, read_path, read_references
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


@dataclass(frozen=True, kw_only=True)
class LengthVerifier(Verifier):
    """A function of the length n of a reply, with a limit L.

    at_most: 1 if n <= L, else 0. target: 1 - \\|n - L\\| / L, at least 0. budget: (L - n) / tolerance + 0.5, within 0 and 1, the shape
    of L1-Max (Aggarwal & Welleck 2025). soft_overlong: 0 up to L - buffer, then down to -1 at L and beyond (DAPO, Yu et al. 2025).
    """

    mode: Literal["at_most", "target", "budget", "soft_overlong"] = "at_most"
    limit: int | None = None  # L
    limit_key: str | None = None  # the column of the rows that holds L, if rows differ
    unit: Literal["tokens", "characters", "words"] = "tokens"
    part: Literal["all", "answer"] = "all"  # answer: the text after </think>; not for tokens
    tolerance: float | None = None  # of budget: number of units over which it falls from 1 to 0
    buffer: int | None = None  # of soft_overlong: number of units before L over which it falls from 0 to -1

    def __post_init__(self) -> None:
        if (self.limit is None) == (self.limit_key is None):
            raise EnvironmentConfigError("the verifier length needs limit or limit_key; set one of them")
        check_positive(self, "limit", "tolerance", "buffer")
        for option, mode in (("tolerance", "budget"), ("buffer", "soft_overlong")):
            if (getattr(self, option) is None) == (self.mode == mode):
                raise EnvironmentConfigError(
                    f"mode is {self.mode} and {option} is {getattr(self, option)}; {option} is of mode {mode}"
                )
        if self.buffer is not None and self.limit is not None and self.buffer > self.limit:
            raise EnvironmentConfigError(f"buffer is {self.buffer} and limit is {self.limit}; the buffer lies within the limit")
        if self.part == "answer" and self.unit == "tokens":
            raise EnvironmentConfigError(
                "part is answer and unit is tokens, which are counted for a whole turn; set unit to characters or words"
            )

    def score(self, task: Task, reply: Reply) -> float:
        limit, length = self._find_limit(task), self.measure(reply)
        if self.mode == "target":
            return max(0.0, 1 - abs(length - limit) / limit)
        if self.mode == "budget":
            assert self.tolerance is not None
            return min(1.0, max(0.0, (limit - length) / self.tolerance + 0.5))
        if self.mode == "soft_overlong":
            assert self.buffer is not None
            return -min(1.0, max(0.0, (length - (limit - self.buffer)) / self.buffer))
        return float(length <= limit)

    def measure(self, reply: Reply) -> int:
        if self.unit == "tokens":
            return reply.tokens
        text = reply.content if self.part == "answer" else reply.text
        return len(text.split()) if self.unit == "words" else len(text)

    def _find_limit(self, task: Task) -> float:
        if self.limit_key is None:
            assert self.limit is not None
            return float(self.limit)
        given = read_path(task.metadata, self.limit_key)
        limit = None if isinstance(given, bool) else to_number(given)
        if limit is None or limit <= 0:
            raise ValueError(
                f"the task {task.id!r} has {given!r:.80} in its column {self.limit_key!r}; a limit is a positive number"
            )
        return limit


_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class TagsVerifier(Verifier):
    """1 if the reply has these elements once each, in this order and not nested; otherwise 0, or the share of them it has."""

    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = (
        False  # the prompt ends inside the first element, whose content begins the reply (detected for a template's thoughts)
    )
    only: bool = True  # only white space outside of the elements
    filled: bool = True  # each contains more than white space
    credit: Literal["all", "each"] = "all"  # each: the share of correct tags, with ``only`` as one more

    def __post_init__(self) -> None:
        if not self.tags or len(set(self.tags)) < len(self.tags) or not all(_NAME.fullmatch(tag) for tag in self.tags):
            raise EnvironmentConfigError(f"tags is {list(self.tags)}; set it to different names of elements, without < and >")

    def score(self, task: Task, reply: Reply) -> float:
        text = f"<{self.tags[0]}>{reply.text}" if self.opened else reply.opening + reply.text
        right, position, outside = 0, 0, ""
        for tag in self.tags:
            begin, end = text.find(f"<{tag}>", position), text.find(f"</{tag}>", position)
            once = text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>")
            if not once or not 0 <= begin < end:
                continue
            if self.filled and not text[begin + len(tag) + 2 : end].strip():
                continue
            right += 1
            outside += text[position:begin]
            position = end + len(tag) + 3
        alone = right == len(self.tags) and not (outside + text[position:]).strip()
        if self.credit == "all":
            return float(right == len(self.tags) and (alone or not self.only))
        return (right + alone) / (len(self.tags) + 1) if self.only else right / len(self.tags)


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
