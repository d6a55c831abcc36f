"""Build a running system from a configuration. The only package that knows all others.

The names below are imported when they are first used: what a dry run says needs neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.runs.evaluate import run_evaluation as run_evaluation
    from strop.runs.train import run_training as run_training

_MODULES = {"run_evaluation": "strop.runs.evaluate", "run_training": "strop.runs.train"}
__all__ = ["run_evaluation", "run_training"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'strop.runs' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
