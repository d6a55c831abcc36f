"""What a check of an algorithm found: as data, as a table and as a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKS = {  # in the order of the table
    "options": "it is built from its options, and copies are equal",
    "credit": "every rollout of every group has one finite reward, advantage and mask",
    "inputs": "nothing that it is given is changed, and the same input gives the same result",
    "loss": "the loss and its gradient are finite, also far from the sampling policy",
    "cuts": "the gradient is the same however a batch is cut",
    "zero_gradient": "rollouts that it declares to have no gradient have none",
    "metrics": "metrics of micro-batches add up to those of the batch",
    "terms": "the terms of the token ledger add up to the loss",
}
REWARD_NAMES = ("first", "second")  # of the made-up rollouts


@dataclass(frozen=True)
class AlgorithmFault:
    check: str  # of ``CHECKS``
    message: str


@dataclass(frozen=True)
class Point:
    """Objective and gradient of a single token (or pair) whose log-probability has moved."""

    at: float  # the ratio, or the margin of a pair
    objective: float  # minus the loss
    gradient: float  # of the objective, by the log of the ratio or by the margin


@dataclass(frozen=True)
class Formula:
    """What a loss makes of a policy that has moved."""

    axis: str  # what moves: the ratio to the policy before, or the margin of a pair
    shown: tuple[float, ...]  # points of the printed table, which every curve has
    curves: Mapping[str, Sequence[Point]]  # by credit, such as "A = +1"


@dataclass
class AlgorithmReport:
    """Everything that was found of one algorithm."""

    name: str
    described: str  # with its parts and options
    faults: list[AlgorithmFault] = field(default_factory=list)
    made: set[str] = field(default_factory=set)  # the checks that were made
    formula: Formula = Formula("", (), {})

    def fault(self, check: str, message: str) -> None:
        assert check in CHECKS
        if (finding := AlgorithmFault(check, message)) not in self.faults:
            self.faults.append(finding)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        return {
            "algorithm": self.name,
            "described": self.described,
            "ok": not self.faults,
            "faults": [vars(finding) for finding in self.faults],
            "formula": {label: [vars(point) for point in points] for label, points in self.formula.curves.items()},
        }


def format_report(report: AlgorithmReport) -> str:
    """Return the table of checks, the formula in numbers, and the verdict."""
    lines = [report.described, "", *_format_findings(report), *_format_formula(report.formula), "", _verdict(report)]
    return "\n".join(lines)


def _verdict(report: AlgorithmReport) -> str:
    count = len(report.faults)
    return "no faults" if not count else f"{count} fault{'s' if count > 1 else ''}"


def _format_findings(report: AlgorithmReport) -> Iterator[str]:
    for check, meaning in CHECKS.items():
        found = [finding for finding in report.faults if finding.check == check]
        if not found:
            yield f"  {'ok' if check in report.made else '-':<7}{check:<15}{meaning}"
        for finding in found:
            yield f"  FAULT  {check:<15}{finding.message}"


def _format_formula(formula: Formula) -> Iterator[str]:
    if not formula.curves:
        return
    yield ""
    yield f"  {formula.axis:<22}" + "".join(f"{value:>9.3g}" for value in formula.shown)
    for label, points in formula.curves.items():
        shown = [point for point in points if point.at in formula.shown]
        yield f"  {f'objective, {label}':<22}" + "".join(f"{point.objective:>9.3f}" for point in shown)
        yield f"  {f'gradient, {label}':<22}" + "".join(f"{point.gradient:>9.3f}" for point in shown)


def plot_formula(report: AlgorithmReport, output: Path) -> None:
    """Draw objective and gradient against the ratio (pairs: the margin) into a file; its suffix gives the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, title in zip(figure.subplots(1, 2), ("objective", "gradient"), strict=True):
        for label, points in report.formula.curves.items():
            axis.plot([point.at for point in points], [getattr(point, title) for point in points], label=label)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(report.formula.axis)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(report.name, fontsize=10)
    figure.savefig(output, dpi=120)
