"""Where an evaluation keeps its samples: a folder that is named, one that was left unfinished, or a new one."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from strop.base_config import redact_secrets, to_tree
from strop.build.jobs.evaluation_job import EvaluationJob, EvaluationSet
from strop.build.jobs.task_log import TASKS_FILE, EvaluationIdentity, TaskLog, describe_changes, read_tasks
from strop.build.run_folders import lock_evaluation_folder
from strop.checkpointing.saved_model import SavedModel
from strop.storage.folder_lock import FolderLocked

AUTO, DEFAULT_PARENT = "auto", Path("results/evals")
WITHOUT_INFLUENCE = (
    "weight",
    "dataset_name",
    "name",
)  # keys of an entry that its samples do not depend on, or that are listed apart


@dataclass(frozen=True)
class OpenFolder:
    """The folder of an evaluation, locked, and the tasks in it that are finished."""

    path: Path
    log: TaskLog


@contextmanager
def open_folder(job: EvaluationJob, note: Callable[[str], object]) -> Iterator[OpenFolder | None]:
    """Lock the folder of an evaluation, and read what is finished of it; None if nothing is to be stored.

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
            note(f"the tasks that {folder} has finished are of other settings, and are kept aside: {'; '.join(log.changes)}")
        if log.count:
            note(f"continuing the evaluation in {folder}: {log.count} {'task is' if log.count == 1 else 'tasks are'} finished")
        try:
            yield OpenFolder(folder, log)
        except BaseException:
            log.close(complete=False)
            raise
        log.close(complete=True)


def choose_parent(model: SavedModel) -> Path:
    """Return the folder of the evaluations of a model: in the log folder of its run, beside its checkpoints, or in results/evals."""
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
    """Make a new folder, named by the time, and lock it. It is removed again if nothing is left in it."""
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


# --- identity ------------------------------------------------------------------------------------------------------------


def identify(job: EvaluationJob) -> EvaluationIdentity:
    """Return what the samples of an evaluation depend on: not how many engines sample them, nor in which order."""
    generation, policy = job.generation, job.policy
    rules = {key: value for key, value in asdict(replace(job.rules, gateway=None)).items() if key != "max_turns"}
    settings = {
        "model": job.model.weights,
        "model files": _describe_files(Path(job.model.weights)),
        "tokenizer": to_tree(policy.tokenizer),
        "hf_config_overrides": policy.hf_config_overrides,
        "engine": "vllm" if generation.uses_vllm else "torch",
        "precision": generation.vllm_cfg.precision if generation.uses_vllm else [policy.precision, policy.weights_dtype],
        "vllm_kwargs": generation.vllm_kwargs,
        "rules": {**rules, "max_turns": job.max_turns},
        "gateway": None if job.rules.gateway is None else to_tree(job.rules.gateway),
        "seeds": [job.seed, job.task_seed],
        "purpose": job.purpose,
        "save_logprobs": job.scoring.save_logprobs,
    }
    return EvaluationIdentity(
        redact_secrets(settings), {each.name: redact_secrets(_identify_set(job, each)) for each in job.sets}
    )


def _identify_set(job: EvaluationJob, each: EvaluationSet) -> dict[str, Any]:
    found: dict[str, Any] = {"samples": each.samples, **asdict(each.sampling)}
    for number, entry in enumerate(each.entries):
        where = "" if len(each.entries) == 1 else f"{number}."
        tree = to_tree(entry)
        found |= {f"{where}{key}": value for key, value in tree.items() if key not in WITHOUT_INFLUENCE}
        found[f"{where}data"] = entry.data_name if entry.rows is None else _identify_rows(entry.rows)
        found[f"{where}data file"] = _describe_files(Path(entry.dataset_name)) if entry.is_file and entry.dataset_name else []
    aliases = {entry.env_name for entry in each.entries}
    for alias, section in job.env.items():
        if alias in aliases or None in aliases:
            found |= {f"env.{alias}": to_tree(section), f"env.{alias} code": _describe_code(section.options)}
    return found


def _identify_rows(rows: Any) -> Any:
    fingerprint = getattr(rows, "_fingerprint", None)  # of a datasets.Dataset
    return f"{len(rows)} rows, {fingerprint or _hash(list(rows))}"


def _hash(value: Any) -> str:
    import hashlib
    import json

    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode(errors="replace")).hexdigest()[:16]


def _describe_files(path: Path) -> list[Any]:
    """Return name, size and time of a file, or of the files in a folder; empty for what is not on this machine."""
    files = [path] if path.is_file() else sorted(each for each in path.glob("*") if each.is_file()) if path.is_dir() else []
    return [[each.name, each.stat().st_size, each.stat().st_mtime_ns] for each in files if not each.name.startswith(".")]


def _describe_code(options: Any) -> list[Any]:
    """Return what code of the user's an environment names: files, and the source of functions."""
    if isinstance(options, Mapping):
        return [found for value in options.values() for found in _describe_code(value)]
    if isinstance(options, list | tuple):
        return [found for value in options for found in _describe_code(value)]
    if callable(options):
        with suppress(OSError, TypeError):
            return [_hash(inspect.getsource(options))]
        return []
    if isinstance(options, str) and ".py:" in options:
        return _describe_files(Path(options.rpartition(":")[0]))
    return []
