"""What the sandbox of this machine enforces, as ``strop sandbox check`` says it."""

from __future__ import annotations

from dataclasses import dataclass

from strop.extensions.code.sandbox.base import ExitReason, Limits, Program, SandboxError
from strop.extensions.code.sandbox.launcher import LANGUAGES, PACKAGES
from strop.extensions.code.sandbox.sandbox_config import SandboxConfig, SandboxLevel, find_missing
from strop.extensions.code.sandbox.sandbox_pool import SandboxPool
from strop.extensions.sandboxes.local.bubblewrap import find_parents

LIMITS = Limits(cpu_s=1.0, wall_s=2.0, memory_mb=64, processes=8, open_files=16, file_mb=1, disk_mb=4, output_kb=4)

# A program for each promise; it prints "held" where the promise is kept.
PROBES: dict[str, str] = {
    "no network": "import socket\ntry: socket.socket()\nexcept OSError: print('held')",
    "no files of the machine": "import os\nprint('held' if not os.path.exists('/etc/passwd') else 'open')",
    "no writing outside its folder": """
import os
try:
    open("/var/strop_probe", "w")
    os.remove("/var/strop_probe")
except OSError:
    print("held")
""",
    "no other processes": "import os\nprint('held' if not os.path.exists('/proc/1') else 'open')",
    "system calls filtered": "import ctypes\nprint('held' if ctypes.CDLL(None).unshare(0) < 0 else 'open')",
    "user of its own": "import os\nprint('held' if os.getuid() == 65534 else 'open')",
    "processes limited": """
import os, time
try:
    for i in range(40):
        if os.fork() == 0:
            time.sleep(1)
            os._exit(0)
except OSError:
    print("held")
""",
}
ENDINGS: dict[str, tuple[str, ExitReason]] = {
    "time limited": ("while True: pass", ExitReason.TIME),
    "memory limited": ("import time\na = b'x' * (200 << 20)\ntime.sleep(1)", ExitReason.MEMORY),
    "output limited": ("while True: print('x' * 1000)", ExitReason.OUTPUT),
}
PROMISES: dict[SandboxLevel, tuple[str, ...]] = {  # docs/security.md says the same
    "namespaces": (*PROBES, *ENDINGS),
    "seccomp": ("no network", "no writing outside its folder", "system calls filtered", "processes limited", *ENDINGS),
    "limits": tuple(ENDINGS),
}


@dataclass(frozen=True)
class SandboxFinding:
    """A line of the table."""

    what: str
    held: bool
    promised: bool = True  # by the level
    note: str = ""


async def check_sandbox(config: SandboxConfig) -> list[SandboxFinding]:
    """Try what a level promises, with programs. Raises SandboxError if the level cannot be had at all."""
    if missing := find_missing(config.level):
        raise SandboxError(missing)
    pool = SandboxPool(config)
    try:
        findings = []
        for what, source in PROBES.items():
            result = await pool.run(Program(source=source, limits=LIMITS))
            findings.append(SandboxFinding(what, "held" in result.stdout, what in PROMISES[config.level]))
        for what, (source, reason) in ENDINGS.items():
            result = await pool.run(Program(source=source, limits=LIMITS))
            note = _describe_memory(config) if what.startswith("memory") else ""
            findings.append(SandboxFinding(what, result.reason == reason, note=note))
        for language in LANGUAGES:
            found = language in pool.commands and (config.level != "seccomp" or language == "python")
            findings.append(SandboxFinding(f"runs {language}", found, False, "" if found else _say_why(language, config)))
        return findings
    finally:
        await pool.close()


def _describe_memory(config: SandboxConfig) -> str:
    parents = find_parents() if config.level == "namespaces" else None
    if parents is None:
        return "measured 50 times a second, without control groups"
    return f"by control groups, version {parents.version}, and measured"


def _say_why(language: str, config: SandboxConfig) -> str:
    return "the level runs Python only" if config.level == "seccomp" else f"install {PACKAGES[language]}"
