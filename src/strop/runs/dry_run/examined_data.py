"""Checks that the columns, rewards and options named by a configuration exist, using the first rows of each dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strop import packages
from strop.base_config import iter_sections
from strop.config import EvalRunConfig, RolloutRunConfig, TrainingRunConfig
from strop.config.schema.run_config import environment_alias
from strop.data.builtin_dataset import Purpose
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.data_config import DataEntryConfig
from strop.data.sources.dataset_class import is_dataset_class
from strop.data.sources.peek import Peek, peek_dataset, peek_file
from strop.data.sources.records import DataError
from strop.data.sources.shards import is_pattern, list_files
from strop.data.sources.source import DataSource, is_local
from strop.environments.base import DatasetEnvironment, EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.models.chat_template import images_of
from strop.models.vision.image_files import ImageError, read_image
from strop.problems import Problem
from strop.user_code import UserCodeError


@dataclass
class DataExamination:
    """The result of examining a run's data and environments."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environments: dict[str, LocalEnvironment[Any]] = field(default_factory=dict)


def examine_data(
    config: TrainingRunConfig | EvalRunConfig, entries: Iterable[tuple[str, DataEntryConfig]] | None = None
) -> DataExamination:
    """Examine a run's environments and its data: all of it, or ``entries`` with their keys."""
    config = config.with_graders() if isinstance(config, EvalRunConfig) else config
    purpose: Purpose = "evaluation" if isinstance(config, EvalRunConfig) else "train"
    found = DataExamination()
    if isinstance(config, RolloutRunConfig | EvalRunConfig):
        _make_environments(config, found)
    here = {} if isinstance(config, RolloutRunConfig) and config.cluster.environment_hosts else found.environments
    for key, section in iter_sections(config):
        found.problems += section.examine(key, here)
    for key, entry in _list_entries(config) if entries is None else entries:
        known = not isinstance(config, RolloutRunConfig | EvalRunConfig) and entry.dataset_name in BUILTIN_DATASETS
        if entry.dataset_name is None or known or (peek := _peek(key, entry, found, purpose)) is None:
            continue
        if not len(peek.records):
            found.notes.append(f"{key}: {entry.dataset_name} is too large to be examined")
            continue
        source = _only_first_rows(entry, peek)
        try:
            rows: Sequence[Any]
            if isinstance(config, RolloutRunConfig | EvalRunConfig):
                environment = found.environments.get(str(environment_alias(config, entry)))
                rows = _read_tasks(environment, source)
            else:
                rows = config.read_rows(source)
            _look_at_images(key, rows, _may_download(config), found)
        except (DataError, EnvironmentConfigError) as error:
            _add_error(key, error, found)
    return found


def _add_error(key: str, error: Exception, found: DataExamination) -> None:
    """Add an error that prevents an examination: as a problem, or as a note if it is due to a package assumed to be installed."""
    package = _find_missing_package(error)
    if package is not None and packages.assume(package):
        found.notes.append(f"{key}: not examined without the package {package}")
    else:
        found.problems.append(Problem(key, str(error)))


def _find_missing_package(error: BaseException | None) -> str | None:
    """Return the package whose import failed; None for other errors, such as an import of a user's own file."""
    while error is not None and not isinstance(error, UserCodeError):
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__
    return None


def _only_first_rows(entry: DataEntryConfig, peek: Peek) -> DataSource:
    """Return an entry's source with the first rows instead of the whole dataset."""
    source = DataSource.from_entry(entry, seed=0, part="train")
    rows_of = BUILTIN_DATASETS.get(str(entry.dataset_name))
    return replace(
        source, dataset_name=None, rows=peek.records, rows_of=rows_of, part="all", split_validation_size=0, streaming=False
    )


def _list_entries(config: TrainingRunConfig | EvalRunConfig) -> Iterator[tuple[str, DataEntryConfig]]:
    if isinstance(config, EvalRunConfig):
        sets = config.data.entries
        yield from ((f"data.sets.{index}" if len(sets) > 1 else "data", each) for index, each in enumerate(sets))
        return
    for part, entries in (("train", config.data.train), ("validation", config.data.validation or ())):
        for index, entry in enumerate(entries):
            yield f"data.{part}" if len(entries) == 1 else f"data.{part}.{index}", entry


def _peek(key: str, entry: DataEntryConfig, found: DataExamination, purpose: Purpose) -> Peek | None:
    assert entry.dataset_name is not None
    if is_dataset_class(entry.dataset_name) and not is_local(entry.dataset_name):
        _find_code(key, entry, found)
        return None
    try:
        if entry.streaming and (is_local(entry.dataset_name) or is_pattern(entry.dataset_name)):
            return peek_file(list_files(entry.dataset_name)[0])
        peek = peek_dataset(entry.dataset_name, entry.subset, entry.split, purpose, revision=entry.revision)
    except DataError as error:
        found.problems.append(Problem(key, str(error)))
        return None
    if peek is None:
        found.notes.append(f"{key}: {entry.dataset_name} is on the hub and not in the local cache: its columns were not examined")
    return peek


def _find_code(key: str, entry: DataEntryConfig, found: DataExamination) -> None:
    """Check whether the code that creates an entry's rows can be called as configured. It may be slow, and is not called here."""
    try:
        DataSource.from_entry(entry, seed=0, part="train").check_arguments()
    except DataError as error:
        found.problems.append(Problem(key, str(error)))
    else:
        found.notes.append(f"{key}: {entry.dataset_name} creates its rows when the run starts: its columns were not examined")


def _make_environments(config: RolloutRunConfig | EvalRunConfig, found: DataExamination) -> None:
    """Create the environments of a run, which checks their options and imports their code."""
    for alias, section in config.env.items():
        try:
            found.environments[alias] = LocalEnvironment(make_environment(section.type_of(alias), section.options))
        except EnvironmentConfigError as error:
            _add_error(f"env.{alias}", error, found)


def _read_tasks(local: LocalEnvironment[Any] | None, source: DataSource) -> list[Any]:
    """Return the first tasks of an environment that reads rows. Raises DataError for invalid rows."""
    environment = None if local is None else local.environment
    if not isinstance(environment, DatasetEnvironment):
        return []
    tasks: Sequence[Any] = DatasetEnvironment.tasks(environment, source)  # a subclass may load models here
    return [tasks[index] for index in range(len(tasks))]


def _may_download(config: TrainingRunConfig | EvalRunConfig) -> bool:
    return not isinstance(config, EvalRunConfig) and config.policy.image_processor.allow_addresses


def _look_at_images(key: str, rows: Sequence[Any], may_download: bool, found: DataExamination) -> None:
    """Read the images of the first rows, except those at URLs if they may be downloaded."""
    shown = [images_of((*getattr(row, "messages", ()), *getattr(row, "prompt", ()))) for row in rows]
    images = [image for listed in shown for image in listed]
    try:
        for image in images:
            if not (may_download and image.source.startswith(("http://", "https://"))):
                read_image(image)
    except ImageError as error:
        found.problems.append(Problem(key, str(error)))
        return
    if images:
        found.notes.append(f"{key}: {sum(map(bool, shown))} of the first {len(rows)} rows have images, which can be read")
