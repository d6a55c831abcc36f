"""The entries of a configuration's data, opened as the run opens them, but so that a faulty row is met when it is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from strop.algorithm_factory import find_algorithm
from strop.config import EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.data.builtin_dataset import BuiltinDataset, Purpose
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.sources.files import JsonLinesRecords
from strop.data.sources.peek import FirstRecords
from strop.data.sources.records import DataError, Records, SplitError
from strop.data.sources.source import DataSource, Part, is_local
from strop.data.sources.streamed import StreamedRecords
from strop.environments.base import DatasetEnvironment, Environment, EnvironmentConfigError
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.handle import read_prompt
from strop.environments.registry import make_environment
from strop.extensions.checks.data_report import DataKind
from strop.extensions.judges.reward_model_environment import RewardModelEnvironment
from strop.extensions.recorded.examples import EXAMPLE_READERS
from strop.extensions.recorded.recorded_config import RecordedRunConfig
from strop.runs.tasks import resolve_alias
from strop.safety.exits import contain_exits
from strop.types import Messages, Task
from strop.user_code import describe_error

CheckableConfig = TrainingRunConfig | EvalRunConfig
_ENDS_OF_IDS = re.compile(r":(\d+)(?::(?:chosen|rejected))?$")

STREAMED_ROWS = 10_000  # are looked at of data that is streamed


@dataclass(frozen=True)
class EntryPlace:
    """An entry, and where the configuration has it."""

    key: str
    entry: DataEntryConfig
    part: Part
    purpose: Purpose

    @property
    def is_training(self) -> bool:
        return self.purpose == "train"


@dataclass
class OpenedEntry:
    """The tasks or examples of an entry."""

    place: EntryPlace
    kind: DataKind
    tasks: Sequence[Task]
    environment: Environment[Any] | None = None
    records: Records | None = None  # None: generated
    errors: list[str] = field(default_factory=list)  # of rows that are not among the tasks

    @property
    def name(self) -> str:
        return str(self.place.entry.data_name or self.place.entry.env_name or "generated tasks")

    @property
    def has_rows(self) -> bool:
        """Whether the tasks are rows of a data set; others may repeat and look alike by design."""
        return self.records is not None

    def locate(self, task: Task) -> str:
        """Return the file and line of a task, or its row."""
        found = _ENDS_OF_IDS.search(task.id)
        if self.records is None or found is None or not task.id.startswith(f"{self.records.name}:"):
            return task.id
        return self.records.location(int(found[1]))

    def read_prompt(self, task: Task) -> Messages:
        """Return the prompt of a task of a rollout. Raises whatever the environment does."""
        assert self.environment is not None
        with contain_exits():
            return tuple(read_prompt(self.environment, task))


def list_entries(config: CheckableConfig) -> Iterator[EntryPlace]:
    """Yield every entry of a configuration, validation first, for what is trained on is compared with it."""
    if isinstance(config, EvalRunConfig):
        for number, each in enumerate(config.data.entries):
            key = f"data.sets.{number}" if config.data.sets else "data"
            yield EntryPlace(key, each, "validation", "evaluation")
        return
    data = config.data
    held_out = data.validation is None
    parts: tuple[tuple[str, Part, Sequence[DataEntryConfig]], ...] = (
        ("train" if held_out else "validation", "validation", data.validation_entries),
        ("train", "train", data.train),
    )
    for name, part, entries in parts:
        for entry in entries:
            number = (data.train if name == "train" else entries).index(entry)
            key = f"data.{name}" if len(data.train if name == "train" else entries) == 1 else f"data.{name}.{number}"
            yield EntryPlace(f"{key} (held out)" if held_out and part == "validation" else key, entry, part, part)


def open_entry(config: CheckableConfig, place: EntryPlace, most: int = STREAMED_ROWS) -> OpenedEntry:
    """Open an entry, of a stream the first ``most`` rows. Raises DataError, EnvironmentConfigError for one that cannot be opened at all."""
    source = DataSource.from_entry(place.entry, seed=_read_seed(config), part=place.part, purpose=place.purpose)
    kind, environment, read = _choose_reader(config, place)
    source, records, errors = open_leniently(source, most)
    try:
        tasks = _read_tasks(read, source)
    except SplitError:
        raise
    except DataError as error:
        if not (source.split_validation_size and source.part != "all" and records is not None):
            raise
        tasks = _read_tasks(read, replace(source, part="all", split_validation_size=0))  # which rows are held out is unknown
        errors.append(str(error))
    return OpenedEntry(place, kind, tasks, environment, records, errors)


def open_leniently(source: DataSource, most: int) -> tuple[DataSource, Records | None, list[str]]:
    """Open the records of a source so that faulty ones are left out, or are met when they are read."""
    if source.dataset_name is None and source.rows is None:
        return source, None, []
    malformed: list[DataError] = []
    name = str(source.dataset_name)
    is_lines = name not in BUILTIN_DATASETS and name.endswith(".jsonl") and is_local(name) and Path(name).is_file()
    if is_lines and not source.streaming:
        builtin, records = BuiltinDataset(""), source.read_images(_open_lines(Path(name), malformed))
    else:
        builtin, records = source.open_records()
    if isinstance(records, StreamedRecords):
        records = _read_beginning(records, most, malformed)
        source = replace(source, streaming=False)
    records.lenient = records.uniform = True
    return replace(source, opened=(builtin, records)), records, [str(error) for error in malformed]


def _read_beginning(streamed: StreamedRecords, most: int, malformed: list[DataError]) -> Records:
    """Return the first records of a stream."""
    records, locations = [], []
    for each in islice(streamed.stream.open(), most):
        try:
            records.append(each.read())
        except DataError as error:
            malformed.append(error)
        else:
            locations.append(each.where)
    return FirstRecords(streamed.name, records, locations)


def _open_lines(path: Path, malformed: list[DataError]) -> Records:
    records = JsonLinesRecords(path, malformed)
    if not len(records):
        raise malformed[0] if malformed else DataError(f"the data file {str(path)!r} has no rows; a dataset needs at least one")
    return records


def _choose_reader(
    config: CheckableConfig, place: EntryPlace
) -> tuple[DataKind, Environment[Any] | None, Callable[[DataSource], Sequence[Task]]]:
    if isinstance(config, RecordedRunConfig):
        kind = find_algorithm(config.algorithm.name).recorded_data
        assert kind
        return kind, None, EXAMPLE_READERS[kind]
    assert isinstance(config, RolloutRunConfig | EvalRunConfig)
    environment = _make_environment(place.entry, config.env)
    if isinstance(environment, FunctionEnvironment | RewardModelEnvironment):  # their own load models
        return "tasks", environment, lambda source: DatasetEnvironment.tasks(environment, source)
    return "tasks", environment, environment.tasks


def _make_environment(entry: DataEntryConfig, env: Mapping[str, EnvironmentConfig]) -> Environment[Any]:
    alias = resolve_alias(entry, env)
    section = env.get(alias, EnvironmentConfig(type=None))
    try:
        return make_environment(section.type_of(alias), section.options)
    except EnvironmentConfigError as error:
        raise EnvironmentConfigError(f"env.{alias}: {error}") from error


def _read_tasks(read: Callable[[DataSource], Sequence[Task]], source: DataSource) -> Sequence[Task]:
    try:
        with contain_exits():
            return read(source)
    except (DataError, EnvironmentConfigError):
        raise
    except Exception as error:  # user-defined environments may raise any exception
        raise DataError(f"the tasks cannot be made: {describe_error(error)}") from error


def _read_seed(config: CheckableConfig) -> int:
    return config.eval.seed if isinstance(config, EvalRunConfig) else config.training.seed
