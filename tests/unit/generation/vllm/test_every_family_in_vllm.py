"""Families and their rotary embeddings in a real vLLM engine: the log-probabilities of Transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.sweep import sweep
from support.vllm_families import SERVED, compare_in_vllm

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop

NAMES = {" ".join(case): case for case in SERVED}


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(NAMES))
def test_an_engine_samples_with_the_log_probabilities_of_transformers(case: str, room: BackgroundLoop, tmp_path: Path) -> None:
    assert compare_in_vllm(room, *NAMES[case], tmp_path) < 1e-6
