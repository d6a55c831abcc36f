"""Log-probabilities tile by tile against one log_softmax, in float64, with tiles far smaller than the matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.models.logprobs import token_logprobs as module
from strop.models.logprobs.lm_head import CPU_COLUMNS, CPU_ROWS, TileShape, choose_tile_shape, count_rows
from strop.models.logprobs.token_logprobs import tiled_logprobs

EXACT = 1e-12  # float64, the order of additions; relative to numbers of about 1
NO_CHUNKS = 1 << 40


@dataclass(frozen=True)
class Problem:
    hidden: Tensor  # [N, H]
    target: Tensor  # [N]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    mix: Tensor  # [2, N], the gradients of log-probabilities and entropies

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight, *([] if self.bias is None else [self.bias])]

    def gradients(self, outputs: tuple[Tensor, Tensor], weights: tuple[float, float]) -> list[Tensor]:
        wanted: Any = sum(
            weight * (mix * column).sum() for weight, mix, column in zip(weights, self.mix, outputs, strict=True) if weight
        )
        return list(torch.autograd.grad(wanted, self.leaves))


def make_problem(rows: int, words: int, width: int, *, bias: bool, seed: int = 0, scale: float = 1.0) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Problem(
        hidden=(draw(rows, width) * scale / width**0.5).requires_grad_(),
        target=torch.randint(words, (rows,), generator=generator),
        weight=draw(words, width).requires_grad_(),
        bias=draw(words).requires_grad_() if bias else None,
        mix=draw(2, rows),
    )


def plain_outputs(problem: Problem, temperature: float) -> tuple[Tensor, Tensor]:
    logs = (torch.nn.functional.linear(problem.hidden, problem.weight, problem.bias) / temperature).log_softmax(-1)
    return logs.gather(1, problem.target[:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)


def outputs_of(problem: Problem, temperature: float, chunk: int = NO_CHUNKS) -> tuple[Tensor, Tensor]:
    return tiled_logprobs(problem.hidden, problem.target, problem.weight, problem.bias, temperature, chunk)


def use_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    monkeypatch.setattr(module, "choose_tile_shape", lambda device, vocabulary, chunk: TileShape(min(chunk, rows), columns))


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        float((own - plain).detach().abs().max()) if own.numel() else 0.0 for own, plain in zip(found, wanted, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    words=st.integers(1, 70),
    tile=st.tuples(st.integers(1, 9), st.integers(1, 80)),
    kept=st.sampled_from([0, 700, 1 << 40]),
    bias=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    weights=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)]),
    scale=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 99),
)
def test_any_tiles_give_the_values_and_gradients_of_one_log_softmax(
    rows: int,
    words: int,
    tile: tuple[int, int],
    kept: int,
    bias: bool,
    temperature: float,
    weights: tuple[float, float],
    scale: float,
    seed: int,
) -> None:
    problem = make_problem(rows, words, 6, bias=bias, seed=seed, scale=scale)
    wanted = plain_outputs(problem, temperature)
    with pytest.MonkeyPatch.context() as patch:
        use_tiles(patch, *tile)
        patch.setattr(module, "MOST_KEPT_LOGITS", kept)
        found = outputs_of(problem, temperature)
        assert largest_error(list(found), list(wanted)) < EXACT * max(1.0, scale)
        own = problem.gradients(found, weights)
    assert largest_error(own, problem.gradients(wanted, weights)) < EXACT * max(1.0, scale) * 10 / temperature


def test_no_rows_give_no_outputs_and_gradients_of_zero() -> None:
    problem = make_problem(0, 11, 4, bias=True)
    outputs = outputs_of(problem, 0.7)
    assert [len(column) for column in outputs] == [0, 0]
    for gradient, leaf in zip(problem.gradients(outputs, (1.0, 1.0)), problem.leaves, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_kept_logits_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and bfloat16: logits that are computed again are the same ones."""
    use_tiles(monkeypatch, 8, 16)
    for dtype in (torch.float32, torch.bfloat16):
        gradients = []
        for kept in (0, 3 * 8 * 16 * 4, 1 << 40):
            monkeypatch.setattr(module, "MOST_KEPT_LOGITS", kept)
            whole = make_problem(21, 50, 6, bias=True)
            hidden, weight, bias = (leaf.detach().to(dtype).requires_grad_() for leaf in whole.leaves)
            problem = Problem(hidden, whole.target, weight, bias, whole.mix.float())
            gradients.append(problem.gradients(outputs_of(problem, 0.9), (1.0, -0.3)))
        for other in gradients[1:]:
            assert all(torch.equal(own, first) for own, first in zip(other, gradients[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beyond_the_products_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are taken row by row here: those of a library may round as the number of rows has it."""

    def multiply(rows: Any, row: slice, column: slice) -> Tensor:
        return torch.stack([(rows.weight[column] * each).sum(1) for each in rows.hidden[row]])

    monkeypatch.setattr(module._Rows, "multiply", multiply)
    use_tiles(monkeypatch, 8, 16)
    whole = make_problem(37, 130, 6, bias=False)
    hidden, weight = (leaf.detach().to(dtype) for leaf in whole.leaves)
    wanted = tiled_logprobs(hidden, whole.target, weight, None, 0.9, NO_CHUNKS)
    for size in (1, 5, 36):
        parts = [
            tiled_logprobs(rows, target, weight, None, 0.9, NO_CHUNKS)
            for rows, target in zip(hidden.split(size), whole.target.split(size), strict=True)
        ]
        for own, column in zip(wanted, zip(*parts, strict=True), strict=True):
            assert torch.equal(own, torch.cat(column)), size


def test_a_graph_may_be_walked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first walk frees the kept logits; the second computes them again."""
    use_tiles(monkeypatch, 8, 16)
    problem = make_problem(21, 50, 6, bias=False)
    logprobs, entropy = outputs_of(problem, 0.9)
    total = logprobs.sum() - 0.1 * entropy.sum()
    first = torch.autograd.grad(total, problem.leaves, retain_graph=True)
    second = torch.autograd.grad(total, problem.leaves)
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_without_a_backward_pass_no_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []

    def read_tiles(rows: Any, target: Tensor, temperature: float, kept: Any, budget: int) -> Any:
        budgets.append(budget)
        return read(rows, target, temperature, kept, budget)

    read = module._read_tiles
    monkeypatch.setattr(module, "_read_tiles", read_tiles)
    problem = make_problem(5, 7, 4, bias=False)
    with torch.no_grad():
        outputs_of(problem, 1.0, chunk=3)
    outputs_of(problem, 1.0, chunk=3)
    outputs_of(problem, 1.0)
    assert budgets == [0, 3 * 7 * 4, module.MOST_KEPT_LOGITS], "chunk rows of float32, and never more than a fixed size"


def test_gradients_under_autocast_keep_the_dtypes_of_the_weights() -> None:
    hidden, weight = torch.randn(9, 6).requires_grad_(), torch.randn(50, 6).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = tiled_logprobs(hidden, torch.randint(50, (9,)), weight, None, 1.0, 4)
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


def test_tiles_depend_on_the_device_and_the_chunk_alone() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_tile_shape(cpu, 151_936, 1024) == TileShape(CPU_ROWS, CPU_COLUMNS)
    assert choose_tile_shape(cpu, 151_936, 64) == TileShape(64, CPU_COLUMNS)
    assert choose_tile_shape(cuda, 151_936, 1024) == TileShape(1024, 151_936)


@pytest.mark.parametrize(
    ("vocabulary", "gibibytes", "rows"),
    [
        (151_936, 80, 4352),
        (128_256, 80, 5120),
        (128_256, 141, 8192),
        (32_000, 80, 8192),
        (151_936, 24, 1280),
        (262_144, 24, 1024),
    ],
)
def test_a_gpu_reads_as_many_rows_as_a_32nd_of_its_memory_holds(vocabulary: int, gibibytes: int, rows: int) -> None:
    assert count_rows(vocabulary, gibibytes * 2**30 // 32) == rows
    assert rows == 1024 or 4 * rows * vocabulary <= gibibytes * 2**30 / 32


def test_a_configured_chunk_is_the_rows_of_every_device() -> None:
    assert choose_tile_shape(torch.device("cuda"), 100, 77) == TileShape(77, 100)
    assert choose_tile_shape(torch.device("cpu"), 100, 77) == TileShape(77, CPU_COLUMNS)
    assert choose_tile_shape(torch.device("cpu"), 100, None) == TileShape(CPU_ROWS, CPU_COLUMNS)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_products_that_add_to_a_sum_give_its_gradient_with_less_rounding(
    weight_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPUs compute: here ``torch.addmm`` with float32 sums of bfloat16 products is float32 arithmetic."""
    added, addmm = [], torch.addmm

    def sum_in_product(total: Tensor, left: Tensor, right: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert out_dtype == total.dtype == torch.float32 and left.dtype == right.dtype == torch.bfloat16 and out is total
        added.append(left.shape[1])
        return out.copy_(addmm(total, left.float(), right.float()))

    whole = make_problem(40, 50, 6, bias=False)
    hidden, weight = whole.hidden.detach().bfloat16(), whole.weight.detach().to(weight_dtype)
    gradients = []
    for in_product in (False, True):
        use_tiles(monkeypatch, 16, 50)
        with monkeypatch.context() as patch:
            if in_product:
                patch.setattr(module, "sums_in_products", lambda device, dtype: True)
                patch.setattr(torch, "addmm", sum_in_product)
            own = weight.clone().requires_grad_()
            logprobs, _ = tiled_logprobs(hidden, whole.target, own, None, 1.0, NO_CHUNKS)
            logprobs.backward(whole.mix[0].float())
        assert own.grad is not None and own.grad.dtype == weight_dtype
        gradients.append(own.grad.double())
    assert added == [16, 16, 8]
    exact = whole.weight.detach().to(weight_dtype).bfloat16().double().requires_grad_()
    logs = (hidden.double() @ exact.t()).log_softmax(-1).gather(1, whole.target[:, None]).squeeze(1)
    logs.backward(whole.mix[0])
    assert exact.grad is not None
    errors = [float((each - exact.grad).norm() / exact.grad.norm()) for each in gradients]
    assert errors[1] <= errors[0] * 1.02 and errors[0] < 0.02
