"""``tests/gpu`` on the simulated GPU, and the list of what cannot run there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.simulated_device import find_obstacle, refuse_replaced_functions
from support.simulated_device.in_process import ROOT, run_tests
from support.simulated_device.not_simulated import REASONS

pytestmark = pytest.mark.slow
QUICK = [f"test_gpu_{name}.py" for name in ("costs", "engine", "waiting")]
FILES = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))


@pytest.fixture(autouse=True)
def compiler() -> None:
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(obstacle)


@pytest.mark.extensions
@pytest.mark.exhaustive
@pytest.mark.parametrize("file", [file for file in FILES if file not in REASONS])
def test_what_runs_on_a_gpu_runs_on_the_simulated_one(file: str, tmp_path: Path) -> None:
    run_simulated([file], tmp_path)


@pytest.mark.extensions
def test_the_telling_cases_of_a_gpu_run_on_the_simulated_one(tmp_path: Path) -> None:
    run_simulated(QUICK, tmp_path, "-m", "not exhaustive")


def run_simulated(files: list[str], folder: Path, *options: str) -> None:
    code, said = run_tests([*(f"tests/gpu/{file}" for file in files), *options], folder)
    assert code == 0, said
    skipped = [line for line in said.splitlines() if line.startswith("SKIPPED")]
    assert all(re.search("not simulated: |needs two GPUs|needs a GPU for each rank", line) for line in skipped), said


def test_the_list_of_what_cannot_be_simulated_names_tests_that_exist() -> None:
    for key in REASONS:
        file, _, test = key.partition("::")
        assert file in FILES, key
        assert re.search(rf"^def {test.partition('[')[0]}", (ROOT / "tests/gpu" / file).read_text(), re.M), key


def test_it_is_refused_where_a_library_has_replaced_what_it_is_told_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does, once a module that imports its worker for a CPU is imported by what all forks share."""
    refuse_replaced_functions()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with pytest.raises(RuntimeError, match=f"torch.Tensor.pin_memory was replaced by {__name__}"):
        refuse_replaced_functions()
