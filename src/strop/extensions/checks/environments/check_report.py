"""What a check of an environment found: as data, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["fault", "note"]
CHECKS = {  # in the order of the table; the names that --skip takes
    "tasks_valid": "every task has a prompt that is not empty",
    "tasks_same": "task i is the same when asked again, in another order, after a rebuild and in another process",
    "splits": "no validation task is among the training tasks",
    "reward_errors": "no completion makes a reward or respond raise",
    "reward_deterministic": "an episode has one reward and the same answers: again, in another order, concurrently",
    "reference": "the reference answer scores near the maximum",
    "degenerate": "answers without knowledge score low",
}

EPISODE_CHECKS = tuple(CHECKS)[tuple(CHECKS).index("reward_errors") :]


@dataclass(frozen=True)
class CheckFinding:
    check: str  # of ``CHECKS``
    level: Level  # a note does not fail the check
    message: str


@dataclass(frozen=True)
class PolicyScore:
    """The mean scores of texts that were made by one rule for several tasks."""

    policy: str
    reward: float
    accuracy: float
    tasks: int
    flagged: bool = False


@dataclass
class EnvironmentReport:
    """Everything that was found of one environment."""

    name: str
    title: str
    num_tasks: int
    num_validation_tasks: int
    looked_at: int
    findings: list[CheckFinding] = field(default_factory=list)
    scores: list[PolicyScore] = field(default_factory=list)
    not_checked: dict[str, str] = field(default_factory=dict)  # check -> why not

    def fault(self, check: str, message: str) -> None:
        self._add(CheckFinding(check, "fault", message))

    def note(self, check: str, message: str) -> None:
        self._add(CheckFinding(check, "note", message))

    def leave_out(self, checks: Sequence[str], why: str) -> None:
        """Say why checks were not made. What one of them found stays."""
        found = {finding.check for finding in self.findings}
        self.not_checked |= {check: why for check in checks if check not in found}

    def _add(self, finding: CheckFinding) -> None:
        assert finding.check in CHECKS
        if finding not in self.findings:
            self.findings.append(finding)

    @property
    def faults(self) -> list[CheckFinding]:
        return [finding for finding in self.findings if finding.level == "fault"]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        return {
            "environment": self.name,
            "class": self.title,
            "tasks": self.num_tasks,
            "validation_tasks": self.num_validation_tasks,
            "looked_at": self.looked_at,
            "ok": not self.faults,
            "findings": [vars(finding) for finding in self.findings],
            "scores": [vars(score) for score in self.scores],
            "not_checked": self.not_checked,
        }


def format_reports(reports: Sequence[EnvironmentReport]) -> str:
    """Return the tables of all environments and the verdict."""
    faults = sum(len(report.faults) for report in reports)
    verdict = "no faults" if not faults else f"{faults} fault{'s' if faults > 1 else ''}"
    return "\n\n".join([*map(_format_report, reports), verdict])


def _format_report(report: EnvironmentReport) -> str:
    validation = f", {report.num_validation_tasks} for validation" if report.num_validation_tasks else ""
    lines = [f"{report.name} ({report.title}): {report.num_tasks} tasks{validation}; {report.looked_at} looked at", ""]
    for check, meaning in CHECKS.items():
        found = [finding for finding in report.findings if finding.check == check]
        if check in report.not_checked:
            lines.append(f"  -      {check:<21}{report.not_checked[check]}")
        elif not found:
            lines.append(f"  ok     {check:<21}{meaning}")
        lines += [
            f"  {finding.level.upper() if finding.level == 'fault' else 'note':<7}{check:<21}{finding.message}"
            for finding in found
        ]
    if report.scores:
        lines += ["", f"  {'answers':<28}{'reward':>9}{'accuracy':>10}"]
        lines += [
            f"  {score.policy:<28}{score.reward:>9.3f}{score.accuracy:>10.3f}{'  <- FAULT' if score.flagged else ''}"
            for score in report.scores
        ]
    return "\n".join(lines)
