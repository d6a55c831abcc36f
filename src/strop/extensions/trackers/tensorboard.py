"""Write TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.extensions.trackers.aliases import add_aliases
from strop.extensions.trackers.service_tracker import flatten_settings
from strop.extensions.trackers.trackers_config import ServicesConfig, TensorboardConfig
from strop.monitoring.trackers.base import NullTracker, StepMedia, TrackedRun

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


RESULTS = ("train/reward", "validation/accuracy")  # columns of the hyperparameter page


class TensorBoardTracker(NullTracker):
    """Writes events to ``folder``, with metric names as tags, and with ``aliases`` also those of other libraries.

    A resumed run discards later events with ``purge_step``. Texts are escaped, because TensorBoard would render them as Markdown.
    """

    def __init__(self, folder: Path, *, aliases: bool = False, config: Mapping[str, Any] | None = None) -> None:
        self._folder = Path(folder).absolute()  # a reward may change the working directory
        self._aliases = aliases
        self._config = dict(config or {})  # the page of hyperparameters
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None
        self._step = 0
        _import_summary_writer()  # report a missing package at the start of the run, not at its first step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        writer = self._get_writer()
        for name, value in (add_aliases(metrics) if self._aliases else metrics).items():
            writer.add_scalar(name, float(value), step)
        writer.flush()
        self._step = step

    def log_media(self, step: int, media: StepMedia) -> None:
        import numpy as np

        writer = self._get_writer()
        for histogram in media.histograms:
            writer.add_histogram(histogram.name, np.asarray(histogram.values), step)
        for table in media.tables:
            writer.add_text(table.name, verbatim(table.as_text()), step)
        for number, image in enumerate(media.images):
            _add_image_file(writer, f"{image.name}/{number}", image.path.read_bytes(), step)
        writer.flush()

    def note(self, text: str) -> None:
        self._get_writer().add_text("notes", verbatim(text), self._step)

    def resume(self, step: int) -> None:
        self.close()  # the purge is written at the start of a new event file
        self._purge_step = step + 1
        self._step = max(step, 0)  # -1: a new run, whose notes come before step 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _get_writer(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = _import_summary_writer()(str(self._folder), purge_step=self._purge_step)
            if self._config:
                _add_settings(self._writer, self._config)
        return self._writer


def verbatim(text: str) -> str:
    """Return Markdown that shows ``text`` verbatim: an indented code block, which no text can close."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _add_settings(writer: SummaryWriter, config: Mapping[str, Any]) -> None:
    from torch.utils.tensorboard.summary import hparams

    assert writer.file_writer is not None
    for summary in hparams(dict(flatten_settings(config)), dict.fromkeys(RESULTS, 0.0)):
        writer.file_writer.add_summary(summary)


def _add_image_file(writer: SummaryWriter, name: str, data: bytes, step: int) -> None:
    """Write an image file unchanged, without decoding it."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    assert writer.file_writer is not None
    image = Summary.Image(encoded_image_string=data, colorspace=3)
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


def _import_summary_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"logger.tensorboard_enabled is true, but TensorBoard cannot be imported ({error}); "
            "install it (pip install tensorboard) or set logger.tensorboard_enabled=false"
        ) from error
    return SummaryWriter


def make_tracker(run: TrackedRun) -> TensorBoardTracker:
    section = TensorboardConfig.of(run.logger)
    events = Path(section.log_dir) if section.log_dir else run.folder / "tensorboard"
    return TensorBoardTracker(events, aliases=ServicesConfig.of(run.logger).metric_aliases, config=run.settings)
