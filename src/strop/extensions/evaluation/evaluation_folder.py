"""The inputs of an evaluation, from its own configuration or from that of a run, and its folder, from which it continues."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.base_config import validate_section
from strop.checkpointing.saved_model import SavedModel
from strop.config import EvalRunConfig, RolloutRunConfig
from strop.data.data_config import DataEntryConfig, EvalSetConfig
from strop.environments.environment_config import EnvironmentConfig
from strop.environments.resources import read_sections
from strop.extensions.evaluation.evaluated_run import EvaluatedRun
from strop.learner.model_config import ModelConfig
from strop.monitoring.rollout_store.rollout_record import encodable
from strop.rollouts.episode import EpisodeRules
from strop.runs.evaluation_job import EvaluationIdentity, EvaluationJob, EvaluationSet, identify, make_validation_job
from strop.runs.run_folders import lock_evaluation_folder
from strop.runs.tasks import name_data, resolve_alias
from strop.sampling import Sampling
from strop.storage.files import atomic_write
from strop.storage.folder_lock import FolderLocked

PYTHON_REWARD = "python:reward"  # in the configuration of a run with a Python function as reward (strop.train)


def make_evaluation_job(config: EvalRunConfig) -> EvaluationJob:
    config = config.with_graders()
    generation = config.generation
    model = {name: getattr(generation, name) for name in ("model_name", "device", "num_threads", "precision")}
    length = generation.max_total_sequence_length
    return EvaluationJob(
        model=SavedModel(generation.model_name),
        policy=validate_section(
            ModelConfig,
            {**model, "tokenizer": config.tokenizer, "max_total_sequence_length": length, "dequantize_base_checkpoint": True},
        ),
        generation=generation,
        cluster=config.cluster,
        rules=EpisodeRules(
            max_length=length,
            max_prompt_length=config.data.max_input_seq_length,
            tool_call_format=config.tokenizer.tool_call_format,
        ),
        max_turns=config.eval.max_rollout_turns,
        sets=_name_apart([_make_set(config, entry) for entry in config.data.entries]),
        env=config.env,
        resources=read_sections(config),
        task_seed=config.eval.seed,
        seed=config.eval.seed,
        max_tasks=config.eval.max_val_samples,
        scoring=config.eval,
        concurrent_tasks=_count_concurrent(config),
    )


def _make_set(config: EvalRunConfig, entry: DataEntryConfig) -> EvaluationSet:
    own = entry if isinstance(entry, EvalSetConfig) else None
    sampling = Sampling(**config.generation.sampling_options())
    if own is not None and own.temperature is not None:
        sampling = replace(sampling, temperature=own.temperature)
    return EvaluationSet(
        name=(own and own.name) or name_data(entry) or resolve_alias(entry, config.env),
        entries=[entry],
        samples=(own and own.num_tests_per_prompt) or config.eval.num_tests_per_prompt,
        sampling=sampling,
    )


def _name_apart(sets: Sequence[EvaluationSet]) -> list[EvaluationSet]:
    """Return the sets with distinct names: sets of one dataset are named by their subsets, otherwise by numbers."""
    names: list[str] = []
    for each in sets:
        name, subset = each.name, each.entries[0].subset
        if subset is not None and [other.name for other in sets].count(name) > 1:
            name = f"{name}-{subset}"
        number = next(number for number in itertools.count(1) if (name if number == 1 else f"{name}-{number}") not in names)
        names.append(name if number == 1 else f"{name}-{number}")
    return [replace(each, name=name) for each, name in zip(sets, names, strict=True)]


def make_run_evaluation_job(run: EvaluatedRun, model: SavedModel) -> EvaluationJob:
    """Create the evaluation of a checkpoint on its run's validation data. Raises ValueError."""
    config = run.config
    assert isinstance(config, RolloutRunConfig)
    _check_rewards(config.env)
    job = make_validation_job(config, model)
    (together,) = job.sets
    several = [replace(together, name=name_data(entry), entries=[entry]) for entry in together.entries]
    return replace(
        job,
        sets=_name_apart(several) if run.several_sets else job.sets,
        seed=run.seed,
        scoring=run.evaluation.eval,
        purpose=run.purpose,
        trained_on=config.data.train if _is_of_run(model, config) else (),
        concurrent_tasks=_count_concurrent(run.evaluation),
    ).with_model(model.weights)


