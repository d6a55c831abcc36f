"""Common base of trackers for services whose packages have runs with ``log`` and ``finish``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

from strop import packages
from strop.monitoring.trackers.base import NullTracker
from strop.packages import install_command


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
