"""Check every environment of a configuration without a model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from strop.base_config import to_tree
from strop.build.env_check.check_report import EPISODE_CHECKS, EnvironmentReport
from strop.build.env_check.checked_environments import CHECKED_RUNS, CheckedConfig, CheckedEnvironment, make_checked_environments
from strop.build.env_check.episode_checks import check_global_state, check_leaks, check_respond, check_session, check_turns
from strop.build.env_check.process_state import describe_changes, read_global_state, restore_global_state
from strop.build.env_check.reward_checks import RewardChecker, ScoringLimits
from strop.build.env_check.scripted_episode import CHARACTERS_PER_TOKEN
from strop.build.env_check.task_checks import (
    CheckedTask,
    check_distinct,
    check_lengths,
    check_same,
    check_splits,
    read_prompt,
    read_prompts,
    read_tasks,
    say_different,
    spread,
)
from strop.build.env_check.task_checks import (
    check_leaks as check_prompt_leaks,
)
from strop.build.env_check.task_digests import digest_in_another_process
from strop.build.env_check.time_limit import NeverReturned, run_limited
from strop.config import EvalRunConfig
from strop.config.schema.run_config import generation_section
from strop.models.tokenizer_config import TokenizerConfig
from strop.sandbox.sandbox_pool import configure_sandbox
from strop.types import Task

CountTokens = Callable[[Task], int]


@dataclass(frozen=True)
class EnvironmentCheckOptions:
    """What to look at, and what counts as a fault."""

    tasks: int = 32
    bound: float = 0.5
    slow_seconds: float = 1.0
    only: str | None = None
    skip: Collection[str] = ()


def check_environments(config: CheckedConfig, options: EnvironmentCheckOptions) -> list[EnvironmentReport]:
    """Check the environments of a configuration. Raises EnvironmentConfigError, DataError if they or their tasks cannot be made."""
    configure_sandbox(config.sandbox)  # before an environment asks for it
    checked = make_checked_environments(config, options.only)
    results = [check_environment(each, options, *_read_limits(config, each, options)) for each in checked]
    reports = [report for report, _ in results]
    if "tasks_same" not in options.skip:
        _compare_with_another_process(config, checked, results)
    return reports


def check_environment(
    each: CheckedEnvironment,
    options: EnvironmentCheckOptions,
    limits: ScoringLimits,
    count_tokens: CountTokens | None = None,
    max_prompt: int = 1_000_000,
) -> tuple[EnvironmentReport, tuple[list[CheckedTask], list[str]]]:
    """Check one environment. Return the report, and the tasks that were looked at with their digests."""
    report = EnvironmentReport(each.name, each.environment.title, len(each.tasks), len(each.validation), 0)
    report.not_checked = dict.fromkeys(options.skip, "skipped")
    before = read_global_state()
    read = read_tasks(each.environment, each.tasks, spread(len(each.tasks), options.tasks), report)
    report.looked_at = len(read)
    if changed := describe_changes(before, read_global_state()):
        report.fault("global_state", f"making tasks changed {', '.join(changed)}, which every other part of the run shares")
        restore_global_state(before)
    digests: list[str] = []
    if read:
        digests = check_same(each.environment, each.tasks, each.rebuild or (lambda: each.tasks), read, report)
        compared = read_prompts(each.environment, each.tasks, report)
        check_distinct(each.environment, compared, report)
        check_splits(compared, read_prompts(each.environment, each.validation, report), report)
        check_prompt_leaks(read, report)
        if count_tokens is not None:
            check_lengths(read, count_tokens, max_prompt, report)
    if count_tokens is None:
        report.not_checked.setdefault("prompt_length", "the model's tokenizer is not on this machine")
    if not each.validation:
        report.not_checked.setdefault("splits", "there are no validation tasks")
    if each.environment.is_agent:
        report.leave_out(EPISODE_CHECKS, "an agent drives the episodes, and there is no model that could answer it")
    elif read:
        try:
            run_limited(_check_episodes(each, read, limits, report, options.skip))
        except NeverReturned as error:
            report.leave_out(EPISODE_CHECKS, "the checks of episodes were not finished")
            report.hung = True
            report.fault("episode_ends", str(error))
    report.findings = [finding for finding in report.findings if finding.check not in options.skip]
    return report, (read, digests)


async def _check_episodes(
    each: CheckedEnvironment, read: Sequence[CheckedTask], limits: ScoringLimits, report: EnvironmentReport, skip: Collection[str]
) -> None:
    environment = each.environment
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await check_global_state(environment, read[0], limits, report)
        texts = await RewardChecker(environment, read, limits, report).check()
        check_turns(environment, texts, limits, report)
        await check_respond(environment, read, texts, limits, report)
        if "session" not in skip:
            await check_session(environment, read[0], report)
        if "leaks" in skip:
            return
        if not os.path.exists("/proc/self/fd"):
            report.not_checked["leaks"] = "this system has no /proc"
            return
        await check_leaks(environment, read, limits, report)


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
            say_different(read, digests, found[each.name], "made in another process, on another day", report)


def _read_limits(
    config: CheckedConfig, each: CheckedEnvironment, options: EnvironmentCheckOptions
) -> tuple[ScoringLimits, CountTokens | None, int]:
    """Return what the configuration allows: turns, characters, and tokens of a prompt."""
    section: TokenizerConfig
    new_tokens = generation_section(config)[1].max_new_tokens
    if isinstance(config, EvalRunConfig):
        turns, longest, most = config.eval.max_rollout_turns or 1, None, None
        name, section = config.generation.model_name, config.tokenizer
    else:
        turns, longest, most = (
            config.rollout_training.max_rollout_turns,
            config.policy.max_total_sequence_length,
            config.data.max_input_seq_length,
        )
        name, section = config.policy.model_name, config.policy.tokenizer
    limits = ScoringLimits(
        max_turns=turns,
        longest=CHARACTERS_PER_TOKEN * (new_tokens or 1024),
        bound=options.bound,
        slow_seconds=options.slow_seconds,
    )
    fits = [limit for limit in (most, None if longest is None else longest - 1) if limit is not None]
    return limits, _make_counter(config, each, name, section), min(fits, default=1_000_000)


def _make_counter(config: CheckedConfig, each: CheckedEnvironment, model: str, section: Any) -> CountTokens | None:
    """Return what counts the tokens of a prompt, or None if the tokenizer is not on this machine."""
    from strop.build.data_check.row_tokens import make_check_template
    from strop.models.loading import ModelNotFound, load_tokenizer

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokenizer = load_tokenizer(
                getattr(section, "name", None) or model, chat_template=getattr(section, "chat_template", None)
            )
            template = make_check_template(config, model, tokenizer)
    except (ModelNotFound, OSError, ValueError):
        return None
    return lambda task: len(template.encode_with_images(read_prompt(each.environment, task)).tokens)
