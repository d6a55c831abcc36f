"""What trackers of services share: a run that is opened once and resumed by its stored id, and the configuration as flat names."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from strop import packages
from strop.monitoring.trackers.base import NullTracker
from strop.packages import install_command
from strop.storage.files import atomic_write


def read_run_id(log_dir: Path, file: str) -> str | None:
    """Return the id in ``<log_dir>/<file>``; None if there is none."""
    path = log_dir / file
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None


def store_run_id(log_dir: Path, file: str, run_id: str) -> str:
    log_dir.mkdir(parents=True, exist_ok=True)
    with atomic_write(log_dir / file) as temporary:
        temporary.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def create_run_id(log_dir: Path, file: str, bytes: int = 4) -> str:
    """Create and store an id before the service uses it: a kill in between wastes an id but never creates a second run."""
    return store_run_id(log_dir, file, secrets.token_hex(bytes))


class ServiceRun(Protocol):
    """A run in the packages of Weights & Biases, SwanLab and Trackio."""

    def log(self, data: Any, *, step: int) -> Any: ...

    def finish(self) -> Any: ...


RunT = TypeVar("RunT", bound=ServiceRun)


class ServiceTracker(NullTracker, ABC, Generic[RunT]):
    """Logs to a run that is opened at the first call, and reopened after ``close``."""

    def __init__(self) -> None:
        self._run: RunT | None = None

    @abstractmethod
    def _open_run(self, resume_step: int | None) -> RunT:
        """Open the run recorded in the log folder, or a new one.

        ``resume_step`` is the step to continue after, -1 for a run from scratch; None if it is unknown.
        """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._get_run().log({name: float(value) for name, value in metrics.items()}, step=step)

    def resume(self, step: int) -> None:
        self._get_run(resume_step=step)

    def close(self) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()

    def _get_run(self, resume_step: int | None = None) -> RunT:
        if self._run is None:
            self._run = self._open_run(resume_step)
        return self._run


def check_package(name: str) -> None:
    """Raise ImportError, with the setting to change, if a service's package is not installed."""
    if not packages.is_installed(name):
        raise ImportError(
            f"logger.{name}_enabled is true, but {name} is not installed; "
            f"install it ({install_command(name)}) or set logger.{name}_enabled=false"
        )


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Yield ``grpo.seed``, 42 for every setting that is not null; lists as text."""
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{key}.")
        elif value is not None:
            yield key, value if isinstance(value, bool | int | float | str) else str(value)
