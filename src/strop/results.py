"""What a run left behind, as data: ``Run(folder)`` for training, ``Evaluation`` for an evaluation."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

    from strop.checkpointing.saved_model import SavedModel


@dataclass(frozen=True)
class Run:
    """A training run, read from its log folder, while it is running or afterwards. Everything is read again by a new ``Run``.

    Raises FileNotFoundError if the folder holds no run.
    """

    folder: Path

    def __init__(self, folder: str | Path) -> None:
        object.__setattr__(self, "folder", Path(folder))
        if not (self.folder / "config.yaml").is_file():
            raise FileNotFoundError(
                f"there is no run in {self.folder}: it has no config.yaml; give the log folder of a run (logger.log_dir)"
            )

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the run, as nested dicts."""
        from strop.config.source import yaml_text

        values: Mapping[str, Any] = yaml_text.parse_value((self.folder / "config.yaml").read_text(encoding="utf-8"))
        return values

    @cached_property
    def metrics(self) -> pandas.DataFrame:
        """The metrics, one row for each logged step and one column for each name; NaN where a step did not log a metric.

        ``metrics["train/reward"][-1]`` is the last value that was logged.
        """
        from strop.monitoring.metrics_table import make_metrics_table
        from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics

        return make_metrics_table(read_metrics(self.folder / METRICS_FILE))

    @cached_property
    def rollouts(self) -> pandas.DataFrame:
        """Every stored rollout, one row each, with its step, task, ``turns``, rewards, metrics and log-probabilities.

        A turn is a dict with role, text, the range of its tokens (start, end), sampled and versions. Empty if none are stored.
        """
        import pandas

        from strop.monitoring.rollout_store.rollout_store import RolloutStore, to_row

        return pandas.DataFrame([to_row(record) for record in RolloutStore(self.folder, "none").read_all()])

    def ledger(self, step: int, group: int, sample: int) -> pandas.DataFrame:
        """What each term of the loss contributed at each token of a rollout, one row each (``strop.ledger``).

        ``frame.attrs`` has the sums: ``totals`` of the rollout, ``step_totals``, the ``logged`` losses, and a ``note`` where the terms are
        not stored. Raises LedgerError.
        """
        import pandas

        from strop.ledger.token_ledger import make_ledger

        ledger = make_ledger(self.folder, step, group, sample)
        frame = pandas.DataFrame(ledger.rows())
        frame.attrs |= {name: getattr(ledger, name) for name in ("totals", "step_totals", "logged", "note", "difference")}
        return frame

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(self.metrics.index[-1]) if len(self.metrics) else 0

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints that are kept, the newest last."""
        from strop.checkpointing.saved_model import find_checkpoints
        from strop.checkpointing.step_folders import list_steps

        folder = find_checkpoints(self.folder, self.config)
        return [folder / f"step_{step}" for step in list_steps(folder)]

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint; None if there is none."""
        return self.checkpoints[-1] if self.checkpoints else None

    @property
    def model(self) -> Path | None:
        """The trained weights in the newest checkpoint, a Hugging Face folder or PEFT adapters; None if there is no checkpoint.

        Shards of several ranks are converted once, to ``exported/step_N`` in the log folder.
        """
        if self.checkpoint is None:
            return None
        from strop.checkpointing.saved_model import find_saved_model

        saved = find_saved_model(self.checkpoint)
        return self._convert_shards(saved) if saved.needs_conversion else Path(saved.weights)

    def _convert_shards(self, saved: SavedModel) -> Path:
        """Convert shards, or return what was converted before if the checkpoint has not been written again since."""
        from strop.checkpointing.convert import convert_model

        folder = self.folder / "exported" / f"step_{saved.step}"
        if folder.is_dir() and folder.stat().st_mtime < Path(saved.weights).stat().st_mtime:
            shutil.rmtree(folder)
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            convert_model(saved, folder, model_name=self.config["policy"]["model_name"])
        return folder

    def export(self, folder: str | Path, *, step: int | None = None, merge: bool = False, dtype: str | None = None) -> Path:
        """Write the newest checkpoint, or that of a step, as a folder that Transformers and vLLM load, and return it.

        As ``strop export``: ``merge`` merges LoRA adapters into their base, and ``dtype`` is bfloat16, float16 or float32.
        """
        from strop.build.jobs.export_model import ExportJob, export_model
        from strop.checkpointing.saved_model import find_saved_model
        from strop.models.export import ExportFormat

        source = find_saved_model(self.folder, step=step)
        export_model(ExportJob(source=source, target=Path(folder), form=ExportFormat(dtype), merge=merge))
        return Path(folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, step={self.step}, checkpoint={str(self.checkpoint) if self.checkpoint else None!r})"


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a set of tasks, and its samples."""

    metrics: Mapping[str, float]  # accuracy, avg@n, pass@k, cons@k, maj@k, ...; of several sets as SET/accuracy, too
    rows: Sequence[Mapping[str, Any]]  # one for each sample; none on recorded data
    standard_errors: Mapping[str, float] = field(default_factory=dict)  # of the metrics that are means over tasks
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # their 95 % confidence intervals
    stored: Path | None = None  # the file with every sample; None: eval.save_path is null
    tasks: Sequence[Mapping[str, Any]] = field(default=(), repr=False)  # as they are stored, each with its samples
    identity: Mapping[str, Any] | None = field(
        default=None, repr=False
    )  # how they were sampled and scored, as it is stored with them

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """Every sample, one row each, with its task, set, text and rewards."""
        import pandas

        return pandas.DataFrame(list(self.rows))

    @property
    def accuracy(self) -> float:
        return self.metrics["accuracy"]

    def __repr__(self) -> str:
        return f"Evaluation({json.dumps({name: round(value, 4) for name, value in self.metrics.items()})})"
