"""Contamination: which evaluation questions occur in the training data, verbatim or in large part.

The questions are indexed, and the training texts are read once, in batches, so that memory depends only on the questions. Texts are
compared as sequences of words, numbers and operators, without case, punctuation, markup and white space: "What is 3+4?" equals
"what is $3 + 4$", and not "What is 3+5?".
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

# Words; numbers, with their decimals; signs between terms. A hyphen between letters is no minus.
_TOKEN = re.compile(r"[^\W\d_]+|\d+(?:\.\d+)?|[+*/=<>^%≤≥≠±×÷√∑∫]|(?<![^\W\d_])-|-(?![^\W\d_])")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
LONG_ENOUGH = 8  # minimum tokens of a question for its occurrence in a longer text to count
COMMON = 10  # an n-gram shared by this many questions is taken for a template
BATCH_TOKENS = 1 << 17
_BASE = 0x9E3779B97F4A7C15


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A training text that contains an evaluation question, or much of it."""

    question: str  # where the question is
    text: str  # location of the training text
    exact: bool  # identical except for case, punctuation and white space
    shared: float  # share of the question's n-grams found in the training text


@dataclass(frozen=True, kw_only=True)
class QuestionOverlap:
    """An evaluation question with the closest of the training texts that contain it."""

    question: str
    exact: int  # number of texts identical to the question
    partial: int  # number of other texts that share much of it
    closest: tuple[Overlap, ...]


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """How much of an evaluation is in the training data."""

    questions: int  # compared
    texts: int
    texts_found: int  # number of training texts that contain a question
    found: tuple[QuestionOverlap, ...]  # in the order of the questions

    @property
    def exact(self) -> int:
        """Number of questions found verbatim in the training data."""
        return sum(each.exact > 0 for each in self.found)

    @property
    def share(self) -> float:
        """Share of the questions that were found."""
        return len(self.found) / self.questions if self.questions else 0.0


