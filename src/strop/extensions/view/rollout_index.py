"""The index of a run's rollouts: which steps are stored, and the scalars of every rollout, for filters and sorting.

Listing the steps reads only file names. Scalars are read a segment at a time, newest first, from existing index files where
these are up to date. Each rollout takes about 60 bytes of memory, and 8 for each reward by name.

A segment has the scalars of up to a hundred steps, in memory and in a small Arrow file (``rollouts/index/steps_000100.arrow``), which may
be removed at any time. It records the size and time of each source file, so that a rewritten step is read again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from strop.extensions.view.step_scalars import (
    NUMBERS,
    REWARDS,
    WORDS,
    StepScalars,
    from_numbers,
    join_scalars,
    read_step_scalars,
    release_memory,
    take_scalars,
    to_numbers,
)
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.rollout_store import ROLLOUTS_FOLDER, RolloutStore, decode_rows
from strop.monitoring.rollout_store.stored_files import DamagedRollouts, bound_texts, naming_damage, open_parquet

INDEX_FOLDER = "index"
STEPS_IN_A_SEGMENT = 100
VERSION = 2  # of the files; files of another version are rebuilt


@dataclass(frozen=True)
class StepFile:
    """A step's file at the time it was listed."""

    step: int
    path: Path
    size: int
    changed: int  # nanoseconds

    @property
    def stamp(self) -> tuple[int, int]:
        return self.size, self.changed


@dataclass(frozen=True)
class IndexSegment:
    """The scalars of the steps that have a stamp here. A step with an unreadable file has a reason instead of rows."""

    number: int  # its first step is number * STEPS_IN_A_SEGMENT
    stamps: Mapping[int, tuple[int, int]]
    scalars: StepScalars
    unreadable: Mapping[int, str]

    def update(self, files: Sequence[StepFile]) -> IndexSegment:
        """Return the segment for these files. Unchanged files are not read again."""
        wanted = {file.step: file.stamp for file in files}
        same = {step for step, stamp in self.stamps.items() if wanted.get(step) == stamp}
        if same == set(self.stamps) == set(wanted):
            return self
        parts, unreadable = [], {step: reason for step, reason in self.unreadable.items() if step in same}
        if len(same) < len(self.stamps):
            parts.append(take_scalars(self.scalars, np.isin(self.scalars.numbers["step"], list(same))))
        else:
            parts.append(self.scalars)
        for file in files:
            if file.step not in same:
                try:
                    parts.append(read_step_scalars(file.path, file.step))
                except DamagedRollouts as error:
                    unreadable[file.step] = error.brief
                except OSError as error:  # removed in the meantime, or not readable by us
                    unreadable[file.step] = f"{file.path.name} cannot be read: {error.strerror or error}"
        return IndexSegment(self.number, wanted, _sort_by_step(join_scalars(parts)), unreadable)

    def keep(self, files: Mapping[int, StepFile]) -> IndexSegment:
        """Return the segment without steps whose files are gone or were rewritten."""
        same = {step for step, stamp in self.stamps.items() if step in files and files[step].stamp == stamp}
        return self if len(same) == len(self.stamps) else self.update([files[step] for step in sorted(same)])


def empty_segment(number: int) -> IndexSegment:
    return IndexSegment(number, {}, join_scalars(()), {})


def segment_of(step: int) -> int:
    return step // STEPS_IN_A_SEGMENT


def _sort_by_step(scalars: StepScalars) -> StepScalars:
    steps = scalars.numbers["step"]
    if bool(np.all(steps[1:] >= steps[:-1])):
        return scalars
    return take_scalars(scalars, np.argsort(steps, kind="stable"))


def segment_path(folder: Path, number: int) -> Path:
    return folder / INDEX_FOLDER / f"steps_{number * STEPS_IN_A_SEGMENT:06d}.arrow"


