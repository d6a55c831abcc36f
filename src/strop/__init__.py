"""Strop post-trains language models: reinforcement learning first, with what comes before and around it.

    train(algorithm, model=..., data=..., reward=...) -> Run        Run(folder)
    evaluate(model, data=...) -> Evaluation                         compare(a, b) -> Comparison

The names in ``__all__`` are the stable interface; every other module may change. They are imported on first use, so that ``import
strop`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

__version__ = "0.1.0"

if TYPE_CHECKING:
    from strop.algorithms.base import Algorithm as Algorithm
    from strop.algorithms.base import Plan as Plan
    from strop.api import compare as compare
    from strop.api import evaluate as evaluate
    from strop.api import train as train
    from strop.config import load_config as load_config
    from strop.data.sources.source import DataSource as DataSource
    from strop.environments.base import Environment as Environment
    from strop.environments.base import reward as reward
    from strop.problems import ConfigError as ConfigError
    from strop.results import Evaluation as Evaluation
    from strop.results import Run as Run
    from strop.stopping import RunStopped as RunStopped
    from strop.types import Batch as Batch
    from strop.types import Group as Group
    from strop.types import Message as Message
    from strop.types import Rollout as Rollout
    from strop.types import Task as Task

    Comparison: TypeAlias = Any  # of an extension

_MODULES = {  # name -> the module that defines it
    "Algorithm": "strop.algorithms.base",
    "Batch": "strop.types",
    "ConfigError": "strop.problems",
    "DataSource": "strop.data.sources.source",
    "Environment": "strop.environments.base",
    "Evaluation": "strop.results",
    "Group": "strop.types",
    "Message": "strop.types",
    "Plan": "strop.algorithms.base",
    "Rollout": "strop.types",
    "Run": "strop.results",
    "RunStopped": "strop.stopping",
    "Task": "strop.types",
    "compare": "strop.api",
    "evaluate": "strop.api",
    "load_config": "strop.config",
    "reward": "strop.environments.base",
    "train": "strop.api",
}
__all__ = ["Comparison", "__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "Comparison":
        return import_module("strop.plugins").load("functions", name)
    if name not in _MODULES:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
