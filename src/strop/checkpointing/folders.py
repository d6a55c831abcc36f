"""Checkpoints as folders ``step_N/``, written atomically, or in the background while training continues."""

from __future__ import annotations

import json
import logging
import math
import random
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from strop.checkpointing.base import Restorable, RunState, Saveable, Stageable, read_run_state, write_run_state
from strop.checkpointing.saved_model import list_steps
from strop.storage.checksums import FileChecksum, compute_checksums, decode_checksums, encode_checksums, find_damage
from strop.storage.files import StorageError, find_refusal, format_bytes, free_bytes, fsync_path, shorten_path

log = logging.getLogger(__name__)

RUN = "/run"  # key in files.json: the id of the run, shared by all its checkpoints
_RECORDS = ("config.yaml", "contents.json", "metric.json")  # for people: a change only causes a warning


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class FolderCheckpointer:
    """Keeps the best ``keep_top_k`` checkpoints by a metric, and always the newest."""

    folder: Path
    config_text: str
    save_tokenizer: Callable[[Path], Any]
    contents_text: str = "{}"  # fingerprints of the contents behind the configuration's names
    keep_top_k: int | None = 3  # None keeps all
    metric: str | None = None  # name as logged, such as validation/accuracy
    higher_is_better: bool = True
    save_optimizer: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder.absolute())  # a reward may change the working directory

    def save(self, state: RunState, learners: Mapping[str, Restorable]) -> Path:
        return self.write(state, get_random_states(), learners)

    def write(self, state: RunState, randomness: Mapping[str, Any], learners: Mapping[str, Saveable]) -> Path:
        """Write the checkpoint of ``state``, with the learners and random states (``get_random_states``) of the same moment.

        Raises StorageError if the file system refuses it. The draft is then removed, and the other checkpoints are unchanged.
        """
        target = self.folder / f"step_{state.step}"
        draft = self.folder / f".tmp_step_{state.step}"
        try:
            self._clear_leftovers()
            self._write_draft(draft, state, randomness, learners)
            self._replace(target, draft)
        except Exception as error:
            refusal = find_refusal(error, self.folder)
            if refusal is None:
                raise
            message = self._describe_refusal(refusal, state.step, draft)
            with suppress(OSError):
                _remove(draft)
            raise StorageError(message) from error
        self._prune(newest=state.step)
        return shorten_path(target)

    def _write_draft(self, draft: Path, state: RunState, randomness: Mapping[str, Any], learners: Mapping[str, Saveable]) -> None:
        draft.mkdir(parents=True)
        for name, learner in learners.items():
            learner.save(draft / name, optimizer=self.save_optimizer)
        for weights in (draft / "policy" / "weights", draft / "policy" / "ema"):
            if weights.is_dir():
                self.save_tokenizer(weights)
        (draft / "config.yaml").write_text(self.config_text)
        (draft / "contents.json").write_text(self.contents_text, encoding="utf-8")
        write_run_state(draft / "state.pt", state, randomness)
        value = state.logged.get(self.metric) if self.metric else None
        (draft / "metric.json").write_text(json.dumps({"name": self.metric, "value": value, "step": state.step}))
        sums = compute_checksums(draft, ["state.pt", *learners, *_RECORDS])
        run = {RUN: self._find_run(state.step) or secrets.token_hex(8)}
        (draft / "files.json").write_text(json.dumps(encode_checksums(sums, run), indent=1))
        _fsync_tree(draft)

    def _replace(self, target: Path, draft: Path) -> None:
        if target.is_dir():
            _remove_atomically(target)
        elif target.exists():
            raise StorageError(f"{target} is a file, and the checkpoint would be a folder of that name; move it away")
        draft.rename(target)
        fsync_path(self.folder)

    def _describe_refusal(self, refusal: str, step: int, draft: Path) -> str:
        steps = [other for other in self.list_steps() if other != step]
        written = sum(path.stat().st_size for path in draft.rglob("*") if path.is_file())
        needed = f"needs about {format_bytes(self._size(steps[-1]))}" if steps else f"needs more than {format_bytes(written)}"
        kept = f"; the newest whole checkpoint, step_{steps[-1]}, is untouched" if steps else ""
        return (
            f"the checkpoint of step {step} was not saved in {shorten_path(self.folder)}: {refusal}. A checkpoint {needed}, and there were "
            f"{format_bytes(free_bytes(self.folder) + written)} for it{kept}. Make room there, set another checkpointing.checkpoint_dir, "
            "or save less (checkpointing.keep_top_k, checkpointing.save_optimizer)"
        )

    def finish(self) -> None:
        """Do nothing: this class does not save in the background."""

    def find_newest(self) -> Path | None:
        steps = self.list_steps()
        return shorten_path(self.folder / f"step_{steps[-1]}") if steps else None

    def list_steps(self) -> list[int]:
        return list_steps(self.folder)

    def load(self, path: Path, learners: Mapping[str, Restorable]) -> RunState:
        """Restore learners and random states in place. Raises CheckpointError."""
        self.verify(path)
        try:
            state, randomness = read_run_state(path / "state.pt")
            self._check_origin(path, state)
            for name, learner in learners.items():
                learner.load(path / name)
            _set_random_states(randomness)
        except Exception as error:  # each file format raises its own errors for broken files
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, FileNotFoundError) else str(error)
            raise self._unusable(path, reason) from error
        return state

    def verify(self, path: Path) -> None:
        """Compare the files of a checkpoint with their checksums. Raises CheckpointError, which names an older intact one.

        Changes to ``config.yaml`` and ``metric.json``, which are for people, only cause a warning.
        """
        damage = _find_damage(path)
        if damage is not None:
            own = int(path.name.removeprefix("step_")) if path.name.removeprefix("step_").isdigit() else math.inf
            older = [self.folder / f"step_{step}" for step in reversed(self.list_steps()) if step < own]
            whole = next((other for other in older if _find_damage(other) is None), None)
            offer = "" if whole is None else f"; {whole} is whole: checkpointing.resume=previous continues from it"
            raise self._unusable(path, damage, offer)
        with suppress(ValueError):
            for name, checksum in _read_checksums(path).items():
                if name in _RECORDS and (changed := find_damage(path, {name: checksum})):
                    log.warning("%s; the checkpoint is used nevertheless", changed.replace("is damaged", "was changed"))

    def _unusable(self, path: Path, reason: str, offer: str = "") -> CheckpointError:
        return CheckpointError(
            f"{path} cannot be resumed from: {reason}. Start over with another checkpointing.checkpoint_dir, or remove that folder "
            f"to go back to the previous checkpoint{offer}"
        )

    def _check_origin(self, path: Path, state: RunState) -> None:
        """Raise ValueError if a checkpoint was copied here from another step or run."""
        if path.name != f"step_{state.step}":
            raise ValueError(f"it is the checkpoint of step {state.step}: the folder was renamed, or copied from elsewhere")
        own, others = _read_json(path / "files.json").get(RUN), self._find_run(state.step)
        if own is not None and others is not None and own != others:
            raise ValueError(f"it belongs to another run ({own}) than the earlier checkpoints ({others}): it was copied here")

    def _find_run(self, step: int) -> str | None:
        """Return the id of the run that wrote the newest checkpoint before ``step``; None if unknown."""
        older = (self.folder / f"step_{other}" / "files.json" for other in reversed(self.list_steps()) if other < step)
        runs = (_read_json(path).get(RUN) for path in older)
        return next((str(run) for run in runs if run is not None), None)

    def _size(self, step: int) -> int:
        return sum(path.stat().st_size for path in (self.folder / f"step_{step}").rglob("*") if path.is_file())

    def archive(self) -> Path | None:
        """Move the checkpoints of an earlier run to ``previous_N/`` and return that folder, or None if there are no checkpoints."""
        steps = self.list_steps()
        if not steps:
            return None
        numbers = [int(path.name[9:]) for path in self.folder.glob("previous_*") if path.name[9:].isdigit()]
        target = self.folder / f"previous_{max(numbers, default=0) + 1}"
        target.mkdir()
        for step in reversed(steps):  # newest first, so that after a kill in between none is taken for the newest of the new run
            (self.folder / f"step_{step}").rename(target / f"step_{step}")
        return shorten_path(target)

    def _prune(self, newest: int) -> None:
        if self.keep_top_k is None:
            return
        ranked = sorted(self.list_steps(), key=self._ranking_key, reverse=True)
        for step in ranked[self.keep_top_k :]:
            if step != newest:
                _remove_atomically(self.folder / f"step_{step}")

    def _ranking_key(self, step: int) -> tuple[float, int]:
        """Return the sort key: higher for a better metric, then for newer checkpoints. Those without the metric rank lowest."""
        value = _read_json(self.folder / f"step_{step}" / "metric.json").get("value")
        if not isinstance(value, int | float) or not math.isfinite(value):
            return -math.inf, step
        return (value if self.higher_is_better else -value), step

    def _clear_leftovers(self) -> None:
        """Remove partly written and partly removed folders of a killed process."""
        if self.folder.is_dir():
            for path in self.folder.glob(".tmp_step_*"):
                _remove(path)


