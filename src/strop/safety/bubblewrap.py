"""Runs commands in bubblewrap: without network, and without this machine's files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

NOBODY = 65534
_DEVICES = ("null", "zero", "full", "random", "urandom")
NAMESPACES = (
    *(f"--unshare-{kind}" for kind in ("user", "ipc", "pid", "net", "uts")),
    "--as-pid-1",
    "--die-with-parent",
    "--new-session",
)


def isolate_command(command: list[str], readable: Iterable[str]) -> list[str]:
    """Return a command that runs ``command`` without network and without this machine's files, except ``readable`` and the
    system.

    Its /tmp is empty except for ``readable`` paths in it. If bubblewrap does not work, the command itself is returned.
    """
    if not _bubblewrap_works():
        return command
    identity = ["--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    return [
        "bwrap",
        *NAMESPACES,
        *identity,
        *("--perms", "0700", "--tmpfs", "/tmp"),  # first, otherwise it would hide readable paths below /tmp
        *show_system(readable),
        "--remount-ro",
        "/",
        *command,
    ]


@lru_cache(maxsize=1)
def _bubblewrap_works() -> bool:
    """Whether bubblewrap can create its namespaces on this machine."""
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return False
    command = ["bwrap", *NAMESPACES, *show_system(()), "/usr/bin/env", "true"]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 0


def show_system(readable: Iterable[str], shown_at: Callable[[str], str] = str) -> list[str]:
    """Return the arguments that expose this machine's programs and libraries, the interpreter, and ``readable``."""
    options = ["--ro-bind", "/usr", "/usr"]
    for folder in ("bin", "lib", "lib64", "sbin"):
        path = Path("/", folder)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    made: set[str] = {"/", "/usr"}
    for needed in (sys.base_prefix, *readable):
        options += list(_bind(needed, shown_at(needed), made))
    options += ["--perms", "0755", "--dir", "/etc"]
    if Path("/etc/alternatives").is_dir():
        options += ["--ro-bind", "/etc/alternatives", "/etc/alternatives"]  # where /usr/bin's links lead
    options += ["--proc", "/proc", "--perms", "0755", "--dir", "/dev"]
    for device in _DEVICES:
        options += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return options


def _bind(path: str, shown_at: str, made: set[str]) -> Iterator[str]:
    """Bind ``path`` read-only, with parents that every user may enter, regardless of their permissions outside."""
    if path.startswith("/usr/"):
        return
    for parent in reversed(Path(shown_at).parents):
        if str(parent) not in made:
            made.add(str(parent))
            yield from ("--perms", "0755", "--dir", str(parent))
    yield from ("--ro-bind", path, shown_at)
