"""The order of a run's events as a file, ``events.jsonl``: one line for each, with the tick of the engine's clock.

    {"tick": 0, "event": "begin", "group": 3, "version": 0}
    {"tick": 17, "event": "answer", "group": 3, "sample": 1, "number": 2}
    {"tick": 40, "event": "end", "group": 3}
    {"tick": 52, "event": "publish", "version": 1}

Answers are what a replay needs (``ReplayedTimes``); the others are checked against it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from strop.rollouts.repeat.answer_times import GROUP_REWARDS, AnswerId, ReplayedTimes, ReplayEnded

EVENTS_FILE = "events.jsonl"


class EventFileError(ValueError):
    """A file of events cannot be read. The message names the line."""


class EventLog:
    """Writes events to a file, or nowhere; compares them with those of a recorded run if there is one."""

    def __init__(self, path: Path | None = None, recorded: RecordedEvents | None = None) -> None:
        """Create a log. Nothing is written before ``start``."""
        self._path, self._recorded = path, recorded
        self._file: TextIO | None = None

    def start(self, position: int = 0) -> None:
        """Open the file and drop what is behind ``position``, which a resumed run makes again. Raises EventFileError, OSError."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < position:
            raise EventFileError(
                f"{self._path} has {size} bytes, and had {position} when the checkpoint was saved: the beginning of the record is lost. "
                "Put the file back, or set record_events to false"
            )
        self._file = self._path.open("r+" if size else "w", encoding="utf-8")
        self._file.truncate(position)
        self._file.seek(position)

    def begin(self, tick: int, group: int, version: int) -> None:
        self._write(tick, "begin", group=group, version=version)

    def end(self, tick: int, group: int) -> None:
        self._write(tick, "end", group=group)

    def answer(self, tick: int, answer: AnswerId) -> None:
        sample = "rewards" if answer.part == GROUP_REWARDS else answer.part
        self._write(tick, "answer", group=answer.group, sample=sample, number=answer.number)

    def publish(self, tick: int, version: int) -> None:
        """Write that the weights of ``version`` are in the engine. Raises ReplayEnded if the recorded run had them at another tick."""
        if self._recorded is not None and (known := self._recorded.publishes.get(version, tick)) != tick:
            raise ReplayEnded(
                f"version {version} is published at tick {tick}, and at tick {known} in {self._recorded.source}: the two runs differ in "
                "more than the order of their events, for instance in the configuration, the data, an environment that draws at random, "
                "or the machine. Replay the run that was recorded, or set replay_events to null"
            )
        self._write(tick, "publish", version=version)
        if self._file is not None:
            self._file.flush()

    def _write(self, tick: int, event: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"tick": tick, "event": event, **values}) + "\n")

    def position(self) -> int:
        """Return the length of what is written (bytes), for ``start``."""
        if self._file is None:
            return 0
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, kw_only=True)
class RecordedEvents:
    """The events of a run that are replayed."""

    answers: dict[AnswerId, int]  # the tick from which each counted
    publishes: dict[int, int]  # version -> tick
    source: str

    @property
    def times(self) -> ReplayedTimes:
        return ReplayedTimes(self.answers, self.source)


def read_events(path: Path) -> RecordedEvents:
    """Read the events of a run; a last line that a kill cut off is left out. Raises EventFileError, OSError."""
    recorded = RecordedEvents(answers={}, publishes={}, source=str(path))
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was cut off
        try:
            _read_event(json.loads(line), recorded)
        except (ValueError, KeyError, TypeError) as error:
            raise EventFileError(f"line {number} of {path} is no event: {line[:80]!r}; record the run again") from error
    if not recorded.answers:
        raise EventFileError(f"{path} holds no events; it is written as {EVENTS_FILE} by a run with record_events=true")
    return recorded


def _read_event(line: Any, recorded: RecordedEvents) -> None:
    if line["event"] == "answer":
        part = GROUP_REWARDS if line["sample"] == "rewards" else line["sample"]
        recorded.answers[AnswerId(line["group"], part, line["number"])] = int(line["tick"])
    elif line["event"] == "publish":
        recorded.publishes[line["version"]] = int(line["tick"])
