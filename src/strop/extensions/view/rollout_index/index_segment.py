"""A segment of the rollout index: the scalars of up to a hundred steps, in memory and in a small Arrow file.

    <log folder>/rollouts/index/steps_000100.arrow        steps 100 to 199

For each of its steps, the file records the size and time of the source file, so that a rewritten step is read again. It can be
removed at any time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strop.extensions.view.rollout_index.arrow_numbers import from_numbers, to_numbers
from strop.extensions.view.rollout_index.step_scalars import (
    NUMBERS,
    WORDS,
    StepScalars,
    join_scalars,
    read_step_scalars,
    take_scalars,
)
from strop.monitoring.rollout_store.damaged_rollouts import DamagedRollouts

INDEX_FOLDER = "index"
STEPS_IN_A_SEGMENT = 100
VERSION = 1  # of the files; files of another version are rebuilt


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
        numbers = {name: to_numbers(table[name], kind) for name, kind in NUMBERS.items()}
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