def write_segment(folder: Path, segment: IndexSegment) -> None:
    """Write a segment next to the rollouts of ``folder``, atomically. Raises OSError."""
    import pyarrow as pa

    scalars = segment.scalars
    columns = {**scalars.numbers, **{f"{name}_code": scalars.codes[name] for name in WORDS}}
    about = {
        "version": VERSION,
        "stamps": {str(step): stamp for step, stamp in segment.stamps.items()},
        "unreadable": {str(step): reason for step, reason in segment.unreadable.items()},
        "words": scalars.words,
    }
    arrays = {name: from_numbers(column) for name, column in columns.items()}
    table = pa.Table.from_arrays(list(arrays.values()), names=list(arrays)).replace_schema_metadata({"strop": json.dumps(about)})
    path = segment_path(folder, segment.number)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(str(temporary), table.schema, options=options) as writer:
            writer.write_table(table)
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_segment(folder: Path, number: int) -> IndexSegment:
    """Read a segment; an empty one if there is no file, or one of an unsupported version."""
    import pyarrow as pa

    try:
        with pa.OSFile(str(segment_path(folder, number))) as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        about: Any = json.loads(table.schema.metadata[b"strop"])
        if about["version"] != VERSION:
            return empty_segment(number)
        kinds = {**NUMBERS, **{name: np.float64 for name in table.column_names if name.startswith(REWARDS)}}
        numbers = {name: to_numbers(table[name], kind) for name, kind in kinds.items()}
        codes = {name: to_numbers(table[f"{name}_code"], np.int32) for name in WORDS}
        words = {name: tuple(map(str, about["words"][name])) for name in WORDS}
        for name in WORDS:
            if len(codes[name]) and not (codes[name].min() >= 0 and codes[name].max() < len(words[name])):
                return empty_segment(number)
        stamps = {int(step): (int(size), int(changed)) for step, (size, changed) in about["stamps"].items()}
        unreadable = {int(step): str(reason) for step, reason in about["unreadable"].items()}
        return IndexSegment(number, stamps, StepScalars(numbers, codes, words), unreadable)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return empty_segment(number)


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


ROWS_AT_ONCE = 64


def read_rows(path: Path, step: int, rows: Sequence[int]) -> list[RolloutRecord]:
    """Read rollouts by their places in the file, in order of place. Raises OSError, DamagedRollouts."""
    if path.suffix != ".parquet":
        records = RolloutStore(path.parents[1], "none").read(step)
        return [records[row] for row in sorted(rows) if row < len(records)]
    with naming_damage(path):
        return decode_rows(row for _, row in _iter_rows(path, rows, None))


def read_values(path: Path, rows: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Read some columns of rollouts, by their places in the file; columns that the file lacks are missing."""
    if path.suffix != ".parquet":
        wanted = set(rows)
        with path.open(encoding="utf-8") as file:
            lines = {place: json.loads(line) for place, line in enumerate(file) if place in wanted}
        return {place: {name: line[name] for name in columns if name in line} for place, line in lines.items()}
    return dict(_iter_rows(path, rows, columns))


def iter_texts(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Yield the columns of a step as Arrow tables of consecutive rows, each with the place of its first row."""
    import pyarrow as pa

    if path.suffix != ".parquet":
        with path.open(encoding="utf-8") as lines:
            place = 0
            while chunk := [json.loads(line) for line in islice(lines, ROWS_AT_ONCE)]:
                yield place, pa.table({name: pa.array([row.get(name) for row in chunk], pa.string()) for name in columns})
                place += len(chunk)
        return
    with open_parquet(path) as file:
        place = 0
        present = [name for name in columns if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=4096, columns=present, use_threads=False):
            yield place, pa.Table.from_batches([batch])
            place += batch.num_rows


def _iter_rows(path: Path, rows: Sequence[int], columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    wanted = sorted(set(rows))
    with open_parquet(path) as file:
        names = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        first = characters = 0
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=names, use_threads=False):
            here = [row - first for row in wanted if first <= row < first + batch.num_rows]
            for row in here:
                values = batch.slice(row, 1).to_pylist()[0]
                characters = bound_texts(path, values, characters)
                yield first + row, values
            first += batch.num_rows
            if not wanted or first > wanted[-1]:
                return
