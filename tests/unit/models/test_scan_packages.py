"""Kernels of packages for recurrences: their arguments and states, and that a wrong one is not used."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.models import kernel_packages
from strop.models.attention.tree_plan import TreePlan
from strop.models.mixers import recurrence
from strop.models.mixers.recurrence import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    MixerSpec,
    Recurrence,
    ScanPackage,
    delta_rule,
    find_fault,
    state_space,
    with_kernel,
)

CPU = torch.device("cpu")
HEADS, KEY, VALUE = 4, 16, 16  # a state on its side has the right shape
SHAPES = {
    GATED_DELTA_RULE: ((HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)),
    KIMI_DELTA_ATTENTION: ((HEADS, KEY), (HEADS, KEY), (HEADS, VALUE), (HEADS, KEY), (HEADS,)),
    MAMBA2: ((2, KEY), (2, KEY), (HEADS, VALUE), (HEADS,), (HEADS,)),
}


def rows_of(package: ScanPackage, tokens: int) -> list[Tensor]:
    """Rows of one flat row of tokens, with the same rates for all tokens."""
    numbers = torch.Generator().manual_seed(1)
    rows = [torch.rand(tokens, *shape, generator=numbers) for shape in SHAPES[package]]
    bounds = zip(rows, package.ranges, strict=True)
    scaled = [row * (high - low) + low for row, (low, high) in bounds]
    return [each * (3 / KEY) ** 0.5 for each in scaled[:2]] + scaled[2:]


def recurrence_of(package: ScanPackage) -> Recurrence:
    _, key, value, *_ = rows_of(package, 1)
    return state_space(key, value) if package is MAMBA2 else delta_rule(key, value, channels=package is KIMI_DELTA_ATTENTION)


def delta_library(change: Callable[..., Any]) -> Callable[..., Any]:
    """Compute what ``chunk_gated_delta_rule`` and ``chunk_kda`` document, one token after the other."""

    def compute(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, scale: float, initial_state: Any, output_final_state: bool
    ) -> Any:
        assert {q.dtype, k.dtype, v.dtype} == {torch.bfloat16} and {g.dtype, beta.dtype} == {torch.float32} and output_final_state
        assert initial_state is None or initial_state.dtype == torch.float32
        state = q.new_zeros(len(q), q.shape[2], q.shape[3], v.shape[3]).float() if initial_state is None else initial_state
        outputs = []
        for token in range(q.shape[1]):
            query, key, value = (each[:, token].float() for each in (q, k, v))
            state = state * g[:, token].reshape(*g.shape[:1], g.shape[2], -1, 1).exp()
            added = beta[:, token, :, None] * (value - torch.einsum("shk,shkv->shv", key, state))
            state = state + key.unsqueeze(-1) * added.unsqueeze(-2)
            outputs.append(torch.einsum("shk,shkv->shv", query * scale, state))
        return change(torch.stack(outputs, 1).to(q.dtype), state)

    return compute


def mamba_library(change: Callable[..., Any]) -> Callable[..., Any]:
    """Compute what ``mamba_chunk_scan_combined`` documents, one token after the other: its states are [V, K]."""

    def compute(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, *, initial_states: Any, return_final_states: bool
    ) -> Any:
        assert {x.dtype, B.dtype, C.dtype} == {torch.bfloat16} and {dt.dtype, A.dtype} == {torch.float32} and return_final_states
        assert A.shape == dt.shape[2:] and chunk_size & (chunk_size - 1) == 0
        state = x.new_zeros(len(x), *x.shape[2:], B.shape[3]).float() if initial_states is None else initial_states
        read_in, read_out = (each.float().repeat_interleave(x.shape[2] // each.shape[2], 2) for each in (B, C))
        outputs = []
        for token in range(x.shape[1]):
            step = dt[:, token, :, None, None]
            state = state * (step * A[:, None, None]).exp()
            state = state + step * x[:, token, :, :, None].float() * read_in[:, token, :, None, :]
            outputs.append(torch.einsum("shvk,shk->shv", state, read_out[:, token]))
        return change(torch.stack(outputs, 1).to(x.dtype), state)

    return compute


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install libraries whose results are changed, and take this device for a GPU on which nothing was chosen yet."""

    def put(package: ScanPackage, change: Callable[..., Any] = lambda *results: results) -> None:
        module: Any = ModuleType(package.module)
        setattr(module, package.function, (mamba_library if package is MAMBA2 else delta_library)(change))
        monkeypatch.setitem(sys.modules, package.module, module)
        monkeypatch.setattr(recurrence, "is_gpu", lambda device: True)
        monkeypatch.setattr(recurrence, "_chosen", {})
        monkeypatch.setattr(kernel_packages, "is_missing", lambda module: module not in sys.modules)
        recurrence._log_choice.cache_clear()

    return put


