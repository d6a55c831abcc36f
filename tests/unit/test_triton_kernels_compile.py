"""Every Triton kernel of the package is compiled to a cubin as its callers call it, for three generations of GPUs, without a GPU.

Triton's interpreter never looks at what the compiler refuses: annotations, types that it cannot infer, shared memory.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from support.sweep import sweep

PACKAGE = Path(strop.__file__).parent
ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def call_row_kernels() -> None:
    from strop.models.logprobs.lm_head import RowSlopes
    from strop.models.logprobs.row_kernels import TritonRows

    rows = TritonRows()
    # Triton knows whether a stride is a multiple of 16.
    for dtype, vocabulary in ((torch.float32, 50257), (torch.bfloat16, 4096), (torch.float16, 50257)):
        product = torch.zeros(2, vocabulary, dtype=dtype)
        summary = rows.summarize(product, 0.7)
        column = summary.log_normalizer
        for of_entropy in (None, column):
            place = torch.zeros(2, dtype=torch.int64)
            rows.differentiate(product, 0.7, RowSlopes(column, column, of_entropy, shift=column, place=place, chosen=column))


def call_merge_kernel() -> None:
    from strop.models.attention.merge_kernel import merge_rows_on_gpu

    rows = torch.arange(3)
    for dtype, part_dtype in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32, torch.bfloat16)):
        for heads, size in ((12, 128), (5, 72)):
            output, part = torch.zeros(4, heads, size, dtype=dtype), torch.zeros(3, heads, size, dtype=part_dtype)
            for place in (rows, slice(0, 3), slice(1, 4)):
                merge_rows_on_gpu(output, torch.zeros(heads, 4), part, torch.zeros(heads, 3), place)


# What calls the kernels of each module with every dtype, alignment and branch that a run can reach.
CALLERS: dict[str, Callable[[], None]] = {
    "strop.models.attention.merge_kernel": call_merge_kernel,
    "strop.models.logprobs.row_kernels": call_row_kernels,
}


@pytest.mark.slow
@pytest.mark.parametrize("architectures", sweep([(90,), ARCHITECTURES], (90,)), ids=str)
def test_every_kernel_compiles_as_it_is_called(
    architectures: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = record_compilations(monkeypatch, tmp_path)
    for device in map(ARCHITECTURES.index, architectures):
        stand_for_gpu(monkeypatch, device)
        for call in CALLERS.values():
            call()
    for kernel in find_kernels():
        for architecture in architectures:
            variants = compiled[kernel, architecture]
            assert variants, f"{kernel} was not compiled for sm_{architecture}: let a function of CALLERS call it"
            for name, values in _switches(variants).items():
                assert values == {False, True}, f"{kernel}, sm_{architecture}: only {name}={values} was compiled"


def find_kernels() -> Iterator[str]:
    """The functions of the package that Triton compiles, as ``module.name``."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "triton" not in (text := path.read_text(encoding="utf-8")):
            continue
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                yield f"{module}.{node.name}"


def record_compilations(monkeypatch: pytest.MonkeyPatch, cache: Path) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Let launches only compile. Returns the constants of each compilation by kernel and architecture, filled as they happen."""
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    compiled: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        result = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        assert result.asm["cubin"], kernel
        compiled[f"{kernel.__module__}.{kernel.__name__}", result.metadata.target.arch].append(kwargs)
        return result

    monkeypatch.setattr(JITFunction, "run", compile_only)
    return compiled


def stand_for_gpu(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    """Triton's driver is one that has a GPU of ``ARCHITECTURES[device]``; kernels are kept by device."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        get_current_device = staticmethod(partial(int, device))
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(partial(GPUTarget, "cuda", ARCHITECTURES[device], 32))

    monkeypatch.setattr(driver, "_active", Driver())


def _switches(variants: list[dict[str, Any]]) -> dict[str, set[bool]]:
    """The values of each boolean constant of a kernel."""
    values: dict[str, set[bool]] = defaultdict(set)
    for variant in variants:
        for name, value in variant.items():
            if isinstance(value, bool):
                values[name].add(value)
    return values
