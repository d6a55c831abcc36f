"""What is wrong with a run: the rules of health on its stored metrics, and what else it warned of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from strop.extensions.reading.doctor import find_verdict
from strop.extensions.view.viewed_run import ViewedRun, ViewError
from strop.extensions.watch.health_rules import HealthState, StepJudge
from strop.monitoring.waits import Status
from strop.safety.printable import make_printable

HEALTH, MONITOR, ALARM = "health/", "monitor/", "_alarm"  # metrics that are 1 in a step in which a warning holds
UNREAD = ("train/environments/", "train/mismatch/")  # many, and the one rule that counts them is logged when it holds
RECENT = 5  # steps within which something held that still counts: conditions come and go
BROKEN = {"hung", "dead", "failed"}


class RunHealth:
    """Judges one run. Only steps that were added are judged again. Safe to use from several threads."""

    def __init__(self, run: ViewedRun) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._judge = self._make_judge()

    def _make_judge(self) -> StepJudge:
        return StepJudge(state=HealthState(section=self.run.kind()))

    def describe(self) -> dict[str, Any]:
        """Return ``level``, which is ok, look, wrong, or none without steps, and ``findings``, the worst first."""
        try:
            status = self.run.status()
        except ViewError:
            status = None
        findings = [*self._describe_state(status), *self._describe_rules()]
        known = {finding["name"] for finding in findings}
        findings += [finding for finding in self._describe_others(status) if finding["name"] not in known]
        findings.sort(key=lambda each: (not each["now"], each["severity"] != "wrong"))
        holding = {each["severity"] for each in findings if each["now"]}
        past = any(each["severity"] == "wrong" for each in findings)
        level = "wrong" if "wrong" in holding else "look" if holding or past else "ok" if self._judge.count else "none"
        return {"level": level, "findings": findings}

    def _describe_state(self, status: Status | None) -> Iterator[dict[str, Any]]:
        verdict, why = ("unknown", "") if status is None else find_verdict(status)
        if verdict in BROKEN:
            yield _describe(verdict, "wrong", f"the run is {verdict}: {why}", [], now=True)

    def _describe_rules(self) -> list[dict[str, Any]]:
        with self._lock:
            if self.run.metrics.last_step() < self._judge.step:  # it was resumed from an earlier step
                self._judge = self._make_judge()
            for step, metrics in self.run.metrics.rows(_is_read, self._judge.step):
                self._judge.take(step, metrics)
            judged = self._judge.findings()
            last = self._judge.step
        return [
            _describe(
                each.finding.name, each.finding.severity, each.finding.message, each.held, now=each.held[-1][1] > last - RECENT
            )
            for each in judged
        ]

    def _describe_others(self, status: Status | None) -> Iterator[dict[str, Any]]:
        """Yield what listeners logged and no rule of metrics finds, with what was said of it as far as that is still known."""
        names = {
            name: name.removeprefix(HEALTH).removeprefix(MONITOR).removesuffix(ALARM)
            for name in self.run.metrics.names()
            if name.startswith(HEALTH) or (name.startswith(MONITOR) and name.endswith(ALARM))
        }
        series = self.run.metrics.series(list(names), None, 20_000) if names else {}
        for metric, name in names.items():
            held = [step for step, value in zip(series["steps"], series["series"][metric], strict=True) if value]
            if held:
                notes = [note.text for note in (status.notes if status is not None else ()) if f"#{name})" in note.text]
                if notes:
                    said = notes[-1].removeprefix("warning: ")
                elif metric.startswith(MONITOR):
                    said = f"perhaps the reward is hacked ({name}): read the rollouts that are flagged with it"
                else:
                    said = f"{metric} was logged, and the page on warnings has what to do"
                yield _describe(name, "look", said, [(held[0], held[-1])], now=held[-1] > series["steps"][-1] - RECENT)


def _is_read(name: str) -> bool:
    return name.startswith(("train/", "answers/")) and not name.startswith(UNREAD)


def _describe(name: str, severity: str, message: str, held: Any, *, now: bool) -> dict[str, Any]:
    return {
        "name": name,
        "severity": severity,
        "message": make_printable(message),
        "held": [list(each) for each in held],
        "now": now,
    }
