"""The position of data that does not follow from the task number: a partly read stream, or a curriculum.

Such data is ``Resumable``. Its state is JSON, and is saved in ``data/state.json`` of a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

STATE_FILE = "state.json"


class Resumable(Protocol):
    """Data with a saved position."""

    def state(self) -> Mapping[str, Any]:
        """Return the state as JSON values: enough to reproduce the unfinished tasks and all later ones."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Raises DataError for the state of other data."""
        ...


@dataclass(frozen=True)
class SavedDataState:
    """A state on its way to a checkpoint, perhaps in another thread."""

    text: str

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        folder.mkdir(parents=True)
        (folder / STATE_FILE).write_text(self.text, encoding="utf-8")


@dataclass(frozen=True)
class DataState:
    """Saves and restores the position of data with a checkpoint."""

    data: Resumable

    def stage(self, *, optimizer: bool = True) -> SavedDataState:
        return SavedDataState(json.dumps(self.data.state()))

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.stage().save(folder)

    def load(self, folder: Path) -> None:
        """Restore the state of a checkpoint. Without one, the checkpoint predates saved positions, and the data starts over."""
        file = folder / STATE_FILE
        if file.exists():
            self.data.load_state(json.loads(file.read_text(encoding="utf-8")))
        else:
            log.warning("the checkpoint has no position of the data; streams and curricula start from their beginning")
