"""Everything that a report of a run says, read from its log folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.source import yaml_text
from strop.monitoring.config_history import read_finish
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.token_ratios import TokenRatio
from strop.monitoring.run_lines import Steps
from strop.monitoring.run_starts import RunStart, read_run_starts
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.monitoring.watchdog.doctor import find_run, find_verdict
from strop.monitoring.watchdog.status import Status, read_status
from strop.runs.contents.run_contents import CONTENTS_FILE, read_contents
from strop.runs.run_report.config_difference import ChangedSetting, find_section, list_changed_settings
from strop.runs.run_report.run_incidents import Incident, list_incidents
from strop.runs.run_report.sample_pairs import SamplePairs, find_sample_pairs
from strop.runs.run_report.validation_results import ValidationResults, read_validations
from strop.safety.redaction import redact_yaml

WORST_TOKENS = 8
NOT_HELD = ("data", "file", "code")  # kinds of contents


class NoReport(ValueError):
    """There is nothing to report on. The message says what was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """A run as a report shows it. What the run did not store is None or empty, and the report says so."""

    folder: Path
    config: Mapping[str, Any]  # nested; empty if it cannot be read
    config_text: str
    section: str | None  # the command: grpo, sft, ...
    changed: Sequence[ChangedSetting] | None
    steps: Steps
    status: Status | None
    ended: str  # how the run stands, in words
    starts: Sequence[RunStart]
    validations: ValidationResults | None
    pairs: SamplePairs | None
    unread: Sequence[str]  # why samples were passed over
    worst_tokens: Sequence[TokenRatio]
    incidents: Sequence[Incident]

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.folder.resolve().name)

    @property
    def versions(self) -> Mapping[str, str]:
        return self.starts[-1].versions if self.starts else self.status.versions if self.status else {}

    @property
    def command(self) -> str:
        """The command that started the run, as it was typed; empty if it is not known."""
        return self.starts[0].command if self.starts else self.status.command if self.status else ""

    def find_setting(self, *keys: str) -> Any:
        """Return a value of the configuration by its path; None if it is not there."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def read_report_facts(run: Path) -> ReportFacts:
    """Read a run, also while it is running. Raises NoReport, and RunNotFound for a folder that holds no run."""
    folder = find_run(run)
    try:
        steps = read_metrics(folder / METRICS_FILE)
    except FileNotFoundError:
        steps = []
    if not steps:
        raise NoReport(
            f"{folder} has no metrics yet: the run has not finished its first step; try again after it, or see strop doctor {folder}"
        )
    text = redact_yaml(_read_text(folder / "config.yaml"))
    pairs, unread = find_sample_pairs(folder)
    config = _parse_config(text)
    status, starts = _read_status(folder), read_run_starts(folder)
    return ReportFacts(
        folder=folder,
        config=config,
        config_text=text,
        section=find_section(config),
        changed=list_changed_settings(config),
        steps=steps,
        status=status,
        ended=_describe_end(folder, status),
        starts=starts,
        validations=read_validations(folder),
        pairs=pairs,
        unread=unread,
        worst_tokens=_read_worst_tokens(folder),
        incidents=list_incidents(folder, steps, status, starts),
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parse_config(text: str) -> Mapping[str, Any]:
    try:
        values = yaml_text.parse_value(text)
    except yaml_text.YamlError:
        return {}
    return values if isinstance(values, Mapping) else {}


def _read_status(folder: Path) -> Status | None:
    try:
        return read_status(folder)
    except (OSError, ValueError):  # of another version
        return None


def _describe_end(folder: Path, status: Status | None) -> str:
    ends = {"steps": "after its last step", "tasks": "when its tasks were used up", "early_stop": "by early stopping"}
    finish = read_finish(folder)
    if finish is not None:
        return f"finished {ends[finish.end]}, {finish.time}"
    verdict = "unknown" if status is None else find_verdict(status)[0]
    return {"dead": "died before its end", "hung": "hangs"}.get(verdict, verdict)


def _read_worst_tokens(folder: Path) -> Sequence[TokenRatio]:
    """Return the tokens of the newest step on which sampler and learner differ most."""
    try:
        store = RolloutStore(folder, "none")
        stored = store.steps()
        return store.read_ratios(stored[-1])[:WORST_TOKENS] if stored else ()
    except (OSError, ValueError, TypeError, KeyError):
        return ()


def list_repeat_commands(facts: ReportFacts) -> list[str]:
    """Return the lines that repeat a run: with the packages it had, with its configuration, which the report holds, and with the files that
    it names, which the report does not hold."""
    versions = facts.versions
    packages = {name: version for name, version in versions.items() if name not in ("python", "strop")}
    lines = []
    if packages:
        lines.append(f"# Python {versions.get('python', '?')}; in a checkout of Strop {versions.get('strop', '?')}:")
        builds = [f"{name} {version}" for name, version in packages.items() if "+" in version]
        if builds:
            lines.append(f"# it had {', '.join(builds)}: builds of another index than pip's own")
        pinned = [f"{name}=={version.partition('+')[0]}" for name, version in packages.items()]
        lines.append(f"pip install -e . {shlex.join(pinned)}")
    if facts.section is not None:
        files = [content for content in read_contents(facts.folder / CONTENTS_FILE).values() if content.kind in NOT_HELD]
        if files:
            lines.append("# what config.yaml names and this page does not hold, as it was:")
            lines += [f"#   {content}" for content in dict.fromkeys(files)]
        lines += [
            "# config.yaml: the configuration below, as it was resolved; choose folders of your own",
            f"strop {facts.section} --config config.yaml logger.log_dir=logs/again checkpointing.checkpoint_dir=results/again",
        ]
    return lines
