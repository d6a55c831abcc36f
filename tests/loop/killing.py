"""Kill a run at a chosen point: it sends itself SIGKILL at the n-th call of a function, without flushing or handlers."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# Point -> the function at whose call the run dies.
POINTS = {
    "at a flush to disk": "os:fsync",
    "at a rename": "pathlib:Path.rename",
    "at a file's replacement": "os:replace",
    "at a file of the checkpoint": "torch:save",
    "at the log": "strop.monitoring.trackers.jsonl:JsonlTracker.log",
    "at the stored rollouts": "strop.monitoring.rollout_store.rollout_store:RolloutStore.write",
    "at pruning": "strop.checkpointing.folders:FolderCheckpointer._prune",
    "at a save": "strop.checkpointing.folders:FolderCheckpointer.save",
    "at the optimizer step": "strop.learner.torch.learner:TorchLearner.step",
    "in a micro-batch": "strop.learner.torch.learner:TorchLearner._compute_outputs",
    "at a validation": "strop.trainer.evaluation:Evaluator.evaluate",
    "while generating": "strop.generation.torch.torch_engine:TorchEngine._decode",
    "at a publish": "strop.weight_sync.in_process:InProcessWeights.publish",
    "in the middle of a publish": "strop.weight_sync.transports.host_memory:MemorySender._fill_bucket",
}


def replace_function(place: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function at ``place``, which is module:name or module:Class.name, with ``around``."""
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for part in owners:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    replacement = around(function)
    setattr(owner, name, replacement)
    for loaded in [] if owners else [one for key, one in list(sys.modules.items()) if key.startswith("strop.")]:
        if vars(loaded).get(name) is function:  # by ``from module import name``: the server of the forks has imported it
            setattr(loaded, name, replacement)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@dataclass(frozen=True)
class Kill:
    """Kills the run before or after the n-th call of a point."""

    point: str
    nth: int
    when: Literal["before", "after"] = "before"

    def __call__(self) -> None:
        replace_function(POINTS[self.point], self._around)

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        @functools.wraps(function)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.nth and self.when == "before":
                die()
            result = function(*arguments, **options)
            if calls == self.nth:
                die()
            return result

        return wrapped

    def __str__(self) -> str:
        return f"{self.when} call {self.nth} {self.point}"


@dataclass(frozen=True)
class HalfALine:
    """Kills the run in the middle of writing the n-th line of metrics.jsonl."""

    nth: int

    def __call__(self) -> None:
        from strop.monitoring.trackers.jsonl import JsonlTracker

        write, calls = JsonlTracker._append, 0

        def half(tracker: JsonlTracker, line: str) -> None:
            nonlocal calls
            calls += 1
            if calls == self.nth:
                with tracker.path.open("a") as file:
                    file.write(line[: len(line) // 2])
                die()
            write(tracker, line)

        JsonlTracker._append = half  # type: ignore[method-assign]

    def __str__(self) -> str:
        return f"in the middle of line {self.nth} of metrics.jsonl"


@dataclass(frozen=True)
class HalfAFolder:
    """Kills the run in the middle of the n-th removal of a folder, with half of its files deleted."""

    nth: int

    def __call__(self) -> None:
        import shutil

        remove, calls = shutil.rmtree, 0

        def half(folder: Path) -> None:
            nonlocal calls
            calls += 1
            if calls == self.nth:
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                for path in files[: len(files) // 2]:
                    path.unlink()
                die()
            remove(folder)

        shutil.rmtree = half  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"in the middle of removing folder {self.nth}"
