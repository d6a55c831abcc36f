"""On a GPU with ``policy.deterministic``: two equal passes are equal to the last bit, with siblings that share a prompt."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from support.equal_passes import count_differences

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.float32, "auto"),
        (torch.float32, "plain"),
        (torch.bfloat16, "auto"),
        (torch.bfloat16, "plain"),
        (torch.bfloat16, "flash"),
    ],
)
def test_two_equal_passes_are_equal_to_the_last_bit(dtype: torch.dtype, kernel: str) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(count_differences, ("cuda", dtype, kernel)) == 0
