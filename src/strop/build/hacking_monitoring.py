"""Make the monitor of reward hacking that a configuration describes."""

from __future__ import annotations

from typing import Any, cast, get_args, get_type_hints

from strop.config import RolloutRunConfig
from strop.environments.base import EnvironmentConfigError, import_user_code
from strop.environments.math import MathEnvironment
from strop.monitoring.hacking.hacking_monitor import DETECTORS, Grader, HackingMonitor
from strop.user_code import suggest_names


def make_hacking_monitor(config: RolloutRunConfig) -> HackingMonitor:
    """Make the monitor of a run. Raises EnvironmentConfigError for a grader that cannot be imported."""
    section = config.monitor
    if not section.enabled:
        return HackingMonitor()
    judges = [_make_grader(name, "monitor.judges") for name in section.judges]
    return HackingMonitor(
        detectors=[DETECTORS[name]() for name in section.active],
        false_alarm_rate=section.false_alarm_rate,
        stop_on=section.stop_on,
        second_grader=None if section.second_grader is None else _make_grader(section.second_grader, "monitor.second_grader"),
        judges=(judges[0], judges[-1]) if judges else None,
        graded_samples=section.graded_samples,
        log_dir=config.logger.log_dir,
    )


def _make_grader(name: str, key: str) -> Grader:
    if ":" not in name:
        verifiers = get_args(get_type_hints(MathEnvironment)["verifier"])
        if name not in verifiers:
            raise EnvironmentConfigError(
                f"{key}: there is no verifier {name!r}{suggest_names(name, verifiers)}. Name a function of your own as file.py:function"
            )
        correct: Any = MathEnvironment(verifier=cast("Any", name)).correct
        return cast("Grader", correct)
    grader: Any = import_user_code(name)
    if not callable(grader) or isinstance(grader, type):
        raise EnvironmentConfigError(f"{key}: {name} is {grader!r:.80}, not a function; it is called with (task, rollout)")
    return cast("Grader", grader)
