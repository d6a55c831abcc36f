"""The state of an engine's clock in a checkpoint: its tick, and what the unfinished groups have sampled so far."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.rollouts.repeat.engine_clock import EngineClock
from strop.rollouts.repeat.journal import GroupJournal

CLOCK_FILE = "clock.json"


@dataclass(frozen=True)
class SavedClock:
    """A state as it is written to a checkpoint, perhaps in another thread."""

    text: str

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        folder.mkdir(parents=True)
        (folder / CLOCK_FILE).write_text(self.text, encoding="utf-8")


class ClockState:
    """Saves and restores a clock with a checkpoint. Between the steps of a run, no request of it is in the engine."""

    def __init__(self) -> None:
        """Create the state of a clock that is not there yet: engines are built after a checkpoint is loaded."""
        self.clock: EngineClock | None = None
        self._restored: dict[str, Any] = {}

    @property
    def versions(self) -> Mapping[int, int]:
        """The versions of the weights with which the restored unfinished groups began."""
        return {int(index): journal["version"] for index, journal in self._restored.get("groups", {}).items()}

    def forget_groups(self) -> None:
        """Forget what unfinished groups have sampled: they begin anew, with other settings."""
        self._restored = {**self._restored, "groups": {}}

    def start(self, clock: EngineClock) -> None:
        """Set the clock to the restored state, and begin to write its events. Raises EventFileError, OSError."""
        self.clock = clock
        clock.now = self._restored.get("tick", 0)
        clock.published = self._restored.get("published", -1)
        clock.restored = {
            int(index): GroupJournal.from_json(journal) for index, journal in self._restored.get("groups", {}).items()
        }
        clock.log.start(self._restored.get("events", 0))
        clock.attach()

    def stage(self, *, optimizer: bool = True) -> SavedClock:
        assert self.clock is not None
        groups = {**self.clock.restored, **self.clock.journals}
        return SavedClock(
            json.dumps(
                {
                    "tick": self.clock.now,
                    "published": self.clock.published,
                    "events": self.clock.log.position(),
                    "groups": {str(index): journal.to_json() for index, journal in groups.items()},
                }
            )
        )

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.stage().save(folder)

    def load(self, folder: Path) -> None:
        """Read the state. A checkpoint of a run without a clock has none: its unfinished groups begin again."""
        if (folder / CLOCK_FILE).exists():
            self._restored = json.loads((folder / CLOCK_FILE).read_text(encoding="utf-8"))
