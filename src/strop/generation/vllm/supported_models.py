"""The models supported by the installed vLLM, read from its registry without importing it, which would take seconds."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from strop.models.local_files import read_local_config


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
