"""The questions of evaluation sets, which training data is compared with."""

from __future__ import annotations

import re
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from strop.config import EvalRunConfig
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.sources.peek import is_on_this_machine
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment
from strop.extensions.checks.checked_entries import (
    STREAMED_ROWS,
    CheckableConfig,
    EntryPlace,
    OpenedEntry,
    list_entries,
    open_entry,
)
from strop.extensions.checks.data_report import MOST_EXAMPLES, DataFinding, DataReport, EntryReport, FaultyRow, Lengths
from strop.extensions.checks.row_checks import CheckedRow, Faults, RowChecker, RowsChecked, shorten_text
from strop.extensions.code.problem_rows import find_shape
from strop.extensions.evaluation.overlap import Overlap, QuestionIndex
from strop.extensions.recorded.recorded_config import RecordedRunConfig
from strop.extensions.recorded.recorded_run import make_recorded_rules
from strop.extensions.recorded.recorded_tokens import RecordedRules
from strop.models.chat_template import ChatTemplate
from strop.models.loading import ModelNotFound, load_tokenizer, read_model_config, read_stop_token_ids
from strop.models.vision.vision_processor import find_vision_processor
from strop.runs.models import TokenizerBundle, make_template
from strop.safety.exits import contain_exits
from strop.types import Task
from strop.user_code import describe_error

MOST_NAMES = 6  # of evaluation sets that the note lists


