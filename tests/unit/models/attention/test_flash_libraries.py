"""Which fused kernel a GPU takes: packages by card, each compared with plain products before it is used."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from strop.models import kernel_packages
from strop.models.attention import flash_libraries, kernel_choice
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.attention.flash_libraries import PACKAGES, TORCH, FlashLibrary, find_fault
from support.simulated_device.flash_attention import varlen_backward, varlen_forward

SPECS = [AttentionSpec(0, 0.25), AttentionSpec(0, 0.25, window=50)]
SHAPE = (4, 2, 16)


class ByProducts:
    _flash_attention_forward = staticmethod(varlen_forward)
    _flash_attention_backward = staticmethod(varlen_backward)


def fault_of(library: FlashLibrary, spec: AttentionSpec, dtype: torch.dtype = torch.float32) -> str | None:
    return find_fault(library, torch.device("cpu"), dtype, SHAPE, spec)


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> FlashLibrary:
    monkeypatch.setattr(flash_libraries, "aten", ByProducts)
    return TORCH


@pytest.mark.parametrize("spec", SPECS)
def test_a_right_kernel_has_no_fault_and_a_wrong_one_is_described(right: FlashLibrary, spec: AttentionSpec) -> None:
    def raises(*args: Any) -> Any:
        raise ValueError("no kernel for this GPU\nmore")

    def turned(*args: Any) -> Any:
        output, lse = right.forward(*args)
        return output, lse.t()

    def without_window(rows: Any, sequences: Any, spec: AttentionSpec) -> Any:
        return right.forward(rows, sequences, replace(spec, window=None if spec.window else 20))

    def with_larger_values(*args: Any) -> Any:
        query, key, value = right.backward(*args)
        return query, key, value * 1.2

    assert fault_of(right, spec) is None
    assert fault_of(right, spec, torch.bfloat16) is None
    with torch.inference_mode():  # of an engine
        assert kernel_packages.choose_package([right], "", lambda each: fault_of(each, spec)) is right
    assert fault_of(replace(right, forward=raises), spec) == "ValueError: no kernel for this GPU"
    forgetting = replace(right, forward=turned, backward=lambda grad, rows, *rest: rows)
    assert fault_of(forgetting, spec) == "its log-sum-exp has the shape (199, 4) and not (4, 199)"
    assert "output, or the gradient of it, differs" in str(fault_of(replace(right, forward=without_window), spec))
    assert "value, or the gradient of it, differs by 0.2" in str(fault_of(replace(right, backward=with_larger_values), spec))


def test_caps_are_compared_with_capped_scores(right: FlashLibrary) -> None:
    assert fault_of(right, AttentionSpec(0, 1.0, softcap=1.0)) is not None


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take the GPU for one of a compute capability where packages are installed, whose kernels are right or have faults."""

    def take(major: int, installed: tuple[str, ...], faults: Any = lambda library, size, capped: None) -> None:
        missing = {library.module: library.name not in installed for library in PACKAGES}
        monkeypatch.setattr(flash_libraries, "card", lambda device: major)
        monkeypatch.setattr(kernel_packages, "is_missing", missing.__getitem__)
        found = lambda library, device, dtype, shape, spec: faults(library.name, shape[2], spec.softcap is not None)  # noqa: E731
        monkeypatch.setattr(flash_libraries, "find_fault", found)
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
        for cached in (flash_libraries._choose, flash_libraries._log_choice, kernel_choice._compile_obstacle):
            cached.cache_clear()

    yield take
    for cached in (flash_libraries._choose, flash_libraries._log_choice, kernel_choice._compile_obstacle):
        cached.cache_clear()


def kernel_of(size: int, values: int, window: int | None, softcap: float | None) -> str:
    """The kernel for heads of these sizes, in the words of docs/performance.md."""
    spec = AttentionSpec(0, size**-0.5, window, softcap)
    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, heads, each, dtype=torch.bfloat16, device="cuda")
            for heads, each in ((8, size), (2, size), (2, values))
        )
        kernel = kernel_choice.choose_kernel("auto", query, key, value, spec, 1 << 30)
        library = flash_libraries.choose_library(query, key, spec)
    return library.name.removeprefix("FlashAttention ") if kernel == "flash" and library is not None else kernel


def test_a_package_with_a_fault_is_passed_over_with_a_warning(card: Any, caplog: pytest.LogCaptureFixture) -> None:
    card(
        9, ("FlashAttention 3", "FlashAttention 4"), lambda name, size, capped: "it broke" if name == "FlashAttention 3" else None
    )
    assert kernel_of(64, 64, None, None) == "4"
    assert caplog.messages == ["FlashAttention 3 is installed, but not used for heads of 64 on this GPU: it broke"]
    card(9, ("FlashAttention 4",), lambda name, size, capped: "it broke")
    with caplog.at_level(logging.INFO):
        assert kernel_of(64, 64, 7, None) == "2"
        assert kernel_of(64, 64, None, 5.0) == "flex"
    assert "the layer caps its scores, which needs FlashAttention 3 or FlashAttention 4" in caplog.text


FAMILIES = {  # heads of queries and keys, of values; window, soft cap
    "Llama, Qwen 2 and 3, Granite, Phi, mixtures": (128, 128, None, None),
    "Mistral, Olmo 3, Gemma 3, gpt-oss": (64, 64, 128, None),
    "Gemma 2": (256, 256, 4096, 50.0),
    "DeepSeek (latent attention)": (192, 128, None, None),
}
CARDS = {  # compute capability, the package
    "A100": (8, ()),
    "H100, H200": (9, ()),
    "with FlashAttention 3": (9, ("FlashAttention 3", "FlashAttention 4")),
    "with FlashAttention 4": (9, ("FlashAttention 4",)),
    "B200": (10, ()),
    "B200 with FlashAttention 4": (10, ("FlashAttention 4",)),
}


def test_the_table_of_kernels_in_the_docs_is_what_is_chosen(card: Any) -> None:
    lines = (Path(__file__).parents[4] / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    start = rows.index(["layers of", *CARDS])
    table = {row[0]: row[1:] for row in rows[start + 2 : start + 2 + len(FAMILIES)]}
    wanted: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for major, installed in CARDS.values():
        # of the package: "SM100 backward with head_dim=256 does not support softcap"
        card(
            major,
            installed,
            lambda name, size, capped, major=major: "refused" if (major, size, capped) == (10, 256, True) else None,
        )
        for family, shape in FAMILIES.items():
            wanted[family].append(re.sub("^([234])$", r"FlashAttention \1", kernel_of(*shape)))
    assert table == wanted, wanted
