"""What a layer computes between two products, as functions of tensors that torch.compile makes one kernel of.

A segment is a function of constants (hashable) and tensors. Inside ``compiling_segments`` it is compiled, once for rows of any length;
outside it runs as it is written. Unlike a compiled layer it has no modules, so the host has little to check at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch

# Values are rounded where the modules round them: keeping float32 in between would move the learner away from the sampler.
# Autotuning that changes results is off: a resumed run must compile the same code.
OPTIONS: Mapping[str, Any] = {"emulate_precision_casts": True, "deterministic": True}

_compiling = False


@contextmanager
def compiling_segments(active: bool = True) -> Iterator[None]:
    """Compile the segments of passes inside, including backward passes, which run in threads of autograd."""
    global _compiling
    before, _compiling = _compiling, active
    try:
        yield
    finally:
        _compiling = before


def segment(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a segment of ``function(constants, *tensors)``."""

    @wraps(function)
    def run(constants: Hashable, *tensors: Any) -> Any:
        return compile_segment(function, constants)(*tensors) if _compiling else function(constants, *tensors)

    return run


@cache
def compile_segment(function: Callable[..., Any], constants: Hashable) -> Callable[..., Any]:
    """Return a segment compiled for its constants."""
    return torch.compile(lambda *tensors: function(constants, *tensors), dynamic=True, options=dict(OPTIONS))
