"""Check every environment of a configuration without a model."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from strop.base_config import to_tree
from strop.config import EvalRunConfig
from strop.config.schema.run_config import generation_section
from strop.environments.agents.agent_environment import AgentEnvironment
from strop.environments.resources import configure_resources, read_sections
from strop.extensions.checks.environments.check_report import EPISODE_CHECKS, EnvironmentReport
from strop.extensions.checks.environments.checked_environments import (
    CHECKED_RUNS,
    CheckedConfig,
    CheckedEnvironment,
    make_checked_environments,
)
from strop.extensions.checks.environments.reward_checks import RewardChecker, ScoringLimits
from strop.extensions.checks.environments.scripted_episode import CHARACTERS_PER_TOKEN
from strop.extensions.checks.environments.task_checks import (
    CheckedTask,
    check_same,
    check_splits,
    read_prompts,
    read_tasks,
    say_different,
    spread,
)
from strop.extensions.checks.environments.task_digests import digest_in_another_process


@dataclass(frozen=True)
class EnvironmentCheckOptions:
    """What to look at, and what counts as a fault."""

    tasks: int = 32
    bound: float = 0.5
    only: str | None = None
    skip: Collection[str] = ()


def check_environments(config: CheckedConfig, options: EnvironmentCheckOptions) -> list[EnvironmentReport]:
    """Check the environments of a configuration. Raises EnvironmentConfigError, DataError if they or their tasks cannot be made."""
    configure_resources(read_sections(config))  # before an environment asks for one
    checked = make_checked_environments(config, options.only)
    results = [check_environment(each, options, _read_limits(config, options)) for each in checked]
    reports = [report for report, _ in results]
    if "tasks_same" not in options.skip:
        _compare_with_another_process(config, checked, results)
    return reports


def check_environment(
    each: CheckedEnvironment, options: EnvironmentCheckOptions, limits: ScoringLimits
) -> tuple[EnvironmentReport, tuple[list[CheckedTask], list[str]]]:
    """Check one environment. Return the report, and the tasks that were looked at with their digests."""
    report = EnvironmentReport(each.name, type(each.environment).__name__, len(each.tasks), len(each.validation), 0)
    report.not_checked = dict.fromkeys(options.skip, "skipped")
    read = read_tasks(each.environment, each.tasks, spread(len(each.tasks), options.tasks), report)
    report.looked_at = len(read)
    digests: list[str] = []
    if read:
        digests = check_same(each.environment, each.tasks, each.rebuild or (lambda: each.tasks), read, report)
        compared = read_prompts(each.environment, each.tasks, report)
        check_splits(compared, read_prompts(each.environment, each.validation, report), report)
    if not each.validation:
        report.not_checked.setdefault("splits", "there are no validation tasks")
    if isinstance(each.environment, AgentEnvironment):
        report.leave_out(EPISODE_CHECKS, "an agent drives the episodes, and there is no model that could answer it")
    elif read:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asyncio.run(RewardChecker(each.environment, read, limits, report).check())
    report.findings = [finding for finding in report.findings if finding.check not in options.skip]
    return report, (read, digests)


def _compare_with_another_process(
    config: CheckedConfig,
    checked: Sequence[CheckedEnvironment],
    results: Sequence[tuple[EnvironmentReport, tuple[list[CheckedTask], list[str]]]],
) -> None:
    kind = next(name for name, root in CHECKED_RUNS.items() if type(config) is root)
    indices = {each.name: [one.index for one in read] for each, (_, (read, _)) in zip(checked, results, strict=True)}
    found = digest_in_another_process(kind, to_tree(config), indices)
    for each, (report, (read, digests)) in zip(checked, results, strict=True):
        if isinstance(found, str):
            report.note("tasks_same", f"not compared with another process, which failed: {found}")
        elif digests and each.name in found:
            say_different(read, digests, found[each.name], "made in another process", report)


def _read_limits(config: CheckedConfig, options: EnvironmentCheckOptions) -> ScoringLimits:
    """Return what the configuration allows: turns, and characters of an answer."""
    section = config.eval if isinstance(config, EvalRunConfig) else config.rollout_training
    new_tokens = generation_section(config)[1].max_new_tokens or 1024
    return ScoringLimits(max_turns=section.max_rollout_turns or 1, longest=CHARACTERS_PER_TOKEN * new_tokens, bound=options.bound)
