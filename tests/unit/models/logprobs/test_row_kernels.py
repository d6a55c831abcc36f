"""Triton's kernels, in Triton's interpreter, against PyTorch's operators. What a GPU makes of them is in tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CODE = """
import json, torch
from strop.models.logprobs import row_kernels, token_logprobs as module
from strop.models.logprobs.lm_head import TileShape, TorchTiles
from strop.models.logprobs.row_kernels import TritonRows

row_kernels.BLOCK = 16  # 50 logits are four blocks, the last one partly filled

def run(operations, dtype, temperature, weights):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    leaves = [draw(11, 6).to(dtype), draw(50, 6).to(dtype), draw(50).to(dtype)]
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    module.choose_operations = lambda device, dtype: operations
    module.choose_tile_shape = lambda device, vocabulary, chunk: TileShape(4, 50)
    target = torch.randint(50, (11,), generator=generator)
    outputs = module.tiled_logprobs(hidden, target, weight, bias, temperature, 4)
    total = sum(by * (draw(11) * column).sum() for by, column in zip(weights, outputs) if by)
    return [*outputs, *torch.autograd.grad(total, [hidden, weight, bias])]

errors = {}
for place, dtype in enumerate((torch.float32, torch.bfloat16)):
    for number, weights in enumerate(((1.0, 0.0), (0.0, 1.0), (1.0, -0.3))):
        temperature = (1.0, 0.7)[(place + number) % 2]
        pairs = zip(run(TritonRows(), dtype, temperature, weights), run(TorchTiles(), dtype, temperature, weights))
        errors[f"{dtype} {temperature} {weights}"] = [float((a.float() - b.float()).abs().max()) for a, b in pairs]
print(json.dumps(errors))
"""


@pytest.mark.slow
def test_the_kernels_give_the_numbers_of_the_operators() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    output = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=200)
    assert output.returncode == 0, output.stderr
    errors: dict[str, list[float]] = json.loads(output.stdout)
    assert len(errors) == 6
    for case, found in errors.items():
        of_values, of_gradients = max(found[:2]), max(found[2:])
        assert of_values < 5e-6, case
        assert of_gradients < (2e-5 if "float32" in case else 0.07), f"{case}: a step of bfloat16 between 4 and 8 is 0.03"
