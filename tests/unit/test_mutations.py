"""A configuration or a data file that is wrong in whatever way ends in one message: no traceback, nothing that takes seconds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from strop.config import ConfigError, EvalRunConfig, LoadedConfig, load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.data.recorded.examples import EXAMPLE_READERS
from strop.data.sources.peek import peek_file
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.runs.dry_run.examine import examine
from strop.runs.summary import summarize
from support.mutations import (
    ROOT,
    WRONG_DOCUMENTS,
    ConfigCase,
    DataCase,
    TookTooLong,
    example_texts,
    mutate_config,
    mutate_data,
    time_limit,
)

LIMIT = 2.0  # seconds of a case
LONGEST = 3_400  # characters of the message of one problem


def run_config(case: ConfigCase, folder: Path) -> None:
    """Read, check and summarize a configuration, as a dry run does. Raises ConfigError, or another error for a fault."""
    path = folder / "run.yaml"
    path.write_bytes(case.text)
    root: Any = TRAINING_RUNS.get(case.kind, EvalRunConfig)
    loaded: LoadedConfig[Any] = load_config(path, case.overrides, root=root)
    for warning in loaded.warnings:
        assert len(str(warning)) < LONGEST
    summarize(loaded.config, examine(loaded.config).algorithm)


def run_data(case: DataCase, folder: Path) -> None:
    """Read every row of a file, as a run does. Raises DataError, or another error for a fault."""
    path = folder / f"rows{case.suffix}"
    path.write_bytes(case.data)
    source = DataSource(dataset_name=str(path), split_validation_size=case.split, part="train" if case.split else "all")
    with suppress(DataError):
        peek_file(path)
    if case.kind == "tasks":
        rows = replace(source, input_key="problem", output_key="answer").load_rows()
        for index in range(len(rows)):
            rows[index]
        return
    examples = EXAMPLE_READERS[case.kind](source)
    for index in range(len(examples)):
        examples[index]


def find_faults(cases: Iterator[tuple[str, Callable[[], None]]], refused: type[Exception]) -> tuple[Counter[str], list[str]]:
    """Run cases. Return how they ended, and what ended in anything but success or ``refused`` within its time."""
    endings: Counter[str] = Counter()
    faults: list[str] = []
    for name, run in cases:
        try:
            with time_limit(LIMIT), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run()
            endings["accepted"] += 1
        except refused as error:
            endings["refused"] += 1
            problems = getattr(error, "problems", [error])
            if not str(error).strip() or any(len(str(problem)) > LONGEST for problem in problems):
                faults.append(f"{name}: a message of {max(len(str(problem)) for problem in problems)} characters")
        except TookTooLong:
            faults.append(f"{name}: took longer than {LIMIT} s")
        except BaseException as error:
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
            faults.append(f"{name}: {type(error).__name__} at {place}: {error!s:.300}")
    return endings, faults


def config_cases(folder: Path, seed: int, count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    random, examples = Random(seed), example_texts()
    for number in range(count):
        case = mutate_config(random, examples)
        yield f"configuration {number} of seed {seed}", partial(run_config, case, folder)


def data_cases(folder: Path, seed: int, count: int) -> Iterator[tuple[str, Callable[[], None]]]:
    random = Random(seed)
    for number in range(count):
        case = mutate_data(random)
        yield f"data file {number} of seed {seed} ({case.suffix}, {case.kind})", partial(run_data, case, folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)  # the examples name prompt files
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # what torch imports then is not a case's time
    return tmp_path


@pytest.mark.parametrize("document", WRONG_DOCUMENTS, ids=range(len(WRONG_DOCUMENTS)))
def test_a_document_that_is_wrong_as_a_whole_is_refused_in_one_message(folder: Path, document: str) -> None:
    case = ConfigCase(document.encode(), "grpo")
    endings, faults = find_faults(iter([(document[:80], lambda: run_config(case, folder))]), ConfigError)
    assert not faults and endings["refused"] == 1


def test_mutated_configurations_end_in_one_message(folder: Path) -> None:
    endings, faults = find_faults(config_cases(folder, seed=0, count=150), ConfigError)
    assert not faults, "\n".join(faults)
    assert endings["accepted"] > 5 and endings["refused"] > 30, "the mutations are neither all harmless nor all the same"


def test_mutated_data_files_end_in_one_message(folder: Path) -> None:
    endings, faults = find_faults(data_cases(folder, seed=0, count=150), DataError)
    assert not faults, "\n".join(faults)
    assert endings["accepted"] > 5 and endings["refused"] > 50
