"""torch, imported on first use, so that describing an algorithm or checking a configuration does not take seconds.

``from strop.lazy_torch import Tensor, torch`` stands for ``import torch`` and ``from torch import Tensor``. ``Tensor`` is for annotations.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class LazyModule(ModuleType):
        """Imports the module of its name when an attribute is read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self.__name__), name)

    torch = LazyModule("torch")
    Tensor = Any