def _read_checksums(folder: Path) -> dict[str, FileChecksum]:
    """Read files.json. Raises ValueError, the base class of json's errors."""
    return decode_checksums(json.loads((folder / "files.json").read_text()))


def _find_damage(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, except those for people; None if they are intact."""
    try:
        saved = _read_checksums(folder)
    except FileNotFoundError:
        return f"{folder / 'files.json'} is missing"
    except (OSError, ValueError) as error:
        return f"{folder / 'files.json'} is damaged: {type(error).__name__}: {error}"
    return find_damage(folder, {name: checksum for name, checksum in saved.items() if name not in _RECORDS})


def is_damaged(checkpoint: Path) -> bool:
    """Return whether a checkpoint has missing or damaged files, except those for people."""
    return _find_damage(checkpoint) is not None


def was_changed(checkpoint: Path, name: str) -> bool:
    """Return whether a file of a checkpoint has changed since it was saved."""
    with suppress(OSError, ValueError):
        checksum = _read_checksums(checkpoint).get(name)
        return checksum is not None and find_damage(checkpoint, {name: checksum}) is not None
    return False


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing or damaged."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link with that name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_atomically(path: Path) -> None:
    """Remove a folder atomically, by renaming it first."""
    trash = path.with_name(f".tmp_{path.name}_removed")
    _remove(trash)
    path.rename(trash)
    shutil.rmtree(trash)


def _fsync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        fsync_path(path)
    fsync_path(folder)


def get_random_states() -> dict[str, Any]:
    """Return the states of all random number generators: Python, NumPy, torch and CUDA."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


class BackgroundCheckpointer:
    """Copies the state to save and writes it in a thread, one checkpoint at a time.

    An incomplete checkpoint has a temporary name, so a kill leaves the previous one intact. Call ``finish`` before the run ends. If a
    learner does not support staging, the checkpoint is written before ``save`` returns.
    """

    def __init__(self, folders: FolderCheckpointer) -> None:
        self.folders = folders
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="strop-checkpoint")
        self._pending: Future[Path] | None = None
        self.wait_seconds = 0.0  # total seconds spent waiting for the previous checkpoint

    def save(self, state: RunState, learners: Mapping[str, Restorable]) -> Path:
        """Start to save, and return the folder that the checkpoint will have. Raises the error of the previous save."""
        self.finish()
        staged: dict[str, Saveable] = {}
        for name, learner in learners.items():
            if not isinstance(learner, Stageable):
                return self.folders.save(state, learners)
            staged[name] = learner.stage(optimizer=self.folders.save_optimizer)
        self._pending = self._thread.submit(self.folders.write, state, get_random_states(), staged)
        return shorten_path(self.folders.folder / f"step_{state.step}")

    def finish(self) -> None:
        """Wait until the checkpoint in progress is complete. Raises its error."""
        if self._pending is not None:
            started, pending, self._pending = time.monotonic(), self._pending, None
            pending.result()
            self.wait_seconds += time.monotonic() - started