def _is_of_run(model: SavedModel, config: RolloutRunConfig) -> bool:
    """Whether the run trained the model: a comparison evaluates other models on the run's validation data."""
    return bool(model.run_values.get("logger", {}).get("log_dir") == config.logger.log_dir)


def _count_concurrent(config: EvalRunConfig) -> int | None:
    count = config.generation.num_prompts_per_step
    return count if count > 0 else None


def _check_rewards(env: Mapping[str, EnvironmentConfig]) -> None:
    for alias, options in env.items():
        if options.options.get("reward") == PYTHON_REWARD:
            raise ValueError(
                f"env.{alias}: the reward of this run was a function given in Python, which its configuration cannot hold; give it again: "
                f"strop.evaluate(run, reward=...), or on the command line env.{alias}.reward=FILE.py:FUNCTION"
            )


TASKS_FILE, PREVIOUS_FILE, VERSION = "tasks.jsonl", "tasks.previous.jsonl", 1
MOST_NAMED = 4  # changed settings in a message


class TaskLog:
    """Appends finished tasks to ``<folder>/tasks.jsonl``, and holds those finished earlier with the same settings."""

    def __init__(self, folder: Path, identity: EvaluationIdentity) -> None:
        """Read the finished tasks, and move those with other settings aside. ``changes`` describes the differences."""
        self.folder, self.path = folder, folder / TASKS_FILE
        self.changes: list[str] = []
        header = {"version": VERSION, **identity.to_json()}
        self._tasks: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in identity.sets}
        old, lines = read_tasks(self.path)
        if old is not None:
            self.changes = describe_changes(old, header)
            for entry in lines:
                name = entry["set"]
                if (
                    old["settings"] == header["settings"]
                    and name in header["sets"]
                    and old["sets"].get(name) == header["sets"][name]
                ):
                    self._tasks[name][entry["index"]] = entry["task"]
            if self.changes:
                os.replace(self.path, folder / PREVIOUS_FILE)
        with atomic_write(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for content in (header, *self._list_entries()):
                file.write(_to_line(content))
        self._file = self.path.open("a", encoding="utf-8")

    def of_set(self, name: str) -> FinishedTasksOfSet:
        return FinishedTasksOfSet(self, name)

    def tasks_of(self, name: str) -> Mapping[int, dict[str, Any]]:
        return self._tasks[name]

    @property
    def count(self) -> int:
        return sum(map(len, self._tasks.values()))

    def add(self, name: str, index: int, task: dict[str, Any]) -> None:
        self._tasks[name][index] = task
        self._file.write(_to_line({"set": name, "index": index, "task": task}))
        self._file.flush()  # the kernel has it now, even if this process dies

    def close(self, *, complete: bool) -> None:
        """Close the file, and remove it if it is empty, or if the result contains all of it."""
        self._file.close()
        if complete or not self.count:
            self.path.unlink(missing_ok=True)

    def _list_entries(self) -> Iterator[dict[str, Any]]:
        for name, tasks in self._tasks.items():
            yield from ({"set": name, "index": index, "task": task} for index, task in tasks.items())


@dataclass(frozen=True)
class FinishedTasksOfSet:
    """The finished tasks of one set."""

    log: TaskLog
    name: str

    @property
    def tasks(self) -> Mapping[int, dict[str, Any]]:
        return self.log.tasks_of(self.name)

    def add(self, index: int, task: dict[str, Any]) -> None:
        self.log.add(self.name, index, task)


def read_tasks(path: Path) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the first line and the others; None and nothing for a missing file or one of another version. A truncated last line
    is skipped.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None, []
    entries: list[dict[str, Any]] = []
    for line in text.split("\n"):
        try:
            entries.append(json.loads(line))
        except ValueError:
            break
    if not entries or entries[0].get("version") != VERSION:
        return None, []
    return entries[0], entries[1:]


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the differing settings of the sets that both have, as ``KEY: OLD -> NEW``."""
    pairs = [("", old["settings"], new["settings"])]
    pairs += [(f"{name}: ", old["sets"][name], settings) for name, settings in new["sets"].items() if name in old["sets"]]
    changes: list[str] = []
    for where, before, after in pairs:
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        changes += [f"{where}{key}: {' -> '.join(map(_shorten, _differing(before.get(key), after.get(key))))}" for key in keys]
    return changes[:MOST_NAMED] + ([f"and {len(changes) - MOST_NAMED} more"] if len(changes) > MOST_NAMED else [])


def _differing(before: Any, after: Any) -> tuple[Any, Any]:
    """Return two values; of lists, such as the files of a model, only the elements missing in the other."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return before, after
    return [each for each in before if each not in after], [each for each in after if each not in before]


def _to_line(content: Mapping[str, Any]) -> str:
    return encodable(json.dumps(content, ensure_ascii=False)) + "\n"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


AUTO, DEFAULT_PARENT = "auto", Path("results/evals")


@contextmanager
def open_folder(job: EvaluationJob, note: Callable[[str], object]) -> Iterator[TaskLog | None]:
    """Lock an evaluation's folder, and read its finished tasks; None if nothing is to be stored.

    Raises FolderLocked, StorageError.
    """
    chosen = job.scoring.save_path
    if not chosen:
        yield None
        return
    identity = identify(job)
    with ExitStack() as stack:
        if chosen == AUTO:
            parent = choose_parent(job.model)
            folder = _find_unfinished(parent, identity, stack) or _make_folder(parent, stack)
        else:
            folder = Path(chosen)
            stack.enter_context(lock_evaluation_folder(folder))
        log = TaskLog(folder, identity)
        if log.changes:
            note(f"the finished tasks in {folder} have other settings, and are moved aside: {'; '.join(log.changes)}")
        if log.count:
            note(f"continuing the evaluation in {folder}: {log.count} {'task is' if log.count == 1 else 'tasks are'} finished")
        try:
            yield log
        except BaseException:
            log.close(complete=False)
            raise
        log.close(complete=True)


def choose_parent(model: SavedModel) -> Path:
    """Return the parent folder for a model's evaluations: in the log folder of its run, next to its checkpoints, or in
    results/evals.
    """
    checkpoints = None if model.checkpoint is None else model.checkpoint.parent
    if (of_run := model.log_folder or checkpoints) is not None:
        return of_run / "evaluations"
    parts = Path(model.weights).parts
    return DEFAULT_PARENT / re.sub(r"[^\w.-]", "_", "-".join(parts[-3:] if parts[-1:] == ("weights",) else parts[-1:]) or "model")


def _find_unfinished(parent: Path, identity: EvaluationIdentity, stack: ExitStack) -> Path | None:
    """Return the newest folder with unfinished tasks of the same settings that no other process uses, locked."""
    header = identity.to_json()
    for tasks in sorted(parent.glob(f"*/{TASKS_FILE}"), reverse=True):
        with suppress(FolderLocked):
            stack.enter_context(lock_evaluation_folder(tasks.parent))
            old, _ = read_tasks(tasks)
            if old is not None and not describe_changes(old, header) and set(old["sets"]) == set(header["sets"]):
                return tasks.parent
            stack.pop_all().close()
    return None


def _make_folder(parent: Path, stack: ExitStack) -> Path:
    """Make a new folder, named by the time, and lock it. It is removed again if it stays empty."""
    started = time.strftime("%Y%m%d-%H%M%S")
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (started if number == 1 else f"{started}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        stack.callback(_remove_if_empty, folder)
        stack.enter_context(lock_evaluation_folder(folder))
        return folder


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
