"""The index of a run's rollouts: which steps are stored, and the scalars of every rollout, for filters and sorting.

Listing the steps reads only file names. Scalars are read a segment at a time, newest first, from existing index files where
these are up to date. Each rollout takes about 50 bytes of memory.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from strop.extensions.view.rollout_index.arrow_numbers import release_memory
from strop.extensions.view.rollout_index.index_segment import (
    IndexSegment,
    StepFile,
    read_segment,
    segment_of,
    write_segment,
)
from strop.monitoring.rollout_store.rollout_store import ROLLOUTS_FOLDER

log = logging.getLogger(__name__)

_FILE_PATTERN = re.compile(r"step_(\d{1,9})\.(parquet|jsonl)")
_FLAGS_PATTERN = re.compile(r"step_(\d{1,9})_flags\.jsonl")
SETTLED_SECONDS = 2.0  # age after which a folder's modification time reliably shows changes
WRITE_SECONDS = 20.0  # between two writes of a segment to which a live run adds


class RolloutIndex:
    """The index of one run. Safe to use from several threads."""

    def __init__(self, log_dir: Path, *, write: bool = True) -> None:
        """``write``: store the index next to the rollouts, if the folder is writable."""
        self.folder = Path(log_dir) / ROLLOUTS_FOLDER
        self.version = 0  # grows when the segments change
        self._write = write
        self._lock = threading.RLock()
        self._files: dict[int, StepFile] = {}
        self._flagged: frozenset[int] = frozenset()
        self._listed: tuple[int, float] = (-1, 0.0)  # the folder's time (ns), and when it was read
        self._segments: dict[int, IndexSegment] = {}
        self._stored: dict[int, IndexSegment] = {}  # as in their files
        self._written: dict[int, float] = {}

    def steps(self) -> list[int]:
        """Return the stored steps, in order."""
        with self._lock:
            self._list_files()
            return sorted(self._files)

    def file(self, step: int) -> Path | None:
        with self._lock:
            self._list_files()
            found = self._files.get(step)
            return None if found is None else found.path

    def flagged_steps(self) -> frozenset[int]:
        """Return the steps that have a file of flags."""
        with self._lock:
            self._list_files()
            return self._flagged

    def unreadable(self) -> Mapping[int, str]:
        with self._lock:
            return {step: why for segment in self._segments.values() for step, why in segment.unreadable.items()}

    def progress(self) -> tuple[int, int]:
        """Return the numbers of indexed and of stored steps."""
        with self._lock:
            self._list_files()
            return sum(self._is_indexed(file) for file in self._files.values()), len(self._files)

    def segments(self) -> tuple[IndexSegment, ...]:
        """Return the indexed segments, in order of steps. Steps that are not indexed yet are missing."""
        with self._lock:
            return tuple(self._segments[number] for number in sorted(self._segments))

    def ensure(self, steps: Iterable[int]) -> None:
        """Index these steps now, if they are stored and not indexed."""
        with self._lock:
            self._list_files()
            missing = [step for step in steps if step in self._files and not self._is_indexed(self._files[step])]
        for number in sorted({segment_of(step) for step in missing}):
            self._update(number, {step for step in missing if segment_of(step) == number})

    def update(self, *, seconds: float | None = None) -> bool:
        """Update the index, newest steps first, for about ``seconds``. Return whether it is up to date."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            self._list_files()
            numbers = sorted({segment_of(step) for step in self._files} | set(self._segments), reverse=True)
        for number in numbers:
            self._update(number)
            if deadline is not None and time.monotonic() > deadline:
                break
        release_memory()
        done, total = self.progress()
        return done == total

    def _is_indexed(self, file: StepFile) -> bool:
        segment = self._segments.get(segment_of(file.step))
        return segment is not None and segment.stamps.get(file.step) == file.stamp

    def _update(self, number: int, only: set[int] | None = None) -> None:
        """Update a segment: all of it, or only some steps in addition to those it has."""
        with self._lock:
            files = [file for step, file in sorted(self._files.items()) if segment_of(step) == number]
            before = self._segments.get(number)
        if before is None:
            current = self._stored[number] = read_segment(self.folder, number)
        else:
            current = before
        if only is not None:
            files = [file for file in files if file.step in only or file.step in current.stamps]
        after = current.update(files)
        if after is not before:
            with self._lock:
                self.version += 1
                if after.stamps:
                    self._segments[number] = after
                else:
                    self._segments.pop(number, None)
        if only is None and after is not self._stored.get(number):
            self._store(after)

    def _store(self, segment: IndexSegment) -> None:
        now = time.monotonic()
        if not self._write or now - self._written.get(segment.number, -WRITE_SECONDS) < WRITE_SECONDS:
            return
        self._written[segment.number] = now
        try:
            write_segment(self.folder, segment)
            self._stored[segment.number] = segment
        except OSError as error:
            self._write = False
            log.info("the index of %s stays in memory: it cannot be written (%s)", self.folder, error)

    def _list_files(self) -> None:
        """List the files of the folder, if it changed since they were listed."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except OSError:
            self._files, self._flagged, self._listed = {}, frozenset(), (-1, 0.0)
            if self._segments:
                self._segments = {}
                self.version += 1
            return
        before, listed = self._listed
        if changed == before and listed - changed / 1e9 > SETTLED_SECONDS:
            return
        now = time.time()
        if changed == before and now - listed < 1.0:
            return
        self._files, self._flagged = _list_step_files(self.folder)
        self._listed = (changed, now)
        for number, segment in list(self._segments.items()):
            kept = segment.keep(self._files)
            if kept is not segment:
                self._segments[number] = kept
                self.version += 1


def _list_step_files(folder: Path) -> tuple[dict[int, StepFile], frozenset[int]]:
    files: dict[int, StepFile] = {}
    flagged = set()
    try:
        entries: Sequence[os.DirEntry[str]] = list(os.scandir(folder))
    except OSError:
        entries = ()
    for entry in entries:
        if match := _FILE_PATTERN.fullmatch(entry.name):
            try:
                found = entry.stat()
            except OSError:  # removed meanwhile
                continue
            step = int(match[1])
            files[step] = StepFile(step, Path(entry.path), found.st_size, found.st_mtime_ns)
        elif match := _FLAGS_PATTERN.fullmatch(entry.name):
            flagged.add(int(match[1]))
    return files, frozenset(flagged)
