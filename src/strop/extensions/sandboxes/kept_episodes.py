"""Episodes that were in the middle when a run was killed, so that it goes on there: a folder next to the checkpoints.

    NUMBER OF THE GROUP-SEED.pt     the rollout so far and the environment's state, or a finished rollout of an unfinished group

A file is written after a turn, whenever the environment has kept its state (``EpisodeState``), and removed when its group ends. What
weights sampled that the checkpoint does not have is not used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from strop.checkpointing.base import load_own_classes
from strop.config import RolloutRunConfig
from strop.environments.handle import EnvironmentHandle
from strop.monitoring.trackers.base import Tracker
from strop.runs.evaluation_job import make_episode_rules
from strop.runs.monitors.run_listeners import RunSetup
from strop.runs.rollout_run import SampledSource
from strop.storage.files import atomic_write
from strop.trainer.listeners import RunListener
from strop.types import Rollout, Task
from strop.user_code import describe_error


class EpisodeState(Protocol):
    """What an environment has as ``episode_state`` if its sessions can go on in another process."""

    async def save(self, task: Any, rollout: Rollout) -> bytes | None:
        """Return the state of the session after the last turn; None: not after this turn."""
        ...

    async def restore(self, task: Any, rollout: Rollout, state: bytes) -> None:
        """Bring a new session to a saved state. If this raises, the episode begins again in that session."""
        ...


class KeptEpisodes(RunListener):
    """Gives the source of a run what keeps its episodes."""

    name = "kept_episodes"

    def __init__(self, source: SampledSource, folder: Path, settings: str) -> None:
        self.folder, self.note = folder, source.tracker.note
        source.keep = lambda group: KeptGroup(folder, self.note, settings, group)

    async def on_start(self, step: int, tracker: Tracker) -> None:
        drop_newer(self.folder, step, self.note)


def make_kept_episodes(setup: RunSetup) -> KeptEpisodes | None:
    """Keep the episodes of a run that has an environment whose sessions can go on; None for others."""
    config, source = setup.config, setup.source
    if not isinstance(config, RolloutRunConfig) or not isinstance(source, SampledSource) or not config.checkpointing.enabled:
        return None
    if not any(component.environment.traits.episode_state for component in source.train.components):
        return None
    settings = repr((source.sampling, make_episode_rules(config)))
    return KeptEpisodes(source, Path(config.checkpointing.checkpoint_dir) / "episodes", settings)


@dataclass(frozen=True)
class KeptGroup:
    """The episodes of one group; a ``strop.rollouts.episode.EpisodeKeeper``."""

    folder: Path
    note: Callable[[str], None]
    settings: str  # of sampling: what was sampled by others is not used
    group: int

    def find_ended(self, rollout: Rollout) -> Rollout | None:
        found = self._find(rollout)
        return None if found is None or found[0].ending is None else found[0]

    async def restore(self, environment: EnvironmentHandle[Any], rollout: Rollout) -> Rollout | None:
        if (found := self._find(rollout)) is None:
            return None
        begun, state = found
        what = f"sample {rollout.sample} of task {rollout.task.id}"
        try:
            await environment.traits.episode_state.restore(rollout.task, begun, state)
        except Exception as error:
            self.note(f"warning: {what} begins again, because its environment cannot go on: {describe_error(error)}")
            return None
        self.note(f"{what} goes on after turn {len(begun.policy_turns)}, where the run was killed")
        return begun

    def _find(self, rollout: Rollout) -> tuple[Rollout, Any] | None:
        path = self._path(rollout)
        saved = _read(path) if path.exists() else None
        if saved is None or (saved["settings"], saved["rollout"].task.id) != (self.settings, rollout.task.id):
            return None
        return replace(saved["rollout"], task=rollout.task), saved["state"]

    async def keep(self, environment: EnvironmentHandle[Any], rollout: Rollout) -> None:
        if (keeping := environment.traits.episode_state) is None:
            return
        state = None if rollout.ending is not None else await keeping.save(rollout.task, rollout)
        if state is None and rollout.ending is None:
            return
        bare = replace(rollout, task=Task(id=rollout.task.id))  # the run makes the task again
        saved = {"rollout": bare, "state": state, "settings": self.settings}

        def write() -> None:
            with atomic_write(self._path(rollout)) as path:
                torch.save(saved, path)

        try:
            await asyncio.to_thread(write)
        except OSError as error:
            self.note(f"warning: an episode in the middle was not kept, and would begin again: {error}")

    def forget(self) -> None:
        for path in self.folder.glob(f"{self.group}-*.pt"):
            path.unlink(missing_ok=True)

    def _path(self, rollout: Rollout) -> Path:
        return self.folder / f"{self.group}-{rollout.seed:x}.pt"


def drop_newer(folder: Path, step: int, note: Callable[[str], None]) -> None:
    """Remove what weights later than those of ``step`` sampled, from which the run goes on. ``note`` says how many begin again."""
    paths = list(folder.glob("*.pt"))
    newer = [path for path in paths if (saved := _read(path)) is None or _newest(saved["rollout"]) > step]
    for path in newer:
        path.unlink(missing_ok=True)
    if newer:
        note(
            f"{len(newer)} of {len(paths)} episodes in the middle begin again: newer weights than those of step {step} sampled them"
        )


def _newest(rollout: Rollout) -> int:
    return max([rollout.version, *(int(version) for turn in rollout.policy_turns for version in turn.versions)])


def _read(path: Path) -> dict[str, Any] | None:
    """Read a file; None for one that this version cannot read."""
    try:
        saved: dict[str, Any] = load_own_classes(path)
        return saved
    except Exception:
        return None
