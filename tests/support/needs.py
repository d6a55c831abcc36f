"""Packages that some tests need: looked for without the seconds of importing them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def needs_vllm() -> None:
    """Skips the module or test that asks where it is not installed."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: make setup-vllm", allow_module_level=True)


def needs_megatron() -> None:
    """Skips the module or test that asks where Megatron Core is not installed. It is imported on the ranks only."""
    if find_spec("strop.extensions") is None:
        pytest.skip("Strop's extensions are not here", allow_module_level=True)
    if find_spec("megatron") is None:
        pytest.skip("Megatron Core is not installed: pip install -e '.[megatron]'", allow_module_level=True)
