"""The rollouts of a run: lists, single ones, groups and tasks, from the index and from a few rows of the files."""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strop.endings import Ending
from strop.extensions.view.rollout_answer import (
    make_preview_text,
    summarize_record,
    write_group,
    write_rollout,
)
from strop.extensions.view.rollout_filter import (
    COLUMNS,
    FoundRollouts,
    RolloutFilter,
    TextSearch,
    find_rollouts,
)
from strop.extensions.view.rollout_index import iter_texts, read_rows, read_values
from strop.extensions.view.step_scalars import StepScalars
from strop.extensions.view.task_counts import TaskCount, count_tasks, make_question, sort_tasks
from strop.extensions.view.token_texts import TokenTexts, read_stars
from strop.extensions.view.viewed_run import ViewedRun, ViewError, clean_number
from strop.monitoring.rollout_store.rollout_flags import FlaggedRollouts
from strop.monitoring.rollout_store.rollout_record import RolloutRecord
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_files import DamagedRollouts
from strop.monitoring.trackers.rollout_media import join_turns
from strop.safety.printable import make_printable

log = logging.getLogger(__name__)

MOST_ROWS = 500  # of a page
FOUND_KEPT = 4  # results of filters that are kept, each about 8 bytes for each rollout
SEARCHES_KEPT = 8
STEPS_OF_A_TASK = 60
FAILURES = frozenset(ending.value for ending in Ending if ending.is_failure)
WORST_TASKS = 5
STEPS_AT_ONCE = 20  # that an answer waits for; others are indexed in the background
Row = tuple[StepScalars, int]


