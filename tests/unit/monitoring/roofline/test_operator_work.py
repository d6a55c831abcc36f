"""The work of operators: FLOPs as torch's own counter has them, bytes as written down by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from strop.monitoring.profiling.quiet_profiler import quiet_profiler
from strop.monitoring.roofline.operator_event import read_inputs
from strop.monitoring.roofline.operator_rows import OperatorRow, list_rows
from strop.monitoring.roofline.operator_work import count_kernel, count_work


def record(work: Callable[[], object], folder: Path) -> list[OperatorRow]:
    with quiet_profiler(), torch.profiler.profile(record_shapes=True) as profile:
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return list_rows([event for event in events if event.get("ph") == "X"], 0.0, [])


def attend(causal: bool, backward: bool) -> Callable[[], Any]:
    query, key, value = (torch.randn(2, 4, 24, 8, requires_grad=backward) for _ in range(3))

    def work() -> Any:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return out.sum().backward() if backward else out  # type: ignore[no-untyped-call]

    return work


def train() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 5))
    functional.cross_entropy(layers(torch.randn(7, 8)), torch.zeros(7, dtype=torch.long)).backward()  # type: ignore[no-untyped-call]


CASES: dict[str, Callable[[], Any]] = {
    "mm": lambda: torch.randn(4, 6) @ torch.randn(6, 10),
    "bmm": lambda: torch.randn(3, 4, 6) @ torch.randn(3, 6, 10),
    "baddbmm": lambda: torch.baddbmm(torch.randn(3, 4, 10), torch.randn(3, 4, 6), torch.randn(3, 6, 10)),
    "layers with gradients": train,
    "convolution": lambda: functional.conv2d(torch.randn(2, 3, 12, 10), torch.randn(5, 3, 4, 2), stride=2, padding=1),
}


@pytest.mark.parametrize("case", CASES)
def test_products_have_the_flops_that_torch_counts(case: str, tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as counter:
        CASES[case]()
    rows = record(CASES[case], tmp_path)
    products = sum(row.flops for row in rows if row.kind in ("matrix products", "attention", "convolutions"))
    assert products == counter.get_total_flops() > 0


def test_attention_counts_pairs_that_are_attended_to_and_scores_that_are_computed_again(tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # as products: of the kernel torch knows none
        attend(False, False)()
    (whole,) = (row for row in record(attend(False, False), tmp_path) if row.kind == "attention")
    assert whole.flops == counter.get_total_flops() == 2 * 4 * 24 * 24 * 4 * 8
    pairs, width = 24 * 25 // 2, 8
    (causal,) = (row for row in record(attend(True, False), tmp_path) if row.kind == "attention")
    assert causal.flops == 2 * 4 * pairs * 2 * 2 * width
    assert causal.moved == 4 * (2 * 4 * 24 * 8) * 4  # query, key, value and what comes out, in float32
    forward, backward = sorted(
        (row for row in record(attend(True, True), tmp_path) if row.kind == "attention"), key=lambda row: row.flops
    )
    assert forward.flops == causal.flops and backward.flops == 2.5 * causal.flops


def of(name: str, *tensors: tuple[str, list[int]], texts: tuple[str, ...] = (), strides: Any = None) -> Any:
    types, shapes = [kind for kind, _ in tensors], [shape for _, shape in tensors]
    values = {"Input type": types, "Input Dims": shapes, "Concrete Inputs": list(texts)}
    return count_work(name, read_inputs({**values, **({"Input Strides": strides} if strides else {})}))


def test_bytes_are_those_of_inputs_and_outputs() -> None:
    bf16, f32, ids = "c10::BFloat16", "float", "long int"
    assert of("aten::mm", (bf16, [4, 6]), (bf16, [6, 10])).moved == 2 * (24 + 60 + 40)
    assert of("aten::add", (f32, [8, 5]), (f32, [5])).moved == 4 * (40 + 5 + 40)
    assert of("aten::add_", (f32, [8, 5]), ("Scalar", [])).moved == 4 * 80
    assert of("aten::gt", (f32, [8, 5]), ("Scalar", [])).moved == 4 * 40 + 40
    assert of("aten::copy_", (bf16, [8, 5]), (f32, [8, 5])).moved == 40 * (2 + 4)
    expanded = of("aten::copy_", (f32, [8, 5]), (f32, [8, 5]), strides=[[5, 1], [0, 1]])
    assert expanded.moved == 4 * (40 + 5) and expanded.flops == 0
    assert of("aten::embedding", (f32, [1000, 16]), (ids, [3])).moved == 2 * 3 * 16 * 4 + 3 * 8
    assert of("aten::_fused_adamw_", ("TensorList", [[4, 5], [10]])).moved == 30 * 4 * 7  # type: ignore[arg-type]
    assert of("aten::sum", (f32, [8, 5])).flops == 40 and of("aten::_softmax", (f32, [8, 5])).moved == 4 * 80
    product = count_kernel("[3, 8] x [16, 8]^T bfloat16")
    assert (product.flops, product.moved, product.shapes) == (2 * 3 * 8 * 16, 2 * (24 + 128 + 48), "[3, 8] x [16, 8]^T")
    assert not count_kernel("").counted and not count_kernel("[3, 8] x [16, 9]^T bfloat16").counted


def test_what_has_no_rule_or_other_arguments_has_no_work() -> None:
    assert of("aten::view", ("float", [2])) is None and of("aten::mm", ("float", [2, 2])) is None
    assert of("aten::mm") is None and of("aten::_scaled_dot_product_flash_attention", ("float", [2])) is None
    assert of("aten::index", ("float", [2])).counted is False and of("gloo:all_reduce").kind == "communication"
