"""The models supported by the installed vLLM, read from its registry without importing it, which would take seconds, and those that its
CPU build cannot compute, found by trying each family.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from strop.generation.vllm.vllm_config import VllmConfig
from strop.models.local_files import read_local_config
from strop.packages import is_installed
from strop.problems import Problem


@cache
def list_supported_models() -> frozenset[str]:
    """Return the names of the model classes of the installed vLLM; empty if its registry cannot be read."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder) / "model_executor" / "models" / "registry.py"
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            continue
        return frozenset(name for node in tree.body if isinstance(node, ast.Assign) for name in _model_names(node.value))
    return frozenset()


def _model_names(table: ast.expr) -> list[str]:
    """Return the keys of a table {Transformers class: (module, vLLM class)}."""
    if not isinstance(table, ast.Dict):
        return []
    pairs = zip(table.keys, table.values, strict=True)
    return [
        key.value
        for key, value in pairs
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(value, ast.Tuple)
    ]


def find_missing_model(architectures: list[str]) -> str | None:
    """Return the name of a model's class if the installed vLLM supports none of its classes; None if it does, or might."""
    supported = list_supported_models()
    if not supported or not architectures or supported & set(architectures):
        return None
    return architectures[0]


def read_architectures(name: str) -> list[str]:
    """Return the class names of a model in a folder or in the hub cache; empty if not available locally."""
    architectures = read_local_config(name).get("architectures")
    return [str(each) for each in architectures] if isinstance(architectures, list) else []


GPU_ONLY = {
    "bamba": "vLLM has no model of it since 0.23",
    **dict.fromkeys(("kimi_linear", "olmo_hybrid"), "its kernels need a GPU"),
}
GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DELTA_HEADS = (64, 128)
MAMBA = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")


def find_cpu_problems(values: Mapping[str, Any], config: VllmConfig, key: str) -> Iterator[Problem]:
    """Yield why vLLM's CPU build cannot sample from a model. ``values``: its config.json; ``key``: the section ``generation``."""
    text = values.get("text_config") or values
    kind = str(text.get("model_type"))
    if reason := _find_missing_kernel(kind, text):
        yield Problem(f"{key}.backend", f"found vllm, whose CPU build cannot run {kind}: {reason}", "Set it to torch.")
    elif kind.startswith("qwen3_5") and not is_installed("torchvision"):
        message = f"found vllm, whose model of {kind} imports torchvision, which is not installed"
        yield Problem(f"{key}.backend", message, "pip install --no-deps torchvision==0.28.0, or set it to torch.")
    elif kind in GATED_DELTA and config.dtype != "bfloat16":
        message = f"found {config.precision}, but vLLM's CPU build computes the gated delta rule of {kind} in bfloat16 only"
        yield Problem(f"{key}.vllm_cfg.precision", message, "Set it to bfloat16.")
    elif kind in MAMBA and config.enable_prefix_caching:
        message = (
            f"found true, but vLLM's CPU build cannot store states of {kind}'s Mamba layers at the blocks of its prefix cache"
        )
        yield Problem(f"{key}.vllm_cfg.enable_prefix_caching", message, "Set it to false.")


def _find_missing_kernel(kind: str, text: Mapping[str, Any]) -> str | None:
    if text.get("index_topk"):
        return "it has no sparse attention (index_topk)"
    if kind == "nemotron_h" and (
        "moe" in (text.get("layers_block_type") or ()) or "E" in (text.get("hybrid_override_pattern") or "")
    ):
        return "it has no experts without gates"
    heads = {text.get("linear_key_head_dim"), text.get("linear_value_head_dim")}
    if kind in GATED_DELTA and not (len(heads) == 1 and heads <= set(DELTA_HEADS)):
        return "linear_key_head_dim and linear_value_head_dim are not both 64 or both 128"
    return GPU_ONLY.get(kind)