def fault_of(package: ScanPackage) -> str | None:
    return find_fault(package, recurrence_of(package), SHAPES[package], CPU, torch.bfloat16)


@pytest.mark.parametrize("package", SHAPES, ids=lambda package: package.function)
def test_a_library_that_computes_the_recurrence_has_no_fault_and_each_wrong_result_is_one(
    package: ScanPackage, install: Callable[..., None]
) -> None:
    def fault(change: Callable[..., Any]) -> str:
        install(package, change)
        return str(fault_of(package))

    def raises(*_: Any) -> Any:
        raise RuntimeError("no such GPU")

    install(package)
    assert fault_of(package) is None
    assert fault(raises) == "RuntimeError: no such GPU"
    assert fault(lambda outputs, last: (outputs * 1.2, last)).startswith("its output")
    assert fault(lambda outputs, last: (outputs, last * 1.2)).startswith("its last state")
    assert fault(lambda outputs, last: (outputs, last.mT)).startswith("its last state")
    # The state before a sequence gets no gradient from its last one.
    assert "the gradient of it" in fault(lambda outputs, last: (outputs, last.detach() + 0 * outputs.float().sum()))


@pytest.mark.parametrize("package", SHAPES, ids=lambda package: package.function)
def test_a_tree_computed_by_a_library_has_the_outputs_and_gradients_of_blocks(
    package: ScanPackage, install: Callable[..., None]
) -> None:
    """States pass from a shared segment to two branches of different lengths, one of them a single token, and gradients back."""
    install(package)
    segments = torch.tensor([21, 17, 1]), torch.tensor([-1, 0, 0])
    starts = torch.tensor([0, 21, 38])

    def results(compute: Recurrence) -> list[Tensor]:
        leaves = [row.to(torch.bfloat16).float().requires_grad_() for row in rows_of(package, 39)]
        output = TreePlan(starts, *segments, CPU).scan(compute, leaves, MixerSpec(0, 0))
        return [output, *torch.autograd.grad(output.square().sum(), leaves[:4])]

    plain = recurrence_of(package)
    fused = with_kernel(plain, package, rows_of(package, 39), torch.bfloat16)
    assert fused.kernel is not None
    for own, wanted in zip(results(fused), results(plain), strict=True):
        assert own.dtype == wanted.dtype
        torch.testing.assert_close(own, wanted, atol=0.02 * float(wanted.detach().abs().max()), rtol=0)


def test_what_is_used_is_logged_and_a_wrong_library_is_passed_over_with_a_warning(
    install: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    rows, plain = rows_of(MAMBA2, 5), recurrence_of(MAMBA2)
    with caplog.at_level(logging.INFO), torch.inference_mode():
        install(MAMBA2)
        assert with_kernel(plain, MAMBA2, rows, torch.bfloat16).kernel is not None
        assert with_kernel(plain, MAMBA2, rows, torch.float32) is plain
        install(MAMBA2, lambda outputs, last: (outputs, last + 1))
        assert with_kernel(plain, MAMBA2, rows, torch.bfloat16) is plain
        assert with_kernel(plain, replace(MAMBA2, module="mamba_none"), rows, torch.bfloat16) is plain
    kernel = "mamba_chunk_scan_combined of mamba-ssm"
    assert caplog.messages[0] == f"recurrent layers by {kernel}"
    assert "mamba-ssm is installed, but not used for mamba_chunk_scan_combined with states of (4, 16, 16)" in caplog.messages[1]
    assert caplog.messages[2:] == [f"recurrent layers by blocks of products; {kernel}, where it is installed, is faster"] * 2


def test_deterministic_runs_keep_blocks(install: Callable[..., None]) -> None:
    install(GATED_DELTA_RULE)
    plain = recurrence_of(GATED_DELTA_RULE)
    torch.use_deterministic_algorithms(True)
    try:
        assert with_kernel(plain, GATED_DELTA_RULE, rows_of(GATED_DELTA_RULE, 5), torch.bfloat16) is plain
    finally:
        torch.use_deterministic_algorithms(False)
