"""What a layer computes between two products, as functions of tensors that torch.compile makes one kernel of.

A segment is a function of constants and tensors. Inside ``compiling_segments`` it is compiled, once for rows of any length; outside it runs
as it is written. Unlike a compiled layer it has no modules, so the host has little to check at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

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


def run_segment(function: Callable[..., Any], constants: Hashable, *tensors: Tensor) -> Any:
    """Return ``function(constants, *tensors)``. No gradient: for use in autograd functions."""
    if not _compiling:
        return function(constants, *tensors)
    # compiled code is made for tensors that need a gradient or do not
    return compile_segment(function, constants)(*(each.detach() if each.requires_grad else each for each in tensors))


@cache
def compile_segment(function: Callable[..., Any], constants: Hashable) -> Callable[..., Any]:
    """Return a segment compiled for its constants."""

    def run(*tensors: Tensor) -> Any:
        return function(constants, *tensors)

    # torch.compile keeps what it compiled by the code object: each segment has its own, and does not try those of others
    code = run.__code__.replace(co_name=getattr(function, "__name__", "segment"))
    own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=True, options=dict(OPTIONS))
    return compiled
