"""Threads that wait at a barrier sleep soon, in every process that Strop starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from strop.openmp import openmp_variables
from support.each import each

SHOW = "import os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


@each(
    "given, expected",
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),  # a spin count would override it
    ],
)
def test_a_user_who_chose_how_threads_wait_is_followed(given: dict[str, str], expected: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            patch.delenv(name, raising=False)
        for name, value in given.items():
            patch.setenv(name, value)
        assert openmp_variables() == expected


@each(
    "code, expected",
    [
        (f"from strop.cli import main; main(['--help']); {SHOW}", "1000 False"),
        (f"import strop; {SHOW}", "None False"),  # a program of one's own keeps its environment
    ],
    ids=("the command", "the package"),
)
def test_a_command_sets_the_spin_count_before_torch_is_imported(code: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == expected
