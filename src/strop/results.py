"""Results of a run as data: ``Run(folder)`` for training, ``Evaluation`` for an evaluation."""

from __future__ import annotations

import html
import json
import math
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import plugins
from strop.safety.printable import make_printable

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from strop.checkpointing.saved_model import SavedModel
    from strop.monitoring.rollout_store.rollout_record import RolloutRecord
    from strop.monitoring.rollout_store.rollout_store import RolloutStore
    from strop.monitoring.rollout_store.validation_samples import ValidationSamples


@dataclass(frozen=True)
class Run:
    """A training run, read from its log folder during the run or afterwards. Create a new ``Run`` to read again.

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
        Unreadable files are skipped with a warning.
        """
        import pandas

        from strop.monitoring.rollout_store.rollout_store import RolloutStore, to_row

        return pandas.DataFrame([to_row(record) for record in _read_steps(RolloutStore(self.folder, "none"))])

    def ledger(self, step: int, group: int, sample: int) -> pandas.DataFrame:
        """What each term of the loss contributed at each token of a rollout, one row each (``strop.ledger``).

        ``frame.attrs`` has the sums: ``totals`` of the rollout, ``step_totals``, the ``logged`` losses, and a ``note`` where the terms are
        not stored. Raises LedgerError.
        """
        import pandas

        ledger = plugins.load("functions", "ledger")(self.folder, step, group, sample)
        frame = pandas.DataFrame(ledger.rows())
        frame.attrs |= {name: getattr(ledger, name) for name in ("totals", "step_totals", "logged", "note", "difference")}
        return frame

    @cached_property
    def samples(self) -> pandas.DataFrame:
        """Every stored sample of the validations, one row each: step, task, ``turns``, rewards and accuracy. Empty if there are none."""
        import pandas

        from strop.monitoring.rollout_store.rollout_store import to_row
        from strop.monitoring.rollout_store.token_values import NAMES as of_update
        from strop.monitoring.rollout_store.validation_samples import ValidationSamples

        store = ValidationSamples(self.folder)
        rows = [{**to_row(record), "accuracy": record.metrics.get("accuracy")} for record in _read_steps(store)]
        left_out = {*_NOT_OF_SAMPLES, *of_update}
        return pandas.DataFrame([{name: value for name, value in row.items() if name not in left_out} for row in rows])

    @cached_property
    def validations(self) -> pandas.DataFrame:
        """The validations, one row each by step: ``accuracy``, its 95 % interval (``low``, ``high``), ``tasks``, and the logged metrics.

        The interval and the tasks are NaN where no samples are stored, as for recorded data. Empty if the run has not validated.
        """
        prefix = "validation/"
        logged = self.metrics[[name for name in self.metrics.columns if name.startswith(prefix)]].dropna(how="all")
        table = logged.rename(columns=lambda name: name.removeprefix(prefix))
        found = {step: read_interval(self.folder, step) for step in table.index} if (self.folder / prefix).is_dir() else {}
        for place, name in enumerate(("low", "high", "tasks") if found else ()):
            table[name] = [math.nan if (values := found[step]) is None else values[place] for step in table.index]
        return table

    @cached_property
    def timing(self) -> pandas.DataFrame:
        """The seconds of each phase, one row for each logged step: generation, policy_training, weight_sync, ..., total_step_time."""
        from strop.monitoring.console_columns import PHASE_PREFIX

        columns = [name for name in self.metrics.columns if name.startswith(PHASE_PREFIX)]
        return self.metrics[columns].dropna(how="all").rename(columns=lambda name: name.removeprefix(PHASE_PREFIX))

    def plot(self, *metrics: str) -> Figure:
        """Return a figure of the standard curves and step times, as drawn by ``strop plot``, or of these metrics.

        A notebook displays it; ``figure.savefig(file)`` saves it. Raises NothingToPlot, a ValueError, if there is no data or a
        metric does not exist.
        """
        figure: Figure = plugins.load("functions", "plot")(self.folder, metrics)
        return figure

    def report(self, file: str | Path | None = None) -> Path:
        """Save the run's view as one HTML file, as ``strop report`` does: ``report.html`` in its folder. Return the path.

        Raises NothingToSave, a ValueError, before the first step.
        """
        from strop.config.source import yaml_text

        saved: Path = plugins.load("functions", "report")(
            self.folder, None if file is None else Path(file), yaml_text.parse_value
        )
        return saved

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(self.metrics.index[-1]) if len(self.metrics) else 0

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of the checkpoints on disk, the newest last."""
        from strop.checkpointing.saved_model import find_checkpoints, list_steps

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
        """Convert shards, reusing an earlier conversion if the checkpoint has not been written again since."""
        folder = self.folder / "exported" / f"step_{saved.step}"
        if folder.is_dir() and folder.stat().st_mtime < Path(saved.weights).stat().st_mtime:
            shutil.rmtree(folder)
        if not folder.is_dir():
            folder.parent.mkdir(exist_ok=True)
            plugins.load("functions", "convert")(saved, folder, model_name=self.config["policy"]["model_name"])
        return folder

    def export(self, folder: str | Path, *, step: int | None = None, merge: bool = False, dtype: str | None = None) -> Path:
        """Export the newest checkpoint, or that of a step, as a folder that Transformers and vLLM load, and return its path.

        As ``strop export``: ``merge`` merges LoRA adapters into their base, and ``dtype`` is bfloat16, float16 or float32.
        """
        from strop.checkpointing.saved_model import find_saved_model

        plugins.load("functions", "export")(find_saved_model(self.folder, step=step), Path(folder), dtype=dtype, merge=merge)
        return Path(folder)

    def _repr_html_(self) -> str:
        """Return the HTML shown in a notebook: the main facts of the run. All values are escaped."""
        policy = self.config.get("policy") or {}
        rows = [("folder", self.folder), ("model", policy.get("model_name", "")), ("step", self.step)]
        rows += [("checkpoint", self.checkpoint)] if self.checkpoint else []
        last = [
            (name, f"{column.iloc[0]:.4g} to {column.iloc[-1]:.4g}")
            for name in _SHOWN_METRICS
            if name in self.metrics and len(column := self.metrics[name].dropna())
        ]
        cells = ((html.escape(make_printable(str(cell))) for cell in row) for row in (*rows, *last))
        table = "".join(f"<tr><th scope='row'>{name}</th><td>{value}</td></tr>" for name, value in cells)
        hint = ".metrics, .rollouts, .samples, .validations, .timing, .plot(), .report()"
        return f"<div><table>{table}</table><p><small>{hint}</small></p></div>"

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, step={self.step}, checkpoint={str(self.checkpoint) if self.checkpoint else None!r})"


_SHOWN_METRICS = (
    "train/reward",
    "train/loss",
    "validation/accuracy",
    "validation/loss",
    "train/entropy",
    "train/token_mult_prob_error",
)
# Rollout columns that validation samples lack, because they are stored without tokens.
_NOT_OF_SAMPLES = (
    "prompt", "prompt_tokens", "tokens", "sampled", "sampler_logprobs", "learner_logprobs", "versions", "advantage", "kept",
    "dropped_because", "branches", "group_version", "step_rewards", "turn_advantages",
)  # fmt: skip


def _read_steps(store: RolloutStore | ValidationSamples) -> Iterator[RolloutRecord]:
    """Yield the stored rollouts in order of steps, holding one step in memory at a time. Unreadable files give a warning."""
    from strop.monitoring.rollout_store.stored_files import DamagedRollouts

    for step in store.steps():
        try:
            yield from store.read(step)
        except DamagedRollouts as error:
            warnings.warn(str(error), stacklevel=3)


def read_interval(folder: Path, step: int) -> tuple[float, float, int] | None:
    """Return the ends of the 95 % interval of a validation's accuracy, and its tasks; None where they cannot be read."""
    from strop.monitoring.rollout_store.validation_samples import VALIDATION_FOLDER

    find_interval = plugins.load("functions", "accuracy_interval")
    try:
        content = json.loads((folder / VALIDATION_FOLDER / f"step_{step:06d}.json").read_text(encoding="utf-8"))
        found: tuple[float, float, int] | None = find_interval(content["tasks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a set of tasks, and its samples."""

    metrics: Mapping[str, float]  # accuracy, avg@n, pass@k, cons@k, maj@k, ...; for several sets also as SET/accuracy
    rows: Sequence[Mapping[str, Any]]  # one per sample; none for recorded data
    standard_errors: Mapping[str, float] = field(default_factory=dict)  # for metrics that are means over tasks
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # 95 % confidence intervals of the same metrics
    stored: Path | None = None  # the file with every sample; None: eval.save_path is null
    tasks: Sequence[Mapping[str, Any]] = field(default=(), repr=False)  # as stored, each with its samples
    identity: Mapping[str, Any] | None = field(default=None, repr=False)  # how they were sampled and scored, as stored with them

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
