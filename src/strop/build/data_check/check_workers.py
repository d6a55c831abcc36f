"""Chunks of rows, looked at in worker processes. Results come back in order."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from strop.build.data_check.checked_row import CheckedRow
from strop.build.data_check.row_checks import RowChecker, RowsChecked
from strop.data.sources.records import DataError

CHUNK = 512  # rows
FEW_ROWS = 4096  # below, starting processes takes longer than they save
MOST_WORKERS = 16
_checker: RowChecker | None = None


def check_rows(checker: RowChecker, rows: Iterable[CheckedRow], count: int | None, workers: int | None) -> Iterator[RowsChecked]:
    """Yield what is found of each chunk of rows. ``workers``: processes; None: as many as there are processors, if they pay."""
    chunks = _cut(rows)
    if workers is None:
        workers = 0 if count is not None and count < FEW_ROWS else min(_count_processors(), MOST_WORKERS)
    if workers < 2 or not _can_travel(checker):
        yield from map(checker.check, chunks)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads of libraries may hang
    previous = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(pickle.dumps(checker),))
    waiting: deque[Future[RowsChecked]] = deque()
    try:
        for chunk in chunks:
            waiting.append(pool.submit(_check, chunk))
            if len(waiting) >= 3 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process of the check ended, most likely for lack of memory; look at fewer rows (--rows) or use fewer processes "
            "(--workers 1)"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if previous is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = previous


def _cut(rows: Iterable[CheckedRow]) -> Iterator[list[CheckedRow]]:
    remaining = iter(rows)
    while chunk := list(islice(remaining, CHUNK)):
        yield chunk


def _count_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _can_travel(checker: Any) -> bool:
    """Whether other processes can be handed the tokenizer; one with code of its own may not."""
    try:
        pickle.loads(pickle.dumps(checker))
    except Exception:
        return False
    return True


def _start(checker: bytes) -> None:
    global _checker
    _checker = pickle.loads(checker)


def _check(rows: Sequence[CheckedRow]) -> RowsChecked:
    assert _checker is not None
    return _checker.check(rows)
