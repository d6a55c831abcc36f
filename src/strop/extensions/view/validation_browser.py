"""The validations of a run and their samples, as their files have them."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from strop.extensions.view.rollout_answer import GROUP_TEXT, count_tokens, summarize_record, write_rollout
from strop.extensions.view.rollout_index.rollout_filter import RolloutFilter
from strop.extensions.view.star_file import read_stars
from strop.extensions.view.view_error import ViewError
from strop.extensions.view.viewed_run import ViewedRun
from strop.monitoring.rollout_store.damaged_rollouts import DamagedRollouts
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.safety.printable import make_printable, shorten

FILES_KEPT = 2  # validations in memory
MOST_ROWS = 500


class ValidationBrowser:
    """Answers about the validations of one run. Safe to use from several threads."""

    def __init__(self, run: ViewedRun) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[int, int], list[RolloutRecord]] = OrderedDict()  # by step and time of the file

    def list_validations(self) -> list[dict[str, Any]]:
        """Return the stored validations with the metrics that were logged of each."""
        return [
            {
                "step": step,
                "metrics": {name: value for name, value in self.run.metrics.at(step).items() if name.startswith("validation")},
            }
            for step in self.run.validation_steps()
        ]

    def read(self, step: int) -> list[RolloutRecord]:
        """Return the samples of a validation. Raises ViewError."""
        samples = self.run.validation()
        try:
            changed = (samples.folder / f"step_{step:06d}.json").stat().st_mtime_ns
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
                "answer": make_printable(record.answer),
                "metrics": {name: value for name, value in record.metrics.items() if math.isfinite(value)},
            }
            for record in found[first : first + min(limit, MOST_ROWS)]
        ]
        return {"total": len(found), "from": first, "rows": rows, "searched": None, "step": step}

    def rollout(self, step: int, group: int, sample: int) -> dict[str, Any]:
        """Return one sample. Raises ViewError."""
        for record in self.read(step):
            if (record.group, record.sample) == (group, sample):
                starred = (True, step, group, sample) in read_stars(self.run.folder)
                return write_rollout(record, summarize_record(record, starred=starred), None)
        raise ViewError(f"the validation of step {step} has no sample {sample} of task {group}")


def _matches(record: RolloutRecord, wanted: RolloutFilter) -> bool:
    tokens = count_tokens(record)
    in_range = all(
        (low is None or value >= low) and (high is None or value <= high)
        for value, (low, high) in ((record.reward, wanted.reward), (tokens, wanted.tokens))
    )
    return (
        in_range
        and wanted.task in (None, record.task_id)
        and wanted.environment in (None, record.environment)
        and wanted.ending in (None, record.ending)
    )


def _has_text(record: RolloutRecord, text: str) -> bool:
    if not text:
        return True
    low = text.lower()
    prompt = (message.get("content") or "" for message in record.prompt_messages)
    return any(low in (each or "").lower() for each in (record.completion, record.answer, record.error, *prompt))


def _sort(records: Sequence[RolloutRecord], order: str) -> list[RolloutRecord]:
    name, sign = order.removeprefix("-"), -1.0 if order.startswith("-") else 1.0
    if name == "reward":
        return sorted(records, key=lambda record: math.inf if math.isnan(record.reward) else sign * record.reward)
    return sorted(records, key=lambda record: sign * count_tokens(record)) if name == "tokens" else list(records)
