"""Log to Weights & Biases. The run's id is stored in the log folder, so that a resumed run stays one run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from strop.extensions.trackers.aliases import add_aliases
from strop.extensions.trackers.service_tracker import ServiceTracker, create_run_id, read_run_id
from strop.extensions.trackers.trackers_config import ServicesConfig, WandbConfig, is_offline
from strop.monitoring.trackers.base import SampleTable, SavedCheckpoint, StepMedia, TrackedRun, describe_error, name_project

if TYPE_CHECKING:
    import wandb


logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"


class WandbTracker(ServiceTracker["wandb.Run"]):
    """Logs to Weights & Biases. With ``WANDB_MODE=offline`` the data stays in ``<log_dir>/wandb`` for a later ``wandb sync``.

    A resumed run rewinds the service to the step it continues from. If that fails (offline, or a server without rewind),
    steps that run again keep their first record, with a warning.
    """

    def __init__(
        self,
        log_dir: Path,
        *,
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        aliases: bool = False,  # log metrics under the names of other libraries too
        checkpoints: Literal["none", "reference", "upload"] = "none",  # as artifacts
        **options: Any,  # further arguments of wandb.init: entity, group, tags, notes, job_type, mode, dir, ...
    ) -> None:
        super().__init__()
        self._log_dir = Path(log_dir).absolute()
        self._init: dict[str, Any] = {"project": project, "name": name, "config": dict(config or {}), "dir": str(self._log_dir)}
        self._init |= {key: value for key, value in options.items() if value not in (None, ())}
        self._aliases, self._checkpoints = aliases, checkpoints
        self._check_available()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, add_aliases(metrics) if self._aliases else metrics)

    def log_media(self, step: int, media: StepMedia) -> None:
        import wandb

        shown: dict[str, Any] = {each.name: wandb.Histogram(list(each.values)) for each in media.histograms}
        shown |= {each.name: wandb.Table(columns=list(SampleTable.COLUMNS), data=each.values()) for each in media.tables}
        for name in sorted({image.name for image in media.images}):
            images = [image for image in media.images if image.name == name]
            shown[name] = [wandb.Image(str(image.path), caption=image.caption) for image in images]
        if shown:
            self._get_run().log(shown, step=step)

    def log_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Log an artifact ``RUN-checkpoint`` with the alias ``step_N``: the files, or only their location."""
        if self._checkpoints == "none":
            return
        import wandb

        run = self._get_run()
        artifact = wandb.Artifact(
            f"{run.id}-checkpoint", type="model", metadata={"step": saved.step, "folder": str(saved.folder)}
        )
        if self._checkpoints == "upload":
            artifact.add_dir(str(saved.folder))
        else:
            artifact.add_reference(saved.folder.as_uri(), checksum=False)  # with checksums it would read every file
        run.log_artifact(artifact, aliases=[f"step_{saved.step}"])

    def _open_run(self, resume_step: int | None) -> wandb.Run:
        import wandb

        self._log_dir.mkdir(parents=True, exist_ok=True)
        Path(self._init["dir"]).mkdir(parents=True, exist_ok=True)
        from_scratch = resume_step is not None and resume_step < 0
        run_id = None if from_scratch else read_run_id(self._log_dir, ID_FILE)
        # Console capture would record every redraw of the live console. The final summary would mix with the run's last lines.
        quiet = {} if "WANDB_QUIET" in os.environ else {"quiet": True}
        common = {**self._init, "settings": wandb.Settings(console="off", **quiet)}
        if run_id is None or resume_step is None or self._is_offline():
            return wandb.init(id=run_id or create_run_id(self._log_dir, ID_FILE), resume="allow", **common)
        return _resume_rewound(run_id, resume_step, common)

    def _is_offline(self) -> bool:
        return is_offline(self._init.get("mode"))

    def _check_available(self) -> None:
        """Check package and API key when the run starts, instead of at an interactive prompt. Raises ImportError or ValueError."""
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"logger.wandb_enabled is true, but wandb cannot be imported ({error}); "
                "install it (pip install wandb) or set logger.wandb_enabled=false"
            ) from error
        if not self._is_offline() and not _has_key():
            raise ValueError(
                "logger.wandb_enabled is true, but there is no Weights & Biases API key: run `wandb login` or set "
                "WANDB_API_KEY, or set WANDB_MODE=offline to keep the run on this machine, or logger.wandb_enabled=false"
            )


def _has_key() -> bool:
    """Return whether there is a key, or another way to log in. Raises ValueError for a malformed key; never prompts."""
    import wandb

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (AttributeError, TypeError):  # a version that would prompt
        return bool(wandb.api.api_key)
    except wandb.Error as error:
        raise ValueError(
            f"logger.wandb_enabled is true, but Weights & Biases refuses the key: {describe_error(error)}. Run `wandb login`, "
            "correct WANDB_API_KEY, or set logger.wandb_enabled=false"
        ) from error


def _resume_rewound(run_id: str, step: int, common: Mapping[str, Any]) -> wandb.Run:
    import wandb

    try:
        return wandb.init(resume_from=f"{run_id}?_step={step}", **common)
    except Exception as error:
        logger.warning(
            "Weights & Biases could not rewind run %s to step %d (%s): steps that run again keep their first record",
            run_id, step, error,
        )  # fmt: skip
        return wandb.init(id=run_id, resume="allow", **common)


def make_tracker(run: TrackedRun) -> WandbTracker:
    section = WandbConfig.of(run.logger)
    return WandbTracker(
        run.folder,
        project=name_project(section.project, "WANDB_PROJECT"),
        name=section.name or run.name,
        aliases=ServicesConfig.of(run.logger).metric_aliases,
        checkpoints=run.logger.tracked_checkpoints,
        entity=section.entity,
        group=section.group,
        tags=section.tags,
        notes=section.notes,
        job_type=section.job_type,
        mode=section.mode,
        dir=section.dir and str(Path(section.dir).absolute()),
        config=run.settings,
    )
