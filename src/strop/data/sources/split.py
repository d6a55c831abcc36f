"""Hold out rows for validation by a hash of their question, so that no question is in both parts.

A random split by row leaks if questions occur more than once, as in most published math datasets.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from strop.data.sources.records import DataError


def stable_hash(text: str, seed: int = 0) -> int:
    """Return a 64-bit hash of (text, seed) that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest(), "big")


def is_held_out(text: str, fraction: float, seed: int = 0) -> bool:
    """Return whether ``text`` is in the ``fraction`` of all texts that is held out for validation."""
    return stable_hash(text, seed) < fraction * 2**64


class SplitError(DataError):
    """The rows cannot be split into two non-empty parts."""


def split_by_question(questions: Iterable[str], size: float, seed: int) -> tuple[list[int], list[int]]:
    """Return row indices for training and for validation. ``size`` is a fraction of the rows below 1, a number of rows from 1 on."""
    rows = list(questions)
    counts = Counter(rows)
    target = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < target < len(rows):
        raise SplitError(
            f"split_validation_size {size:g} of {len(rows)} rows holds {target} out for validation; both parts need at least one row"
        )
    held_out: set[str] = set()
    num_held_out = 0
    for question in sorted(counts, key=lambda question: stable_hash(question, seed)):
        if num_held_out >= target:
            break
        held_out.add(question)
        num_held_out += counts[question]
    if len(held_out) == len(counts):
        raise SplitError(f"{len(rows)} rows have {len(counts)} distinct questions, too few for split_validation_size {size:g}")
    validation = [index for index, question in enumerate(rows) if question in held_out]
    train = [index for index, question in enumerate(rows) if question not in held_out]
    return train, validation
