"""The state of a run in a checkpoint, and the interface that the training loop saves through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from strop.rollouts.stream import StreamState
from strop.stopping import EarlyStop


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run after ``step``, apart from its learners."""

    step: int
    stream: StreamState
    logged: Mapping[str, float]  # the step's metrics, for a run that was killed after saving the step but before logging it
    early_stop: EarlyStop | None = None
    listeners: Mapping[str, Any] = field(default_factory=dict)  # the states of listeners that have one, by name

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Read a checkpoint, including those of earlier versions, which have the state of only one listener."""
        monitor = saved.pop("monitor", None)
        vars(self).update({"listeners": {} if monitor is None else {"hacking": monitor}, **saved})


class Saveable(Protocol):
    """A learner, or a copy of its state."""

    def save(self, folder: Path, *, optimizer: bool = True) -> None: ...


class Restorable(Saveable, Protocol):
    """A further component that is saved with a run and restored in place."""

    def load(self, folder: Path) -> None: ...


@runtime_checkable
class Stageable(Protocol):
    """A learner that can copy its state, and continue training while the copy is written."""

    def stage(self, *, optimizer: bool = True) -> Saveable:
        """Return a copy of the current state. Its ``save`` may be called in another thread."""
        ...


class Checkpointer(Protocol):
    """Saves the state of a run with its learners and other stateful components."""

    def save(self, state: RunState, learners: Mapping[str, Restorable]) -> Path:
        """Save atomically and return the checkpoint's folder.

        If the checkpoint is written in the background, it is only complete when ``finish`` or the next ``save`` returns.
        """
        ...

    def finish(self) -> None:
        """Wait for a save in the background. Raises its error."""
        ...
