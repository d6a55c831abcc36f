"""Every planted fault is found, and what has none passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strop.data.sources.source import DataSource
from strop.extensions.checks.environment_check import CheckedEnvironment, EnvironmentCheckOptions, check_environment
from strop.extensions.checks.reward_checks import ScoringLimits
from strop.extensions.checks.task_checks import EnvironmentReport
from support.planted_faults import FAULTS, Sound, SoundGame
from support.sweep import one_in

LIMITS = ScoringLimits(max_turns=3, longest=2000, budget_seconds=20.0)


def check(kind: type[Sound]) -> EnvironmentReport:
    environment = kind()
    source = DataSource(size=40)
    each = CheckedEnvironment(
        kind.__name__,
        environment,
        environment.tasks(source),
        list(environment.tasks(replace(source, part="validation"))),
        lambda: environment.tasks(source),
    )
    return check_environment(each, EnvironmentCheckOptions(tasks=20), LIMITS)


@pytest.mark.parametrize("kind", [Sound, SoundGame])
def test_an_environment_without_faults_passes(kind: type[Sound]) -> None:
    report = check(kind)
    assert not report.faults, report.faults
    assert {score.policy: score.reward for score in report.scores}["reference, plain"] == 1.0


@pytest.mark.parametrize("kind", one_in(2, FAULTS), ids=lambda kind: kind.__name__)
def test_every_planted_fault_is_found(kind: type[Sound]) -> None:
    expected = FAULTS[kind]
    report = check(kind)
    assert expected in {finding.check for finding in report.faults}, report
