"""Every planted fault is found, and what has none passes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from strop.config import GrpoRunConfig, load_config
from strop.data.sources.source import DataSource
from strop.extensions.checks.environments.check_report import EnvironmentReport
from strop.extensions.checks.environments.checked_environments import CheckedEnvironment
from strop.extensions.checks.environments.environment_check import EnvironmentCheckOptions, check_environment, check_environments
from strop.extensions.checks.environments.reward_checks import ScoringLimits
from support import planted_faults
from support.planted_faults import ELSEWHERE, FAULTS, Sound, SoundGame

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
    return check_environment(each, EnvironmentCheckOptions(tasks=20), LIMITS)[0]


@pytest.mark.parametrize("kind", [Sound, SoundGame])
def test_an_environment_without_faults_passes(kind: type[Sound]) -> None:
    report = check(kind)
    assert not report.faults, report.faults
    assert {score.policy: score.reward for score in report.scores}["reference, plain"] == 1.0


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
def test_every_planted_fault_is_found(kind: type[Sound]) -> None:
    expected = FAULTS[kind]
    report = check(kind)
    assert expected in {finding.check for finding in report.faults}, report


def test_tasks_that_depend_on_hash_seeds_are_found_in_another_process(tmp_path: Path) -> None:
    code = Path(planted_faults.__file__).as_posix()
    config = load_config(
        None,
        [
            "policy.model_name=nothing",
            *(f"env.{kind.__name__}.type={code}:{kind.__name__}" for kind in (Sound, *ELSEWHERE)),
            f"data.train=[{', '.join(f'{{env_name: {kind.__name__}, size: 20}}' for kind in (Sound, *ELSEWHERE))}]",
        ],
        root=GrpoRunConfig,
        check=False,
    ).config
    random.seed(5)
    reports = check_environments(config, EnvironmentCheckOptions(tasks=6, skip=("degenerate",)))
    found = {report.name: [finding.check for finding in report.faults] for report in reports}
    assert found == {"Sound": [], **{kind.__name__: [check] for kind, check in ELSEWHERE.items()}}, reports
