"""The Triton kernel that merges a part of attention, in Triton's interpreter, against PyTorch's operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CODE = """
import json, torch
from strop.models.attention import merge_kernel
from strop.models.attention.merged_attention import merge_rows_by_operators

generator = torch.Generator().manual_seed(3)
draw = lambda *shape: torch.randn(shape, generator=generator)
errors = []
for dtype, part_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
    for rows in (slice(2, 7), slice(0, 5), torch.tensor([6, 0, 3, 1, 5])):
        for heads, size, block in ((5, 24, 64), (2, 8, 4096), (3, 8, 8)):
            merge_kernel.BLOCK = block  # less than a row: several programs, the last one partly filled
            output, lse, part, part_lse = draw(8, heads, size).to(dtype), draw(heads, 8), draw(5, heads, size), draw(heads, 5)
            part = part.to(part_dtype)
            lse[0, 3], part_lse[0, 2], part_lse[1, 4] = float("-inf"), float("-inf"), float("-inf")
            wanted = [output.clone(), lse.clone()]
            merge_rows_by_operators(*wanted, part, part_lse, rows)
            merge_kernel.merge_rows_on_gpu(output, lse, part, part_lse, rows)
            size = torch.finfo(dtype).eps * 4
            errors.append(float((output.float() - wanted[0].float()).abs().max()) / size)
            assert torch.equal(lse.isinf(), wanted[1].isinf())
            errors.append(float((lse.exp() - wanted[1].exp()).abs().max()) / 1e-5)
            assert not output.isnan().any()
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_the_kernel_merges_as_the_operators_do() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    output = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=200)
    assert output.returncode == 0, output.stderr
    errors: list[float] = json.loads(output.stdout)
    assert len(errors) == 54 and max(errors) <= 1, max(errors)
