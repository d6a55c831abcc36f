"""What both kinds of sandbox start with on this machine: bubblewrap in a user namespace with users of its own, and control groups."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

_MOUNT = Path("/sys/fs/cgroup")
_BASE_MB, _BASE_PROCESSES = 32, 4  # of the worker and the job
_numbers = itertools.count()


@dataclass(frozen=True)
class Cgroup:
    """The folders of one group: one for each controller in version 1, one for all in version 2."""

    memory: Path
    pids: Path
    version: int

    @property
    def entering(self) -> list[str]:
        """The beginning of a command that joins the group before it runs the rest."""
        script = " ".join(f'echo $$ > "{folder}/cgroup.procs" &&' for folder in {self.memory, self.pids}) + ' exec "$@"'
        return ["/bin/sh", "-c", script, "sh"]

    def limit(self, memory_mb: int, processes: int) -> None:
        """Set what the next job may use."""
        memory = str((memory_mb + _BASE_MB) << 20)
        with suppress(OSError):  # below what is in use just now: the measurement of the job holds the limit
            (self.memory / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")).write_text(memory)
        (self.pids / "pids.max").write_text(str(processes + _BASE_PROCESSES))

    def count_kills(self) -> int:
        """How often the kernel has killed a process of the group for its memory."""
        file = self.memory / ("memory.oom_control" if self.version == 1 else "memory.events")
        lines = [line.split() for line in file.read_text().splitlines()]
        return next((int(words[1]) for words in lines if words[0] == "oom_kill"), 0)

    def remove(self) -> None:
        for folder in {self.memory, self.pids}:
            for _ in range(100):
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:  # its last process is still leaving
                    time.sleep(0.01)


def make_cgroup() -> Cgroup | None:
    """Make a group; None where this process may not."""
    parents = find_parents()
    if parents is None:
        return None
    _remove_left_over(parents)
    name = f"strop_sandbox_{os.getpid()}_{next(_numbers)}"
    group = Cgroup(parents.memory / name, parents.pids / name, parents.version)
    for folder in {group.memory, group.pids}:
        folder.mkdir(exist_ok=True)
    return group


@lru_cache(maxsize=1)
def _remove_left_over(parents: Cgroup) -> None:
    """Remove the groups of processes that were killed. One that is in use cannot be removed."""
    for folder in {parents.memory, parents.pids}:
        for group in folder.glob("strop_sandbox_*_*"):
            if not Path("/proc", group.name.split("_")[2]).exists():
                with suppress(OSError):
                    group.rmdir()


@lru_cache(maxsize=1)
def find_parents() -> Cgroup | None:
    """Return the folders in which this process may make groups; None if there are none."""
    own = dict(_own_groups())
    if "memory" in own and "pids" in own:
        candidate = Cgroup(_MOUNT / "memory" / own["memory"], _MOUNT / "pids" / own["pids"], 1)
        return candidate if _can_make_groups(candidate) else None
    here = _MOUNT / own.get("", "")
    for folder in (here, here.parent):
        if folder == _MOUNT.parent:
            continue
        with suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                candidate = Cgroup(folder, folder, 2)
                if _can_make_groups(candidate):
                    return candidate
    return None


def _own_groups() -> Mapping[str, str]:
    """The groups of this process by controller; "" is version 2."""
    with suppress(OSError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        return {controller: path.lstrip("/") for _, controllers, path in lines for controller in controllers.split(",")}
    return {}


def _can_make_groups(parents: Cgroup) -> bool:
    made: list[Path] = []
    try:
        for folder in {parents.memory, parents.pids}:
            probe = folder / f"strop_sandbox_probe_{os.getpid()}"
            probe.mkdir()
            made.append(probe)
        group = Cgroup(
            made[0] if parents.version == 2 else parents.memory / made[0].name, parents.pids / made[0].name, parents.version
        )
        group.limit(64, 16)
        group.count_kills()
        return True
    except OSError:
        return False
    finally:
        for probe in made:
            with suppress(OSError):
                probe.rmdir()


def start_bubblewrap(
    command: list[str], descriptors: Sequence[int], options: Mapping[str, Any], find_maps: Callable[[int], Sequence[str]] | None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command with bubblewrap in it. Return its process, and the number of the first process inside.

    ``find_maps``: from that number to maps of users, of which the first that this process may write is used; None: bubblewrap maps
    this user. Raises OSError if bubblewrap ends before.
    """
    blocked, ready = os.pipe()
    reading, info = os.pipe()
    try:
        place = command.index("--cap-drop")
        held = ["--userns-block-fd", str(blocked)] if find_maps is not None else []
        command = [*command[:place], "--info-fd", str(info), *held, *command[place:]]
        # With the reading end: if this process is killed now, bubblewrap must not die of its report, because what it has started waits for
        # its next word forever.
        process = subprocess.Popen(command, pass_fds=(*descriptors, reading, info, *([blocked] if held else [])), **options)
        os.close(info)
        info = -1
        text = b""
        while b"}" not in text and (part := os.read(reading, 4096)):
            text += part
        if b"}" not in text:
            process.wait()
            raise OSError("bubblewrap ended")
        child = int(json.loads(text)["child-pid"])
        if find_maps is not None:
            _write_maps(child, find_maps(child))
            os.write(ready, b"1")
        return process, child
    finally:
        for descriptor in (blocked, ready, reading, info):
            if descriptor >= 0:
                os.close(descriptor)


def _write_maps(process: int, maps: Sequence[str]) -> None:
    for kind in ("uid", "gid"):
        for number, text in enumerate(maps):
            try:
                Path(f"/proc/{process}/{kind}_map").write_text(text)
                break
            except OSError:  # this root has few users itself, in a container
                if number == len(maps) - 1:
                    raise
