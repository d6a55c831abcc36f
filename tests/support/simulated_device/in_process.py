"""Tests of ``tests/gpu`` on the simulated GPU, in a process of their own, as one cannot be given back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from support.forks import forks

ROOT = Path(__file__).parents[3]


def run_tests(arguments: list[str], folder: Path, timeout: float = 300) -> tuple[int, str]:
    """Run ``pytest --simulated-gpu ARGUMENTS`` in a fork. Return its status and what it printed."""
    output = folder / "output"
    process = forks().Process(target=_main, args=(arguments, str(output)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    return int(process.exitcode or 0), output.read_text()


def _main(arguments: list[str], output: str) -> None:
    import pytest

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(ROOT)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--simulated-gpu", *arguments]))


def make_simulated_gpu_the_runs() -> None:
    """For ``before`` of a run: what the configuration calls a GPU is the simulated one."""
    from strop import gpus
    from support import simulated_device

    simulated_device.install()
    gpus.KIND = "sim"
