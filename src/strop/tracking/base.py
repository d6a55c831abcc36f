"""The seam to trackers, and the fan-out that keeps a broken one from stopping a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Something that is told how a run goes.

    The order of calls is: ``resume`` at most once, then any number of ``log``, ``note`` and ``progress``, then ``close``.
    Steps come in ascending order. Step 0 is the model as it was before training: its metrics are those of a
    validation. ``log`` for the same step again adds to what was said about it, and replaces what has the same name.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """``step`` is over; this is what was measured. When this returns, a tracker that keeps files has it on disk."""

    def note(self, text: str) -> None:
        """A line for a person: a checkpoint was saved, a fallback was taken, training is over."""

    def progress(self, text: str) -> None:
        """What the run is doing now, in a few words; replaces what was said before, and is never recorded."""

    def resume(self, step: int) -> None:
        """The run continues after ``step``: whatever is recorded of later steps must go, for they will run again.

        -1 says that it starts from nothing, and takes over the log folder.
        """

    def close(self) -> None:
        """No more will come. Closing twice is harmless."""


class Silent:
    """A tracker that does nothing: what to use for none, and what to inherit for the calls that do not concern you."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def progress(self, text: str) -> None:
        pass

    def resume(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Trackers:
    """Many trackers as one. One that raises is warned about once and not called again: the run outlives its reporters."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._working = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell(lambda tracker: tracker.log(step, metrics))

    def note(self, text: str) -> None:
        self._tell(lambda tracker: tracker.note(text))

    def progress(self, text: str) -> None:
        self._tell(lambda tracker: tracker.progress(text))

    def resume(self, step: int) -> None:
        self._tell(lambda tracker: tracker.resume(step))

    def close(self) -> None:
        self._tell(lambda tracker: tracker.close())
        self._working = ()

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self._working:
            try:
                call(tracker)
            except Exception as error:  # Ctrl-C and sys.exit are not Exceptions: they pass
                self._disable(tracker, error)

    def _disable(self, tracker: Tracker, error: Exception) -> None:
        self._working = tuple(other for other in self._working if other is not tracker)
        name = type(tracker).__name__
        logger.warning("%s failed and is off for the rest of this run: %s: %s", name, type(error).__name__, error)
        logger.debug("where %s failed", name, exc_info=error)
