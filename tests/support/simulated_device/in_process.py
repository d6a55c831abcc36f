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
    return int(process.exitcode), output.read_text()


def _main(arguments: list[str], output: str) -> None:
    import pytest

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.chdir(ROOT)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--simulated-gpu", *arguments]))


def take_simulated_gpu() -> None:
    """Have the simulated GPU in this process, for ``auto`` too. For ``before`` of a run."""
    from strop import gpus
    from support import simulated_device

    simulated_device.install()
    gpus.KIND = "sim"


def compute_as_a_gpu() -> None:
    """For ``before`` of a run: leave out what only a CPU has, its fused attention and its small tiles of logits.

    The last digit of MKL's products depends on where their memory begins: weights that a CPU reads from a mapped file begin at any multiple
    of 8 bytes, those sent to a device at one of 64. Strict, it does not; MKL reads the variable at its first call.
    """
    os.environ["MKL_CBWR"] = "AUTO,STRICT"
    import torch

    from strop.models.logprobs import lm_head

    torch.backends.cuda.enable_flash_sdp(False)  # the CPU's too
    lm_head.CPU_ROWS = lm_head.CPU_COLUMNS = 1 << 16


def compute_on_simulated_gpu() -> None:
    compute_as_a_gpu()
    take_simulated_gpu()