@dataclass
class EvaluationQuestions:
    """Questions by their place: the name of the set, a tab, and the row."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_questions(names: Sequence[str] | None, training: Sequence[DataEntryConfig]) -> EvaluationQuestions:
    """Read the questions of evaluation sets; by default of those built-in ones that are on this machine.

    Raises DataError for a set that is named and cannot be read.
    """
    questions = EvaluationQuestions()
    asked = list(find_local_sets()) if names is None else list(names)
    read = []
    for name in asked:
        try:
            questions.texts += _read_set(name)
        except DataError as error:
            if names is not None:
                raise DataError(f"--against {name}: {error}") from error
            questions.notes.append(f"{name} is on this machine and cannot be read, so nothing was compared with it: {error}")
        else:
            read.append(name)
    if read:
        questions.notes.append(f"training data was compared with {len(questions.texts):,} questions of {_join_names(read)}")
    return questions


def _join_names(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MOST_NAMES])} and {len(names) - MOST_NAMES} others that are on this machine"


def find_local_sets() -> Iterator[str]:
    """Yield the built-in evaluation sets that are on this machine, each once."""
    known = set()
    for name, builtin in BUILTIN_DATASETS.items():
        reported = builtin.grader is not None or builtin.splits.evaluation is not None or builtin.splits.train is None
        place = (builtin.hub, builtin.subset, builtin.splits.choose("evaluation"))
        if reported and place not in known and is_on_this_machine(name):
            known.add(place)
            yield name


def _read_set(name: str) -> Iterator[tuple[str, str]]:
    source = DataSource(dataset_name=name, purpose="evaluation")
    _, records = source.open_records()
    try:
        shape = find_shape(records[0])
    except DataError:
        for row in source.load_rows(needs_answers=False):
            index = int(row.id.rpartition(":")[2])
            yield f"{name}\t{records.location(index)}", row.question
        return
    column = next(key for key in shape.question if key in records[0])
    for index, record in enumerate(records):
        yield f"{name}\t{records.location(index)}", str(record[column])


@dataclass(frozen=True)
class RowTokens:
    template: ChatTemplate
    rules: RecordedRules | None  # of recorded data
    limit: int  # tokens of a prompt, or of a whole recorded example
    limit_keys: str  # that set it


def make_check_template(config: CheckableConfig, name: str, tokenizer: Any) -> ChatTemplate:
    """Return the chat template of a model that is not loaded, with the images of one that reads them."""
    section: Any = config.tokenizer if isinstance(config, EvalRunConfig) else config.policy.tokenizer
    try:
        model_config = read_model_config(name)
    except (ModelNotFound, OSError, ValueError):  # of a tokenizer alone
        return ChatTemplate(tokenizer, options=section.chat_template_kwargs)
    if not isinstance(config, EvalRunConfig):
        return make_template(config.policy, tokenizer, model_config)
    vision = find_vision_processor(name, model_config, tokenizer)
    return ChatTemplate(tokenizer, options=section.chat_template_kwargs, vision=vision)


def load_row_tokens(config: CheckableConfig) -> tuple[RowTokens | None, list[str]]:
    """Return how rows become tokens, and what is to be said of it; None if the tokenizer is not on this machine."""
    section: Any
    if isinstance(config, EvalRunConfig):
        name, section = config.generation.model_name, config.tokenizer
        limits = {"generation.vllm_cfg.max_model_len": config.generation.max_total_sequence_length - 1}
        limits["data.max_input_seq_length"] = config.data.max_input_seq_length
    else:
        name, section = config.policy.model_name, config.policy.tokenizer
        limits = {"policy.max_total_sequence_length": config.policy.max_total_sequence_length - 1}
        limits["data.max_input_seq_length"] = config.data.max_input_seq_length
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokenizer = load_tokenizer(section.name or name, chat_template=section.chat_template)
            template = make_check_template(config, name, tokenizer)
            stops = read_stop_token_ids(name, tokenizer) if isinstance(config, RecordedRunConfig) else ()
    except (ModelNotFound, OSError, ValueError) as error:
        return None, [f"tokens and the chat template were not looked at: {error}"]
    notes = list(dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, UserWarning)))
    if isinstance(config, RecordedRunConfig):
        rules = make_recorded_rules(config, TokenizerBundle(tokenizer, template, stops))
        return RowTokens(template, rules, rules.max_length, "policy.max_total_sequence_length"), notes
    key = min(limits, key=lambda each: limits[each])
    return RowTokens(template, None, limits[key], key), notes


Columns = Mapping[str, Any]  # arrays by name, of the rows of one entry
Describe = Callable[[int], FaultyRow]  # a row by its position


def join_columns(chunks: Sequence[Columns]) -> dict[str, Any]:
    """Return the columns of all rows of an entry."""
    chunks = chunks or [RowsChecked().columns()]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def find_repeated(columns: Columns, describe: Describe) -> tuple[int, int, tuple[FaultyRow, ...]]:
    """Return how many rows repeat an earlier one, how many of them to the letter, and the first of them."""
    later = _find_later(columns["whole"])
    exact = len(columns["exact"]) - len(np.unique(columns["exact"]))
    return len(later), min(exact, len(later)), _describe(later, columns, describe)


def find_shared(columns: Columns, others: Columns, column: str, describe: Describe) -> tuple[int, tuple[FaultyRow, ...]]:
    """Return how many rows are among the ``others`` by a digest, and the first of them."""
    shared = np.flatnonzero(np.isin(columns[column], others[column]))
    return len(shared), _describe(shared, columns, describe)


def _find_later(digests: Any) -> Any:
    """Return the indices of rows whose digest occurred before."""
    _, first = np.unique(digests, return_index=True)
    repeated = np.ones(len(digests), dtype=bool)
    repeated[first] = False
    return np.flatnonzero(repeated)


def _describe(rows: Any, columns: Columns, describe: Describe) -> tuple[FaultyRow, ...]:
    return tuple(_positions(rows[:MOST_EXAMPLES], columns, describe))


def _positions(rows: Any, columns: Columns, describe: Describe) -> Iterator[FaultyRow]:
    return (describe(int(columns["positions"][row])) for row in rows)


GENERATED = 1000  # generated tasks that are looked at
CHUNK = 512  # rows that are looked at together
LONGEST_REASON = 300  # characters
FIXES = {
    "unreadable": "Mend the rows or leave them out: a run refuses files with such rows when it starts, or drops the rows.",
    "too_long": "Raise the limit, or leave the rows out: the run drops them.",
    "template": "Set policy.tokenizer.chat_template or its chat_template_kwargs, or mend the rows: the run drops them.",
    "image": "Mend the images or leave their rows out: the run drops them. Relative paths start from media_data_dir.",
    "empty": "Leave the rows out, or name the right columns (input_key, output_key, messages_key).",
    "answer": "Mend the reference answers, or name their column (output_key).",
    "rewritten": "Set policy.tokenizer.chat_template to one that writes what the data has, or take it out of the data.",
    "duplicate": "Leave repeated rows out, unless they are meant to weigh more.",
    "overlap": "Leave the rows out of one of the two, or hold rows out by split_validation_size, which never shares a question.",
    "contamination": "Leave the rows out of the training data, or do not report this set.",
}


@dataclass(frozen=True)
class DataCheckOptions:
    rows: int | None = None  # of each entry, drawn at random; None: all
    against: Sequence[str] | None = None  # evaluation sets; None: those on this machine
    progress: Callable[[str], None] = field(default=lambda text: None)


def check_data(config: CheckableConfig, options: DataCheckOptions) -> DataReport:
    """Check every entry of a configuration. Raises DataError for an evaluation set that is asked for and cannot be read."""
    started = time.monotonic()
    config = config.with_graders() if isinstance(config, EvalRunConfig) else config
    tokens, notes = load_row_tokens(config)
    places = list(list_entries(config))
    questions = EvaluationQuestions()
    if any(place.is_training for place in places):
        questions = read_questions(options.against, [place.entry for place in places if place.is_training])
        notes += questions.notes
    index = QuestionIndex(questions.texts) if questions.texts else None
    checks = []
    for place in places:
        options.progress(f"reading {place.key} ({place.entry.data_name or 'generated tasks'})")
        checks.append(EntryCheck(config, place, options, tokens, index if place.is_training else None))
        checks[-1].run()
    _compare_entries(checks)
    order = sorted(range(len(places)), key=lambda number: not places[number].is_training)
    return DataReport([checks[number].report for number in order], tuple(notes), time.monotonic() - started)


class EntryCheck:
    """The check of one entry."""

    def __init__(
        self,
        config: CheckableConfig,
        place: EntryPlace,
        options: DataCheckOptions,
        tokens: RowTokens | None,
        index: QuestionIndex | None,
    ) -> None:
        self.config, self.place, self.options, self.tokens, self.index = config, place, options, tokens, index
        self.report = EntryReport(place.key, str(place.entry.data_name or place.entry.env_name or "generated tasks"))
        self.opened: OpenedEntry | None = None
        self.columns: Columns = join_columns([])
        self._faults = Faults()
        self._seed = config.eval.seed if isinstance(config, EvalRunConfig) else config.training.seed

    def run(self) -> None:
        try:
            self.opened = open_entry(self.config, self.place, self.options.rows or STREAMED_ROWS)
        except ValueError as error:  # DataError and EnvironmentConfigError
            self.report.error = str(error)
            return
        for said in self.opened.errors:
            self._faults.add("unreadable", _strip_location(said), _find_location(said))
        self._check_rows(self.opened)
        for check, reason, count, examples in self._faults:
            self._find(check, f"{reason}: {_count_rows(count)}", count, examples)
        self._check_columns(self.opened)

    # --- rows -----------------------------------------------------------------------------------------------------------------

    def _check_rows(self, opened: OpenedEntry) -> None:
        total = len(opened.tasks)
        positions = self._choose_positions(opened, total)
        self.report.rows = None if opened.place.entry.streaming else total + len(opened.errors)
        self.report.looked_at = len(positions) + len(opened.errors)
        checker = self._make_checker(opened)
        chunks, overlaps = [], []
        rows = self._read(opened, positions)
        while chunk := list(islice(rows, CHUNK)):
            found = checker.check(chunk)
            chunks.append(found.columns())
            overlaps += found.overlaps
            self._faults.merge(found.faults)
        self.columns = join_columns(chunks)
        self.report.usable = int(self.columns["usable"].sum())
        self.report.prompt = _measure(self.columns["prompt"])
        self.report.completion = _measure(self.columns["completion"])
        self._report_overlaps(overlaps)

    def _choose_positions(self, opened: OpenedEntry, total: int) -> Sequence[int]:
        most = self.options.rows
        if opened.place.entry.streaming:
            self.report.notes.append(
                f"it is streamed: the first {total + len(opened.errors):,} rows were looked at (--rows N looks at more)"
            )
            return range(total)
        if not opened.has_rows and most is None and total > GENERATED:
            self.report.notes.append(
                f"the first {GENERATED:,} of {total:,} generated tasks were looked at (--rows N looks at others)"
            )
            return range(GENERATED)
        if most is None or most >= total:
            return range(total)
        self.report.notes.append(f"{most:,} of {total:,} rows were looked at, drawn at random: repeated rows are found in part")
        return sorted(Random(self._seed).sample(range(total), most))

    def _make_checker(self, opened: OpenedEntry) -> RowChecker:
        environment, tokens = opened.environment, self.tokens
        needs_answer = isinstance(environment, DatasetEnvironment) and environment.needs_answers and opened.has_rows
        return RowChecker(
            opened.kind,
            None if tokens is None else tokens.template,
            None if tokens is None else tokens.rules,
            None if tokens is None else tokens.limit,
            "" if tokens is None else tokens.limit_keys,
            needs_answer,
            self.index if opened.has_rows else None,
        )

    def _read(self, opened: OpenedEntry, positions: Sequence[int]) -> Iterator[CheckedRow]:
        """Read the rows as the run does; those that it could not read are faults."""
        for position in positions:
            try:
                with contain_exits():
                    task = opened.tasks[position]
                row = self._make_row(opened, position, task)
            except Exception as error:  # environments and classes of users may raise anything
                said = str(error) if isinstance(error, ValueError) else describe_error(error)
                check = "empty" if " empty" in said else "unreadable"
                self._faults.add(check, _strip_location(said), _find_location(said) or f"row {position + 1}")
                continue
            yield row

    def _make_row(self, opened: OpenedEntry, position: int, task: Task) -> CheckedRow:
        location = opened.locate(task)
        if opened.kind != "tasks":
            return CheckedRow(position, location, task.question, task.answer, example=task)
        prompt = tuple(opened.read_prompt(task))
        question = task.question if len(prompt) < 2 and task.question.strip() else "\n".join(each.content for each in prompt)
        question.encode()  # a lone surrogate is no text
        return CheckedRow(position, location, question, str(task.answer), prompt=prompt)

    # --- all rows of the entry ------------------------------------------------------------------------------------------------

    def _check_columns(self, opened: OpenedEntry) -> None:
        rows = len(self.columns["positions"])
        if not opened.has_rows or not rows:
            return
        if opened.place.entry.repeat == 1 and not self._is_doubled(opened):
            repeated, exact, examples = find_repeated(self.columns, self.describe)
            if repeated:
                others = (
                    "" if exact == repeated else f" ({exact:,} to the letter, the others but for case, marks and white space)"
                )
                self._find("duplicate", f"an earlier row again: {_count_rows(repeated)}{others}", repeated, examples)

    def _is_doubled(self, opened: OpenedEntry) -> bool:
        """Whether pairs are read as two examples with one prompt each."""
        return opened.kind == "judgements" and any(task.id.endswith((":chosen", ":rejected")) for task in opened.tasks[:1])

    def _report_overlaps(self, overlaps: Sequence[Overlap]) -> None:
        by_set: dict[str, list[Overlap]] = defaultdict(list)
        for overlap in overlaps:
            by_set[overlap.question.partition("\t")[0]].append(overlap)
        for name, found in by_set.items():
            questions, rows = {each.question for each in found}, {each.text for each in found}
            exact = {each.question for each in found if each.exact}
            closest = sorted(found, key=lambda each: (not each.exact, -each.shared))[:MOST_EXAMPLES]
            examples = tuple(
                FaultyRow(
                    each.text, f"{'is' if each.exact else f'shares {each.shared:.0%} of'} {each.question.partition(chr(9))[2]}"
                )
                for each in closest
            )
            word = "" if len(exact) == len(questions) else f", {len(exact) or 'none'} of them word for word"
            said = f"{len(questions)} question{'s' * (len(questions) > 1)} of {name} {'are' if len(questions) > 1 else 'is'} in "
            self._find("contamination", f"{said}{_count_rows(len(rows))}{word}", len(rows), examples)

    def describe(self, position: int) -> FaultyRow:
        """Return a row by its position, with its question."""
        assert self.opened is not None
        task = self.opened.tasks[position]
        return FaultyRow(self.opened.locate(task), shorten_text(task.question))

    def _find(self, check: str, message: str, count: int, examples: tuple[FaultyRow, ...] = ()) -> None:
        self.report.findings.append(
            DataFinding(check=check, message=message, fix=FIXES[check], count=count, examples=examples[:MOST_EXAMPLES])
        )

    def compare_with(self, other: EntryCheck) -> None:
        """Look for the rows of this entry in an earlier one."""
        assert self.opened is not None and other.opened is not None
        if not (self.opened.has_rows and other.opened.has_rows):
            return
        if self.place.is_training == other.place.is_training:
            count, examples = find_shared(self.columns, other.columns, "whole", self.describe)
            if count and self.place.is_training and self.place.entry.data_name != other.place.entry.data_name:
                self._find("duplicate", f"also in {other.place.key}: {_count_rows(count)}", count, examples)
            return
        count, examples = find_shared(other.columns, self.columns, "question", other.describe)
        if count:
            total = len(other.columns["positions"])
            message = f"{count:,} of {total:,} questions of {other.place.key} ({other.report.name}) are trained on"
            self._find("overlap", message, count, examples)


def _compare_entries(checks: Sequence[EntryCheck]) -> None:
    """Compare each entry with those before it: validation comes first."""
    opened = [check for check in checks if check.opened is not None]
    for number, check in enumerate(opened):
        for other in opened[:number]:
            check.compare_with(other)


def _measure(lengths: Any) -> Lengths | None:
    known = lengths[lengths >= 0]
    if not len(known):
        return None
    median, p95, longest = np.percentile(known, [50, 95, 100], method="higher")
    return Lengths(int(median), int(p95), int(longest))


def _count_rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


_LOCATION = re.compile(r"^(.{1,300}?(?::\d+|, (?:row|item) \d+))(?::? )")
_VALUE = re.compile(
    r" is (?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[.*?\]|\{.*?\}|-?[\d.]+)(?=,)"
)  # which differs from row to row


def _find_location(message: str) -> str:
    found = _LOCATION.match(message)
    return found[1] if found else ""


def _strip_location(message: str) -> str:
    """Return what an error says of a row, without its place and its values."""
    return " ".join(_VALUE.sub(" is not as it should be", _LOCATION.sub("", message)).split())[:LONGEST_REASON]