class RolloutBrowser:
    """Answers about the stored rollouts of one run. Safe to use from several threads."""

    def __init__(self, run: ViewedRun, texts: TokenTexts) -> None:
        self.run, self._index, self._texts = run, run.rollouts, texts
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[Any, ...], FoundRollouts] = OrderedDict()
        self._searches: OrderedDict[tuple[Any, ...], TextSearch] = OrderedDict()
        self._indexing: threading.Thread | None = None
        self._tasks: tuple[int, dict[str, TaskCount]] = (-1, {})

    def list_rollouts(self, wanted: RolloutFilter, order: str, text: str, first: int, limit: int) -> dict[str, Any]:
        """Return a page of the rollouts that a filter asks for."""
        self.prepare(wanted)
        if self._index.steps():
            self._texts.prepare(self._config())
        done, stored = self._index.progress()  # before the look: what is indexed meanwhile is for the next answer
        found = self.find(wanted, order)
        searched = None
        if text:
            search = self._open_search(wanted, text)
            searched = search.go_on(found)
            found = search.found(found)
        rows = found.take(first, min(limit, MOST_ROWS))
        return {
            "total": len(found),
            "from": first,
            "rows": self.summarize(rows),
            "searched": searched,
            "indexed": {"steps": done, "of": stored, "complete": done == stored},
            "parts": self.reward_names(),
            "unreadable": [make_printable(why) for _, why in sorted(self._index.unreadable().items())][:20],
        }

    def reward_names(self) -> list[str]:
        return sorted({make_printable(name) for segment in self._index.segments() for name in segment.scalars.rewards})

    def prepare(self, wanted: RolloutFilter) -> None:
        """Index what is asked for, at once if it is a few steps; the rest goes on in the background."""
        steps = self._index.steps()
        if wanted.steps is not None:
            near = [step for step in steps if wanted.steps[0] <= step <= wanted.steps[1]]
            self._index.ensure(near[-STEPS_AT_ONCE:])
        else:
            self._index.ensure(steps if len(steps) <= STEPS_AT_ONCE else (steps[0], *steps[-STEPS_AT_ONCE:]))
        self.index_beside()

    def index_beside(self) -> None:
        """Index all steps in a thread, unless they are indexed."""
        with self._lock:
            if self._indexing is not None and self._indexing.is_alive():
                return
            done, stored = self._index.progress()
            if done == stored:
                return
            self._indexing = threading.Thread(target=self._index_all, name=f"index of {self.run.id}", daemon=True)
            self._indexing.start()

    def _index_all(self) -> None:
        try:
            self._index.update()
        except Exception:
            log.exception("the rollouts of %s cannot be indexed", self.run.folder)

    def find(self, wanted: RolloutFilter, order: str) -> FoundRollouts:
        key = (self._index.version, wanted, order)
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
        found = find_rollouts(self._index.segments(), wanted, order)
        with self._lock:
            for old in [other for other in self._found if other[0] != key[0]]:  # of an index that has grown since
                del self._found[old]
            self._found[key] = found
            while len(self._found) > FOUND_KEPT:
                self._found.popitem(last=False)
        return found

    def _open_search(self, wanted: RolloutFilter, text: str, columns: Sequence[str] = COLUMNS) -> TextSearch:
        """Return the search for a text among rollouts: the same one that an earlier request began."""
        key = (wanted, text, columns)
        with self._lock:
            search = self._searches.get(key)
            if search is None:
                search = self._searches[key] = TextSearch(self._index, text, columns)
            self._searches.move_to_end(key)
            while len(self._searches) > SEARCHES_KEPT:
                self._searches.popitem(last=False)
        return search

    def summarize(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """Return summaries: numbers from the index, previews and rewards by name from the rows of the files."""
        places: dict[int, list[int]] = defaultdict(list)
        for scalars, row in rows:
            places[int(scalars.numbers["step"][row])].append(int(scalars.numbers["row"][row]))
        names = ("group", "sample", "rewards", "completion", "turns")
        read = {step: self._read_values(step, numbers, names) for step, numbers in places.items()}
        flags = {step: self._flags(step) for step in places}
        stars = read_stars(self.run.folder)
        summaries = []
        for scalars, row in rows:
            step, group, sample, place = (int(scalars.numbers[name][row]) for name in ("step", "group", "sample", "row"))
            task = scalars.word("task_id", row)
            values = read[step].get(place, {})
            if (values.get("group", group), values.get("sample", sample)) != (group, sample):
                values = {}  # the step was written again since it was indexed
            summaries.append(
                {
                    "step": step,
                    "group": group,
                    "sample": sample,
                    "env": make_printable(scalars.word("environment", row)),
                    "task": make_printable(task),
                    "reward": clean_number(scalars.numbers["reward"][row]),
                    "rewards": {str(name): clean_number(value) for name, value in dict(values.get("rewards") or ()).items()},
                    "answer": make_printable(scalars.word("answer", row)),
                    "advantage": clean_number(scalars.numbers["advantage"][row]),
                    "tokens": int(scalars.numbers["tokens"][row]),
                    "ending": scalars.word("ending", row),
                    "kept": bool(scalars.numbers["kept"][row]),
                    "dropped_because": scalars.word("dropped_because", row) or None,
                    "preview": make_preview_text(join_turns(values.get("turns"), values.get("completion"))),
                    "starred": (False, step, group, sample) in stars,
                    "flags": list(flags[step].get((task, sample), ())),
                }
            )
        return summaries

    def _read_values(self, step: int, places: Sequence[int], names: Sequence[str]) -> Mapping[int, Mapping[str, Any]]:
        """Return columns of rollouts of a step; none if its file cannot be read any more."""
        path = self._index.file(step)
        try:
            return {} if path is None else read_values(path, places, names)
        except (OSError, ValueError):
            return {}

    def _flags(self, step: int) -> FlaggedRollouts:
        if step not in self._index.flagged_steps():
            return {}
        try:
            return RolloutStore(self.run.folder, "none").read_flags(step)
        except (OSError, ValueError, TypeError):
            return {}

    def read(self, step: int, group: int, sample: int) -> dict[str, Any]:
        """Return one rollout with everything that is stored of it. Raises ViewError."""
        rows = self._locate(step, group)
        chosen = [(scalars, row) for scalars, row in rows if scalars.numbers["sample"][row] == sample]
        if not chosen:
            raise ViewError(f"step {step} has no sample {sample} of group {group}")
        (record,) = self._read_records(step, chosen)
        config = self._config()
        pieces = self._texts.split(config, record.tokens)
        answer = write_rollout(record, self._summarize_records([record])[0], pieces)
        return {**answer, "pieces_pending": pieces is None and self._texts.is_pending(config)}

    def read_group(self, step: int, group: int) -> dict[str, Any]:
        """Return the rollouts of a group side by side. Raises ViewError."""
        records = self._read_records(step, self._locate(step, group))
        return write_group(records, self._summarize_records(records))

    def _config(self) -> Mapping[str, Any]:
        try:
            return self.run.config()
        except ViewError:
            return {}

    def _locate(self, step: int, group: int) -> list[Row]:
        self._index.ensure((step,))
        for segment in self._index.segments():
            if step in segment.unreadable:
                raise ViewError(make_printable(segment.unreadable[step]), 422)
            if step in segment.stamps:
                numbers = segment.scalars.numbers
                rows = np.flatnonzero((numbers["step"] == step) & (numbers["group"] == group))
                if len(rows):
                    return [(segment.scalars, int(row)) for row in rows]
                stored_groups = numbers["group"][numbers["step"] == step]
                raise ViewError(f"step {step} has no group {group}{_name_range(stored_groups)}")
        stored = self._index.steps()
        known = f"stored are {len(stored)} steps, {stored[0]} to {stored[-1]}" if stored else "none are stored"
        raise ViewError(f"there are no rollouts of step {step}; {known}")

    def _read_records(self, step: int, rows: Sequence[Row]) -> list[RolloutRecord]:
        path = self._index.file(step)
        try:
            if path is None:
                raise FileNotFoundError
            records = read_rows(path, step, [int(scalars.numbers["row"][row]) for scalars, row in rows])
        except FileNotFoundError:
            raise ViewError(f"the rollouts of step {step} are gone", 410) from None
        except DamagedRollouts as error:
            raise ViewError(make_printable(error.brief), 422) from None
        except OSError as error:
            name = Path(path).name if path is not None else f"step {step}"
            raise ViewError(f"{name} cannot be read: {make_printable(error.strerror or str(error))[:200]}", 422) from None
        expected = {(int(scalars.numbers["group"][row]), int(scalars.numbers["sample"][row])) for scalars, row in rows}
        if not records or {(record.group, record.sample) for record in records} != expected:
            raise ViewError(f"step {step} has just been written again; ask once more", 409)
        return records

    def _summarize_records(self, records: Iterable[RolloutRecord]) -> list[dict[str, Any]]:
        stars = read_stars(self.run.folder)
        return [
            summarize_record(
                record,
                starred=(False, record.step, record.group, record.sample) in stars,
                flags=self._flags(record.step).get((record.task_id, record.sample), ()),
            )
            for record in records
        ]

    def answered_steps(self) -> list[int]:
        return self._index.steps()

    def read_answers(self, step: int) -> Iterator[tuple[str, str]]:
        """Yield the completion and the reference answer of each rollout of a step."""
        try:
            path = self._index.file(step)
            for _, table in iter_texts(path, ("completion", "answer")) if path is not None else ():
                columns = [
                    table[name].to_pylist() if name in table.column_names else [""] * len(table)
                    for name in ("completion", "answer")
                ]
                yield from ((text or "", reference or "") for text, reference in zip(*columns, strict=True))
        except (OSError, ValueError):  # damaged, or removed; the list of rollouts says so
            return

    def list_tasks(self, text: str, order: str, first: int, limit: int) -> dict[str, Any]:
        """Return the tasks whose names or prompts hold a text, with how often they were sampled, their mean reward, how it changed, and
        what they ask. ``order``: task, rollouts, reward, change or last_step, falling after a minus.
        """
        self.prepare(RolloutFilter())
        done, stored = self._index.progress()  # before the look, as in a list of rollouts
        counts = self._count_tasks()
        searched = None
        if text:
            found = self.find(RolloutFilter(), "step")
            search = self._open_search(RolloutFilter(), text, ("prompt",))
            searched = search.go_on(found)
            rows = search.found(found)
            asked = {scalars.word("task_id", row) for scalars, row in rows.take(0, len(rows))}
            counts = {name: task for name, task in counts.items() if name in asked or text.lower() in name.lower()}
        names = sort_tasks(counts, order)
        shown = names[first : first + min(limit, MOST_ROWS)]
        questions = self._read_questions(shown)
        return {
            "total": len(names),
            "from": first,
            "rows": [
                {"task": make_printable(name), "question": questions.get(name, ""), **counts[name].describe()} for name in shown
            ],
            "searched": searched,
            "indexed": {"steps": done, "of": stored, "complete": done == stored},
        }

    def _read_questions(self, names: Sequence[str]) -> dict[str, str]:
        """Return what tasks ask, from their newest rollouts."""
        places: dict[int, dict[int, str]] = defaultdict(dict)
        missing = set(names)
        for segment in reversed(self._index.segments()):
            if not missing:
                break
            scalars = segment.scalars
            words = scalars.words["task_id"]
            for code in [code for code, word in enumerate(words) if word in missing]:
                rows = np.flatnonzero(scalars.codes["task_id"] == code)
                if len(rows):
                    missing.discard(words[code])
                    places[int(scalars.numbers["step"][rows[-1]])][int(scalars.numbers["row"][rows[-1]])] = words[code]
        questions = {}
        for step, rows_of in places.items():
            for row, values in self._read_values(step, list(rows_of), ("prompt_messages", "prompt")).items():
                questions[rows_of[row]] = make_question(values.get("prompt_messages") or (), values.get("prompt") or "")
        return questions

    def _count_tasks(self) -> dict[str, TaskCount]:
        version, segments = self._index.version, self._index.segments()
        with self._lock:
            if self._tasks[0] == version:
                return self._tasks[1]
        counts: dict[str, TaskCount] = {}
        for segment in segments:
            for word, count in count_tasks(segment.scalars):
                counts[word] = counts[word].join(count) if word in counts else count
        with self._lock:
            self._tasks = (version, counts)
        return counts

    def list_failures(self) -> list[dict[str, Any]]:
        """Return the endings of the indexed rollouts that are failures, the most frequent first, with the tasks that failed most often."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for segment in self._index.segments():
            scalars = segment.scalars
            endings, tasks = scalars.words["ending"], scalars.words["task_id"]
            pairs = np.stack([scalars.codes["ending"], scalars.codes["task_id"]]).astype(np.int64)
            places, counts = np.unique(pairs, axis=1, return_counts=True)
            for ending, task, count in zip(*places.tolist(), counts.tolist(), strict=True):
                if endings[ending] in FAILURES:
                    found[endings[ending]][tasks[task]] += count
        sampled = self._count_tasks()
        total = sum(task.rollouts for task in sampled.values())
        return [
            {
                "ending": ending,
                "who": Ending(ending).who,
                "meaning": Ending(ending).meaning,
                "rollouts": failed.total(),
                "share": failed.total() / total,
                "worst": [
                    {"task": make_printable(task), "failed": count, "rollouts": sampled[task].rollouts}
                    for task, count in failed.most_common(WORST_TASKS)
                ],
            }
            for ending, failed in sorted(found.items(), key=lambda each: -each[1].total())
        ]

    def follow_task(self, task: str, limit: int) -> list[dict[str, Any]]:
        """Return the rollouts of a task by step: of at most ``limit`` steps, spread over all that have it."""
        self.prepare(RolloutFilter())
        by_step: dict[int, list[Row]] = defaultdict(list)
        found = self.find(RolloutFilter(task=task), "step")
        for scalars, row in found.take(0, len(found)):
            by_step[int(scalars.numbers["step"][row])].append((scalars, row))
        if not by_step:
            raise ViewError(f"no rollout of the task {make_printable(task)[:200]!r} is stored, or it is not indexed yet")
        steps = sorted(by_step)
        limit = min(max(limit, 1), STEPS_OF_A_TASK)
        if len(steps) > limit:
            steps = [steps[place] for place in np.unique(np.linspace(0, len(steps) - 1, limit).round().astype(int))]
        answer = []
        for step in steps:
            try:
                records = self._read_records(step, by_step[step])
            except ViewError:
                continue
            answer.append({"step": step, **write_group(records, self._summarize_records(records))})
        return answer


def _name_range(groups: np.ndarray) -> str:
    return f"; it has groups {groups.min()} to {groups.max()}" if len(groups) else ""
