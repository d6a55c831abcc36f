"""Sections ``monitor``, what watches a run for reward hacking, and ``pacing``, how many episodes run at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field

from strop.base_config import BaseConfig
from strop.problems import Problem
from strop.user_code import suggest_names

DETECTORS = (  # of ``hacking_monitor``, without importing them to read a configuration
    "length",
    "format",
    "repetition",
    "duplicate_answers",
    "templates",
    "diversity",
    "second_grader",
    "judges",
)


class MonitorConfig(BaseConfig):
    """Detectors of reward hacking. Together they warn in at most the given share of honest runs."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("*",)

    enabled: bool = Field(True, description="Watch the rollouts for reward hacking, and log monitor/*.")
    detectors: list[str] | None = Field(
        None, description=f"Detectors to apply, of {', '.join(DETECTORS)}; null is all that have what they need."
    )
    false_alarm_rate: float = Field(
        0.01, gt=0, lt=1, description="Largest probability that any detector warns of an honest run, however long it is."
    )
    stop_on: list[str] = Field(default_factory=list, description="Detectors whose warning ends the run, with exit code 1.")
    second_grader: str | dict[str, Any] | None = Field(
        None,
        description="A grader that is never trained on: file.py:function of (task, rollout), from 0 to 1, a verifier, such as judge, with "
        "options {verifier: judge, ...}, or a method of the environment math, such as math_verify.",
    )
    judges: list[str | dict[str, Any]] = Field(
        default_factory=list,
        max_length=2,
        description="Two graders, likewise, whose difference is watched; a single one is asked twice.",
    )
    graded_samples: int = Field(8, ge=1, description="Rollouts of a step that the graders see (rollouts).")

    def errors(self, key: str) -> Iterator[Problem]:
        for name, given in (("detectors", self.detectors or ()), ("stop_on", self.stop_on)):
            for each in given:
                if each not in DETECTORS:
                    yield Problem(f"{key}.{name}", f"there is no detector {each!r}{suggest_names(each, DETECTORS)}")
        for each in self.stop_on:
            if each in DETECTORS and each not in self.active:
                needs = "it needs monitor.second_grader" if each == "second_grader" else "it needs monitor.judges"
                why = (
                    needs
                    if each in ("second_grader", "judges") and self.enabled
                    else "monitor.detectors or monitor.enabled leaves it out"
                )
                yield Problem(f"{key}.stop_on", f"names {each!r}, which is not applied: {why}", "Set that, or leave it out.")
        if self.detectors is not None:
            for each, has in (("second_grader", self.second_grader), ("judges", self.judges)):
                if each in self.detectors and not has:
                    yield Problem(
                        f"{key}.detectors", f"names {each!r}, which needs {key}.{each}", f"Set {key}.{each} to file.py:function."
                    )

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        from strop.environments.base import EnvironmentConfigError
        from strop.extensions.watch.watched_rollout import make_grader

        for name, given in (("second_grader", self.second_grader), *(("judges", each) for each in self.judges)):
            try:
                if given is not None and self.enabled:
                    make_grader(given, f"{key}.{name}")
            except EnvironmentConfigError as error:
                yield Problem(f"{key}.{name}", str(error).removeprefix(f"{key}.{name}: "))

    @property
    def active(self) -> tuple[str, ...]:
        """The detectors that are applied."""
        if not self.enabled:
            return ()
        missing = {name for name, has in (("second_grader", self.second_grader), ("judges", self.judges)) if not has}
        return tuple(name for name in DETECTORS if name not in missing and name in (self.detectors or DETECTORS))


class PacingConfig(BaseConfig):
    """Follow what engines and sandboxes can bear, and wait while the infrastructure of an environment fails."""

    adaptive_concurrency: bool = Field(
        True,
        description="Halve the number of episodes in flight when engines preempt requests, sandboxes are full or a provider refuses "
        "requests, and raise it again one by one; the slots of the run are its upper bound.",
    )
    pause_above: float | None = Field(
        0.5,
        gt=0,
        lt=1,
        description="Pause an environment that has worked in this run once more than this share of its last 32 rollouts failed by its "
        "infrastructure; one rollout at a time tests whether it works again, and those that fail meanwhile are sampled again. null never "
        "pauses.",
    )
    max_pause_minutes: float = Field(
        30.0, gt=0, description="End the run once an environment has been paused for this long (minutes)."
    )
