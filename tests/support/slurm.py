"""A minimal Slurm to run ``ray.sub`` on this machine, where all nodes are this machine.

``srun`` runs a step once for each requested node. It forwards signals only to the first process of each task, like Slurm's
proctrack/cgroup. It kills nothing at the end of a step, so that tests see what a job leaves behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PYTHON = Path(sys.executable)


def install(folder: Path) -> None:
    """Install ``srun`` and ``scontrol`` in ``folder``, which belongs at the front of PATH."""
    for name in ("srun", "scontrol"):
        (folder / name).write_text(f'#!/bin/bash\nexec {PYTHON} {Path(__file__)} {name} "$@"\n')
        (folder / name).chmod(0o755)


def scontrol(arguments: list[str]) -> int:
    assert arguments[:2] == ["show", "hostnames"], arguments
    print("\n".join(arguments[2].split(",")))
    return 0


def srun(arguments: list[str]) -> int:
    """Run a step. Options are ``--name=value`` or ``--name``; the first other word starts the command."""
    place = next(number for number, word in enumerate(arguments) if not word.startswith("--"))
    options = dict(word[2:].partition("=")[::2] for word in arguments[:place])
    if record := os.environ.get("SRUN_RECORD"):
        with Path(record).open("a") as file:
            file.write(json.dumps(options) + "\n")
    nodes = options["nodelist"].split(",")
    assert len(nodes) == int(options["nodes"]) == int(options["ntasks"]), options
    tasks = [task(node, arguments[place:], options.get("output", "")) for node in nodes]

    def forward(number: int, frame: Any) -> None:
        for process in tasks:
            if process.poll() is None:
                process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    while any(process.poll() is None for process in tasks):
        if any(process.poll() for process in tasks) and "kill-on-bad-exit" in options:
            forward(signal.SIGTERM, None)
        time.sleep(0.05)
    codes = [process.returncode for process in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def task(node: str, command: list[str], output: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "SLURMD_NODENAME": node}
    if not output:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with Path(output.replace("%N", node)).open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
