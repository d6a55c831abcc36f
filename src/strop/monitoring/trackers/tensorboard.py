"""Write TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from strop.monitoring.trackers.aliases import add_aliases
from strop.monitoring.trackers.base import NullTracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker(NullTracker):
    """Writes events to ``folder``, with metric names as tags, and with ``aliases`` those of other libraries too.

    A resumed run discards later events with ``purge_step``.
    """

    def __init__(self, folder: Path, *, aliases: bool = False) -> None:
        self._folder = Path(folder).absolute()  # a reward may change the working directory
        self._aliases = aliases
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None
        self._step = 0
        _import_summary_writer()  # fail when the run starts, not at its first step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._get_writer()
        for name, value in (add_aliases(metrics) if self._aliases else metrics).items():
            writer.add_scalar(name, float(value), step)
        writer.flush()
        self._step = step

    def note(self, text: str) -> None:
        self._get_writer().add_text("notes", text, self._step)

    def resume(self, step: int) -> None:
        self.close()  # the purge is written at the start of a new event file
        self._purge_step = step + 1
        self._step = step

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _get_writer(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = _import_summary_writer()(str(self._folder), purge_step=self._purge_step)
        return self._writer


def _import_summary_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"logger.tensorboard_enabled is true, but TensorBoard cannot be imported ({error}); "
            "install it (pip install tensorboard) or set logger.tensorboard_enabled=false"
        ) from error
    return SummaryWriter
