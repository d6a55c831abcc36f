"""Holding rows out for validation, by a hash of what they ask, so that no question stands on both sides.

A random split by row number leaks where a question occurs more than once, as it does in most published math sets.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from strop.data.errors import DataError


def stable_hash(text: str, seed: int = 0) -> int:
    """64 bits that depend on (text, seed) alone, in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{text}".encode(), digest_size=8).digest(), "big")


def held_out(text: str, fraction: float, seed: int = 0) -> bool:
    """Whether ``text`` falls into the ``fraction`` of all texts that is kept for validation."""
    return stable_hash(text, seed) < fraction * 2**64


def partition(questions: Iterable[str], size: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers for training and for validation: ``size`` below 1 is a fraction of the rows, from 1 on a number of rows."""
    rows = list(questions)
    counts = Counter(rows)
    wanted = round(size * len(rows)) if size < 1 else int(size)
    if not 0 < wanted < len(rows):
        raise DataError(
            f"split_validation_size {size:g} of {len(rows)} rows keeps {wanted} for validation; both parts need at least one row"
        )
    chosen: set[str] = set()
    kept = 0
    for question in sorted(counts, key=lambda question: stable_hash(question, seed)):
        if kept >= wanted:
            break
        chosen.add(question)
        kept += counts[question]
    if len(chosen) == len(counts):
        raise DataError(f"{len(rows)} rows ask {len(counts)} different questions: too few for split_validation_size {size:g}")
    validation = [index for index, question in enumerate(rows) if question in chosen]
    train = [index for index, question in enumerate(rows) if question not in chosen]
    return train, validation