def normalize_text(text: str) -> list[str]:
    """Return the words, numbers and operators of a text in lower case. Numbers have no thousands separators."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    if "," in text:
        text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _TOKEN.findall(text.casefold())


def find_overlaps(
    questions: Iterable[tuple[str, str]],
    texts: Iterable[tuple[str, str]],
    *,
    ngram: int = 13,
    threshold: float = 0.5,
    keep: int = 3,
) -> OverlapReport:
    """Search training texts for evaluation questions.

    Args:
        questions: The location and the text of each question, such as ``("aime.jsonl:3", "Find the ...")``.
        texts: The location and the text of each training row, or of each message of one. They are read once and not kept.
        ngram: How many tokens in a row count as shared; 13 as for GPT-3, 8 finds more.
        threshold: The share of a question's n-grams from which on a text is reported; above 1 only the same text is.
        keep: How many of the closest texts are kept for each question.
    """
    index = QuestionIndex(questions, ngram=ngram)
    count = 0

    def counted() -> Iterator[tuple[str, str]]:
        nonlocal count
        for text in texts:
            count += 1
            yield text

    exact: Counter[str] = Counter()
    partial: Counter[str] = Counter()
    closest: dict[str, list[Overlap]] = {}
    texts_found, last = 0, None
    for overlap in index.search(counted(), threshold=threshold):
        texts_found += overlap.text != last
        last = overlap.text
        (exact if overlap.exact else partial)[overlap.question] += 1
        kept = closest.setdefault(overlap.question, [])
        kept.append(overlap)
        kept.sort(key=lambda each: (not each.exact, -each.shared))
        del kept[keep:]
    found = tuple(
        QuestionOverlap(question=name, exact=exact[name], partial=partial[name], closest=tuple(closest[name]))
        for name in dict.fromkeys(index.locations)
        if name in closest
    )
    return OverlapReport(questions=len(index.locations), texts=count, texts_found=texts_found, found=found)


class QuestionIndex:
    """Evaluation questions by the hashes of their n-grams.

    A question of fewer than ``ngram`` tokens is one n-gram if it has at least ``LONG_ENOUGH``; otherwise only an identical
    training text counts. N-grams shared by ``COMMON`` questions and more than one in a hundred belong to a template, and are not
    counted.
    """

    def __init__(self, questions: Iterable[tuple[str, str]], *, ngram: int = 13) -> None:
        if ngram < 1:
            raise ValueError(f"ngram is {ngram}; it must be at least 1")
        self.ngram = ngram
        self.locations: list[str] = []
        self._vocabulary: dict[str, int] = {}  # 0 stands for words in no question and for the ends of texts
        tokens: list[Any] = []
        for location, text in questions:
            self.locations.append(location)
            known = self._vocabulary
            tokens.append(np.array([known.setdefault(word, len(known) + 1) for word in normalize_text(text)], dtype=np.int64))
        self._keys = np.random.Generator(np.random.PCG64(0)).integers(1, 1 << 63, len(self._vocabulary) + 1, dtype=np.uint64)
        self._index_whole(tokens)
        self._index_ngrams(tokens)

    def search(self, texts: Iterable[tuple[str, str]], *, threshold: float = 0.5) -> Iterator[Overlap]:
        """Yield every pair of a question and a training text that are identical, or share ``threshold`` of the question's
        n-grams.

        Pairs of the same text are yielded consecutively.
        """
        get = self._vocabulary.get
        locations: list[str] = []
        ends: list[int] = []
        tokens: list[int] = []
        for location, text in texts:
            locations.append(location)
            tokens += [get(word, 0) for word in normalize_text(text)]
            ends.append(len(tokens))
            tokens.append(0)
            if len(tokens) >= BATCH_TOKENS:
                yield from self._search_batch(locations, ends, tokens, threshold)
                locations, ends, tokens = [], [], []
        if locations:
            yield from self._search_batch(locations, ends, tokens, threshold)

    def _index_whole(self, tokens: Sequence[Any]) -> None:
        self._whole: dict[tuple[int, int], list[int]] = {}
        for question, each in enumerate(tokens):
            if len(each):
                value = int(_Hashes(self._keys[each]).windows(len(each))[0])
                self._whole.setdefault((value, len(each)), []).append(question)

    def _index_ngrams(self, tokens: Sequence[Any]) -> None:
        windows: dict[int, list[tuple[Any, int]]] = {}  # by length: the hashes of each question
        for question, each in enumerate(tokens):
            length = min(len(each), self.ngram)
            if length >= min(LONG_ENOUGH, self.ngram):
                windows.setdefault(length, []).append((np.unique(_Hashes(self._keys[each]).windows(length)), question))
        self._tables: dict[int, _NgramTable] = {}
        self._totals = np.zeros(len(tokens), dtype=np.int64)  # n-grams of each question
        limit = max(COMMON, len(tokens) // 100)
        for length, found in sorted(windows.items()):
            table = _NgramTable(found, limit)
            self._totals += np.bincount(table.owners, minlength=len(tokens))
            self._tables[length] = table

    def _search_batch(self, locations: list[str], ends: list[int], tokens: list[int], threshold: float) -> Iterator[Overlap]:
        ids = np.array(tokens, dtype=np.int64)
        stops = np.array(ends, dtype=np.int64)
        starts = np.concatenate([[0], stops[:-1] + 1])
        hashes = _Hashes(self._keys[ids])
        shared = self._count_shared(hashes, ids, stops)
        exact = self._find_exact(hashes, ids, starts, stops)
        for text, question in sorted(shared.keys() | exact):
            share = shared.get((text, question), 0) / max(int(self._totals[question]), 1)
            if (text, question) in exact or share >= threshold:
                yield Overlap(
                    question=self.locations[question],
                    text=locations[text],
                    exact=(text, question) in exact,
                    shared=1.0 if (text, question) in exact else share,
                )

    def _count_shared(self, hashes: _Hashes, ids: Any, stops: Any) -> dict[tuple[int, int], int]:
        """Return how many different n-grams each text of a batch shares with each question."""
        unknown = np.concatenate([[0], np.cumsum(ids == 0)])
        pairs = []
        for length, table in self._tables.items():
            if len(ids) < length:
                continue
            values = hashes.windows(length)
            places = table.find_candidates(values)
            places = places[unknown[places + length] == unknown[places]]  # windows in which every word occurs in some question
            rows, places = table.look_up(values[places], places)
            texts = np.searchsorted(stops, places, side="right")
            pairs.append(table.pair_with_owners(texts, rows))
        if not pairs or not sum(len(each) for each in pairs):
            return {}
        found, counts = np.unique(np.concatenate(pairs), axis=0, return_counts=True)
        return {(text, question): count for (text, question), count in zip(found.tolist(), counts.tolist(), strict=True)}

    def _find_exact(self, hashes: _Hashes, ids: Any, starts: Any, stops: Any) -> set[tuple[int, int]]:
        found = zip(hashes.between(starts, stops).tolist(), (stops - starts).tolist(), strict=True)
        return {
            (text, question)
            for text, key in enumerate(found)
            for question in self._whole.get(key, ())
            if (ids[starts[text] : stops[text]] != 0).all()
        }


class _NgramTable:
    """The n-grams of one length, sorted by hash, with the questions that contain them."""

    def __init__(self, found: Sequence[tuple[Any, int]], limit: int) -> None:
        hashes = np.concatenate([values for values, _ in found])
        owners = np.concatenate([np.full(len(values), question, dtype=np.int64) for values, question in found])
        order = np.argsort(hashes, kind="stable")
        hashes, owners = hashes[order], owners[order]
        self.values, counts = np.unique(hashes, return_counts=True)
        kept = counts <= limit
        self.owners = owners[np.repeat(kept, counts)]
        self.values, counts = self.values[kept], counts[kept]
        self.first = np.concatenate([[0], np.cumsum(counts)])
        bits = (16 * len(self.values) + 1).bit_length()
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, dtype=bool)  # rules out nearly every window without a search
        self._filter[self.values >> self._shift] = True

    def find_candidates(self, values: Any) -> Any:
        """Return the positions of hashes that may be in the table."""
        return np.flatnonzero(self._filter[values >> self._shift])

    def look_up(self, values: Any, places: Any) -> tuple[Any, Any]:
        """Return the table rows with these hashes, and the positions of the hashes that were found."""
        if not len(self.values):
            return np.zeros(0, dtype=np.int64), places[:0]
        rows = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        hits = self.values[rows] == values
        return rows[hits], places[hits]

    def pair_with_owners(self, texts: Any, rows: Any) -> Any:
        """Return the pairs (text, question), one for each distinct n-gram of a text and each question that contains it."""
        unique = np.unique(np.stack([texts, rows], axis=1), axis=0) if len(rows) else np.zeros((0, 2), dtype=np.int64)
        counts = self.first[unique[:, 1] + 1] - self.first[unique[:, 1]]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        owners = self.owners[np.repeat(self.first[unique[:, 1]], counts) + offsets]
        return np.stack([np.repeat(unique[:, 0], counts), owners], axis=1)


class _Hashes:
    """64-bit rolling hashes of windows of keys: sums of keys times powers of a base, as differences of one running sum."""

    def __init__(self, keys: Any) -> None:
        powers, self._inverse = _powers(len(keys) + 1)
        self._sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(keys * powers[: len(keys)], dtype=np.uint64)])

    def windows(self, length: int) -> Any:
        """Return the hash of each window of ``length`` keys."""
        return _mix((self._sums[length:] - self._sums[:-length]) * self._inverse[: len(self._sums) - length])

    def between(self, starts: Any, stops: Any) -> Any:
        return _mix((self._sums[stops] - self._sums[starts]) * self._inverse[starts])


@cache
def _make_powers(size: int) -> tuple[Any, Any]:
    factors = np.full((2, size), 1, dtype=np.uint64)
    factors[0, 1:], factors[1, 1:] = _BASE, pow(_BASE, -1, 1 << 64)
    powers, inverse = np.cumprod(factors, axis=1, dtype=np.uint64)
    return powers, inverse


def _powers(count: int) -> tuple[Any, Any]:
    """Return at least ``count`` powers of the base and of its inverse, modulo 2 to the 64."""
    return _make_powers(1 << count.bit_length())


def _mix(values: Any) -> Any:
    """Spread differences over all bits, of which the filter reads the highest."""
    values = (values ^ (values >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(29))
