"""The state of a run in a checkpoint, the interface that the training loop saves through, and the file ``state.pt``.

The file is a pickle whose classes and functions must be on a list: reading it creates numbers, tensors, Strop's own dataclasses,
and tasks of the run's environments, and imports nothing. Custom tasks may be dataclasses, enums and named tuples from modules
already imported because they define the run's environments.
"""

from __future__ import annotations

import enum
import functools
import importlib
import io
import logging
import pickle
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch

from strop.environments.base import Environment
from strop.rollouts.stream import StreamState
from strop.stopping import EarlyStop
from strop.types import Group, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run after ``step``, apart from its learners."""

    step: int
    stream: StreamState
    logged: Mapping[str, float]  # the step's metrics, for a run that was killed after saving the step but before logging it
    early_stop: EarlyStop | None = None
    listeners: Mapping[str, Any] = field(default_factory=dict)  # the states of listeners that have one, by name

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Read a checkpoint, including those of earlier versions, which have the state of only one listener."""
        monitor = saved.pop("monitor", None)
        vars(self).update({"listeners": {} if monitor is None else {"hacking": monitor}, **saved})


class Saveable(Protocol):
    """A learner, or a copy of its state."""

    def save(self, folder: Path, *, optimizer: bool = True) -> None: ...


class Restorable(Saveable, Protocol):
    """A further component that is saved with a run and restored in place."""

    def load(self, folder: Path) -> None: ...


@runtime_checkable
class Stageable(Protocol):
    """A learner that can copy its state, and continue training while the copy is written."""

    def stage(self, *, optimizer: bool = True) -> Saveable:
        """Return a copy of the current state. Its ``save`` may be called in another thread."""
        ...


class Checkpointer(Protocol):
    """Saves the state of a run with its learners and other stateful components."""

    def save(self, state: RunState, learners: Mapping[str, Restorable]) -> Path:
        """Save atomically and return the checkpoint's folder.

        If the checkpoint is written in the background, it is only complete when ``finish`` or the next ``save`` returns.
        """
        ...

    def finish(self) -> None:
        """Wait for a save in the background. Raises its error."""
        ...


_PYTHON_2 = {"__builtin__": "builtins", "xrange": "range"}  # their names in pickles of torch.save

# Modules of Strop whose classes (but not functions) may occur in the file.
_OWN_MODULES = {
    "strop.checkpointing.base",
    "strop.endings",
    "strop.environments.base",
    "strop.environments.remote",
    "strop.rollouts.stream",
    "strop.stopping",
    "strop.types",
}

# From other libraries: what numbers, tensors, arrays and values of data files consist of. None of them executes its arguments.
_OTHERS = {
    ("_codecs", "encode"),
    *(("builtins", name) for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")),
    ("collections", "OrderedDict"),
    ("collections", "deque"),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    *((f"numpy.{core}.multiarray", name) for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(("numpy", name) for name in ("dtype", "ndarray")),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "Size"),
}


class UntrustedClass(pickle.UnpicklingError):
    """A file names a class or function outside of a run's state. The message names it."""


def write_run_state(path: Path, state: RunState, randomness: Mapping[str, Any]) -> None:
    """Write the state. Finished groups whose tasks could not be read back are sampled again later, with a warning."""
    torch.save({"state": replace(state, stream=_drop_unreadable(state.stream)), "random": randomness}, path)


def read_run_state(path: Path) -> tuple[RunState, Mapping[str, Any]]:
    """Read the state and the random states. Raises UntrustedClass, and what the file format raises for a broken file."""
    saved = load_own_classes(path)
    return saved["state"], saved["random"]


def load_own_classes(path: Path) -> dict[str, Any]:
    """Read a file of ``torch.save`` that consists of this run's own classes. Raises as ``read_run_state``."""
    with zipfile.ZipFile(path) as file:
        if any(name.endswith("/constants.pkl") for name in file.namelist()):
            raise UntrustedClass(f"{path} is a TorchScript program, not a run's state")
    saved: dict[str, Any] = torch.load(path, weights_only=False, map_location="cpu", pickle_module=_STATE_PICKLE)
    return saved


class _StateUnpickler(pickle.Unpickler):
    """Finds only allowed classes, and those of earlier versions under their new names."""

    def find_class(self, module: str, name: str) -> Any:
        if (now := _find_former(f"{module}:{name}")) is not None:
            return now
        module, name = _PYTHON_2.get(module, module), _PYTHON_2.get(name, name)
        if (module, name) in _OTHERS:
            return getattr(importlib.import_module(module), name)
        found = getattr(importlib.import_module(module) if module in _OWN_MODULES else sys.modules.get(module), name, None)
        if isinstance(found, type) and found.__module__ == module and (module in _OWN_MODULES or _is_task_data(found)):
            return found
        raise UntrustedClass(
            f"it names {module}.{name}, which is not part of a run's state; a custom task can be read if its class is a dataclass in the "
            "module of the run's environment"
        )


def _load(file: Any, **options: Any) -> Any:
    return _StateUnpickler(file, **options).load()


_STATE_PICKLE = SimpleNamespace(__name__="pickle", Unpickler=_StateUnpickler, load=_load)


def _find_former(path: str) -> type | None:
    """Return the kind of task that an earlier version had at ``module:Class``: it lists such places as ``former_names``."""
    return next((kind for kind in _subclasses(Task) if path in vars(kind).get("former_names", ())), None)


def _is_task_data(found: type) -> bool:
    """Whether a class is plain data from a module that defines an environment or a task of this run."""
    is_data = is_dataclass(found) or issubclass(found, enum.Enum) or (issubclass(found, tuple) and hasattr(found, "_fields"))
    return is_data and any(found.__module__ == other.__module__ for base in (Task, Environment) for other in _subclasses(base))


def _subclasses(base: type) -> set[type]:
    direct: set[type] = set(base.__subclasses__())
    return direct.union(*map(_subclasses, direct))


def _drop_unreadable(stream: StreamState) -> StreamState:
    """Move finished groups with tasks that ``read_run_state`` would refuse to the groups to restart."""
    unreadable = {group.index: reason for group in stream.finished if (reason := _why_unreadable(group)) is not None}
    if not unreadable:
        return stream
    _warn_once(next(iter(unreadable.values())))
    finished = tuple(group for group in stream.finished if group.index not in unreadable)
    return replace(stream, finished=finished, unfinished=tuple(sorted({*stream.unfinished, *unreadable})))


def _why_unreadable(group: Group) -> str | None:
    try:
        _load(io.BytesIO(pickle.dumps([rollout.task for rollout in group.rollouts], protocol=2)))
    except Exception as error:  # tasks of users may raise any exception
        return f"{type(error).__name__}: {error}"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("finished groups whose tasks cannot be read from a checkpoint are sampled again after a restart: %s", reason)
