"""The samples of a run's validations: lists, single ones, and intervals of the scores."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from strop.extensions.evaluation.statistics import confidence_interval
from strop.extensions.view.rollout_answer import GROUP_TEXT, count_tokens, summarize_record, write_rollout
from strop.extensions.view.rollout_filter import RolloutFilter, natural_key
from strop.extensions.view.step_scalars import REWARDS
from strop.extensions.view.token_texts import read_stars
from strop.extensions.view.viewed_run import ViewedRun, ViewError
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.stored_files import DamagedRollouts
from strop.safety.printable import make_printable, shorten

FILES_KEPT = 2  # validations in memory
MOST_INTERVALS = 100  # validations that have them
MOST_TASKS = 500


class ValidationBrowser:
    """Answers about the validations of one run. Safe to use from several threads."""

    def __init__(self, run: ViewedRun) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[int, int], list[RolloutRecord]] = OrderedDict()  # by step and time of the file
        self._known_intervals: dict[tuple[int, int], dict[str, list[float]]] = {}

    def list_validations(self) -> list[dict[str, Any]]:
        """Return the stored validations with the metrics that were logged of each, and 95 % intervals of the newest over tasks."""
        steps = self.run.validation_steps()
        newest = set(steps[-MOST_INTERVALS:])
        return [
            {
                "step": step,
                "metrics": {name: value for name, value in self.run.metrics.at(step).items() if name.startswith("validation")},
                "intervals": self._intervals(step) if step in newest else {},
            }
            for step in steps
        ]

    def _intervals(self, step: int) -> dict[str, list[float]]:
        """Return low and high of the mean accuracy and reward over tasks; none of a file that cannot be read."""
        try:
            changed = self.run.validation().file(step).stat().st_mtime_ns
            if (step, changed) not in self._known_intervals:
                self._known_intervals[step, changed] = compute_intervals(self.read(step))
            return self._known_intervals[step, changed]
        except (ViewError, OSError):
            return {}

    def answered_steps(self) -> list[int]:
        return self.run.validation_steps()

    def read_answers(self, step: int) -> list[tuple[str, str]]:
        """Return the completion and the reference answer of each sample of a validation."""
        try:
            return [(record.completion, record.answer) for record in self.read(step)]
        except ViewError:
            return []

    def read(self, step: int) -> list[RolloutRecord]:
        """Return the samples of a validation. Raises ViewError."""
        samples = self.run.validation()
        try:
            changed = samples.file(step).stat().st_mtime_ns
            with self._lock:
                if (step, changed) not in self._records:
                    self._records[step, changed] = samples.read(step)
                self._records.move_to_end((step, changed))
                while len(self._records) > FILES_KEPT:
                    self._records.popitem(last=False)
                return self._records[step, changed]
        except FileNotFoundError:
            stored = self.run.validation_steps()
            known = f"stored are {', '.join(map(str, stored[:20]))}" if stored else "none are stored"
            raise ViewError(f"there is no validation of step {step}; {known}") from None
        except DamagedRollouts as error:
            raise ViewError(f"the validation of step {step}: {make_printable(error.brief)}", 422) from None
        except OSError as error:
            raise ViewError(f"the validation of step {step} cannot be read: {make_printable(str(error))[:200]}", 422) from None

    def page(self, step: int | None, wanted: RolloutFilter, order: str, text: str, first: int, limit: int) -> dict[str, Any]:
        """Return a page of the samples of a validation, by default the newest."""
        steps = self.run.validation_steps()
        if step is None and wanted.steps is not None:
            step = max((each for each in steps if wanted.steps[0] <= each <= wanted.steps[1]), default=wanted.steps[0])
        if step is None:
            if not steps:
                return {"total": 0, "from": first, "rows": [], "searched": None, "step": None}
            step = steps[-1]
        found = [record for record in self.read(step) if _matches(record, wanted) and _has_text(record, text)]
        found = _sort(found, order)
        stars = read_stars(self.run.folder)
        rows = [
            {
                **summarize_record(record, starred=(True, step, record.group, record.sample) in stars),
                "text": make_printable(shorten(record.completion, GROUP_TEXT, around="\n")),
                "metrics": {name: value for name, value in record.metrics.items() if math.isfinite(value)},
            }
            for record in found[first : first + min(limit, MOST_TASKS)]
        ]
        parts = sorted({make_printable(name) for record in found for name in record.rewards})
        return {"total": len(found), "from": first, "rows": rows, "searched": None, "step": step, "parts": parts}

    def rollout(self, step: int, group: int, sample: int) -> dict[str, Any]:
        """Return one sample. Raises ViewError."""
        for record in self.read(step):
            if (record.group, record.sample) == (group, sample):
                starred = (True, step, group, sample) in read_stars(self.run.folder)
                return write_rollout(record, summarize_record(record, starred=starred), None)
        raise ViewError(f"the validation of step {step} has no sample {sample} of task {group}")


def compute_intervals(records: Sequence[RolloutRecord]) -> dict[str, list[float]]:
    """Return 95 % intervals of the means over tasks, each that of its samples."""
    accuracies, rewards = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for record in records:
        if "accuracy" in record.metrics:
            accuracies[record.group].append(record.metrics["accuracy"])
            rewards[record.group].append(record.reward)
    intervals = {}
    for name, by_task, bounds in (("accuracy", accuracies, (0.0, 1.0)), ("reward", rewards, None)):
        means = [sum(values) / len(values) for values in by_task.values()]
        if len(means) > 1 and (bounds is None or all(0 <= mean <= 1 for mean in means)):
            found = confidence_interval(means, bounds=bounds)
            intervals[f"validation/{name}"] = [found.low, found.high]
    return intervals


def _matches(record: RolloutRecord, wanted: RolloutFilter) -> bool:
    tokens, reward = count_tokens(record), record.rewards.get(wanted.part) if wanted.part else record.reward
    in_range = all(
        (low is None or (value is not None and value >= low)) and (high is None or (value is not None and value <= high))
        for value, (low, high) in ((reward, wanted.reward), (tokens, wanted.tokens))
    )
    return (
        in_range
        and wanted.task in (None, record.task_id)
        and wanted.environment in (None, record.environment)
        and wanted.ending in (None, record.ending)
        and wanted.answer in (None, record.answer)
    )


def _has_text(record: RolloutRecord, text: str) -> bool:
    if not text:
        return True
    low = text.lower()
    prompt = (message.get("content") or "" for message in record.prompt_messages)
    return any(low in (each or "").lower() for each in (record.completion, record.answer, record.error, *prompt))


def _sort(records: Sequence[RolloutRecord], order: str) -> list[RolloutRecord]:
    name, falling = order.removeprefix("-"), order.startswith("-")
    if name in ("task", "answer"):
        return sorted(records, key=lambda each: natural_key(each.task_id if name == "task" else each.answer), reverse=falling)
    if name == "tokens":
        return sorted(records, key=count_tokens, reverse=falling)
    if name not in ("reward", *(f"{REWARDS}{each}" for record in records for each in record.rewards)):
        return list(records)

    def key(record: RolloutRecord) -> float:
        value = record.reward if name == "reward" else record.rewards.get(name.removeprefix(REWARDS), math.nan)
        return math.inf if math.isnan(value) else -value if falling else value

    return sorted(records, key=key)
