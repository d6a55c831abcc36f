"""Which kernel computes an attention, and that it is said."""

from __future__ import annotations

import logging
import shutil
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from strop.models.attention import flash_libraries, kernel_choice
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.kernel_choice import PLAIN_SCORES, choose_kernel, choose_piece_kernel
from strop.models.network import Network
from strop.sampling import Sampling
from support.models import build, copy_gradients, largest_difference, to_float64
from support.rollouts import pack_grpo, simple_groups

PLAIN, WINDOW, CAP = AttentionSpec(0, 0.5), AttentionSpec(0, 0.5, window=3), AttentionSpec(0, 0.5, softcap=2.0)
LONG = 1 << 30  # scores


def rows(dtype: torch.dtype = torch.float32, device: str = "cpu", size: int = 8, values: int = 8) -> Any:
    return [torch.empty(2, 4, each, dtype=dtype, device=device) for each in (size, size, values)]


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_logged", set())


def test_short_families_are_plain_products_and_long_ones_are_not() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        limit = PLAIN_SCORES["cpu", dtype]
        assert choose_kernel("auto", *rows(dtype), PLAIN, limit) == "plain"
        assert choose_kernel("auto", *rows(dtype), PLAIN, limit + 1) == "flash"
        for spec in (WINDOW, CAP):
            assert choose_kernel("auto", *rows(dtype), spec, limit) == "plain"
            assert choose_kernel("auto", *rows(dtype), spec, limit + 1) == "blockwise"
        assert choose_kernel("auto", *rows(dtype, size=8, values=12), PLAIN, limit + 1) == "blockwise"


def test_a_choice_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            choose_kernel("auto", *rows(), PLAIN, LONG)
            choose_kernel("auto", *rows(), CAP, LONG)
    assert [record.getMessage() for record in caplog.records] == [
        "attention on cpu, float32: flash (more than 1,048,576 scores, which it does not keep)",
        "attention on cpu, float32: blockwise (no fused kernel: the layer caps its scores)",
    ]


def test_a_kernel_that_cannot_compute_a_layer_is_replaced_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_kernel("flash", *rows(), WINDOW, 1) == "blockwise"
    assert choose_piece_kernel("plain", *rows(), PLAIN) == "flash"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    kernel_choice._compile_obstacle.cache_clear()
    assert choose_kernel("flex", *rows(), PLAIN, 1) == "blockwise"
    kernel_choice._compile_obstacle.cache_clear()
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "attention on cpu, float32: blockwise instead of flash: the layer has a sliding window",
        "attention on cpu, float32: flash instead of plain: as the keys are in several places",
        "attention on cpu, float32: blockwise instead of flex: there is no C++ compiler to compile it with",
    ]


def test_a_gpu_has_no_flex_attention_for_heads_below_16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its compiler would refuse them in the middle of a pass."""
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(flash_libraries, "card", lambda device: 8)
    kernel_choice._compile_obstacle.cache_clear()
    with FakeTensorMode():
        for size, values, wanted in (
            (16, 16, "flex"),
            (15, 15, "blockwise"),
            (32, 8, "blockwise"),
            (8, 32, "blockwise"),
            (64, 48, "flex"),
        ):
            query, key, value = rows(torch.bfloat16, "cuda", size, values)
            for asked in ("auto", "flex"):
                assert choose_kernel(asked, query, key, value, CAP, LONG) == wanted, (asked, size, values)  # type: ignore[arg-type]
    kernel_choice._compile_obstacle.cache_clear()
    assert "blockwise instead of flex: its products need heads of size 16 or more, and these have size 15" in caplog.text


def test_a_device_without_a_table_computes_blockwise() -> None:
    assert choose_kernel("auto", *rows(device="meta"), PLAIN, 1) == "blockwise"


@pytest.mark.parametrize("kernel", ["flash", "blockwise"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_model_has_the_same_gradient_with_every_kernel(family: str, kernel: Any) -> None:
    """In float64, with shared prompts, activations recomputed or not; mistral has a window of 7 tokens."""
    batch = pack_grpo(simple_groups((11, (9, 1, 14)), (2, (5,)), (5, (20, 3))))
    found = {}
    for name, recomputed in (("plain", False), (kernel, False), (kernel, True)):
        network = Network(to_float64(build(family)), precision=torch.float64, packed=True, attention_kernel=name)
        if recomputed:
            network.model.train()
            network.model.gradient_checkpointing_enable()
        logprobs = network.outputs(batch, Sampling()).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found[name, recomputed] = {"logprobs": logprobs.detach(), **copy_gradients(network.model)}
    assert largest_difference(found["plain", False], found[kernel, False]) < 1e-12
    assert largest_difference(found[kernel, True], found[kernel, False]) < 1e-14


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_caps_and_sinks_of_models_are_the_same_with_every_kernel(family: str) -> None:
    batch = pack_grpo(simple_groups((11, (9, 1, 14)), (5, (20, 3))))
    found = {}
    for kernel in ("plain", "flash", "blockwise"):
        network = Network(build(family), packed=True, attention_kernel=kernel)  # type: ignore[arg-type]
        logprobs = network.outputs(batch, Sampling()).logprobs
        logprobs.sum().backward()
        found[kernel] = {"logprobs": logprobs.detach(), **copy_gradients(network.model)}
    assert largest_difference(found["plain"], found["flash"]) < 1e-5
    assert largest_difference(found["plain"], found["blockwise"]) < 1e-5
