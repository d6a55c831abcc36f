"""What a layer computes before and after attention, as functions of tensors that torch.compile makes one graph of.

A segment is a function of constants, of the weights of linear layers, and of tensors: rows [T, ...], and vectors that all rows share.
Inside ``compiling_segments`` it is compiled, once for rows of any length; outside it runs as it is written. Torch.compile's guards choose
the code for tensors of a form once, and later calls with such tensors go to that code directly: guards take the host longer than the
operators that a segment replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import local
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from strop.models.layers.weight_copies import LinearWeights, WeightLayout

# Values are rounded where the modules round them: keeping float32 in between would move the learner away from the sampler.
# Patterns are off for the same reason: some add a bias or a sum to a product before it is rounded, or after.
# Autotuning that changes results is off: a resumed run must compile the same code.
OPTIONS: Mapping[str, Any] = {"emulate_precision_casts": True, "pattern_matcher": False, "deterministic": True}
MOST_FORMS = 10_000  # whose code is kept: a dozen for each number of tokens

_settings: Hashable = None  # of torch, on which compiled code depends; None outside of ``compiling_segments``
_code: dict[Hashable, tuple[Callable[..., Any], tuple[int, ...], Sequence[int], Sequence[int]]] = {}
_thread = local()


@contextmanager
def compiling_segments(active: bool = True) -> Iterator[None]:
    """Compile the segments of passes inside, including backward passes, which run in threads of autograd."""
    global _settings
    before = _settings
    _settings = (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) if active else None
    try:
        yield
    finally:
        _settings = before


def is_compiling() -> bool:
    return _settings is not None


def run_segment(function: Callable[..., Any], constants: Hashable, weights: Sequence[LinearWeights], *tensors: Tensor) -> Any:
    """Return ``function(constants, weights, *tensors)``. No gradient, and nothing for autocast: for use in autograd functions."""
    if _settings is None:
        return function(constants, weights, *tensors)
    forms = [each.form for each in weights]
    form = (
        function,
        constants,
        _settings,
        tensors[0].device,
        *forms,
        *[(each.dtype, each.shape, each.stride()) for each in tensors],
    )
    if (found := _code.get(form)) is None:
        return _choose(form, compile_segment(function, constants, *[each.layout for each in weights]), weights, tensors)
    code, sizes, inputs, outputs = found
    given = (*[tensor for each in weights for tensor in each.tensors], *tensors, *sizes)
    results = (*code(*[given[place] for place in inputs]), None)
    return [results[place] for place in outputs]


@cache
def compile_segment(function: Callable[..., Any], constants: Hashable, *layouts: WeightLayout) -> Callable[..., Any]:
    """Return a segment compiled for its constants, as a function of the tensors of its weights and then of the others."""

    def run(*tensors: Tensor) -> Any:
        return function(constants, *with_weights(layouts, tensors))

    # torch.compile keeps what it compiled by the code object: each segment has its own, and does not try those of others
    code = run.__code__.replace(co_name=getattr(function, "__name__", "segment"))
    own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
    compiled: Callable[..., Any] = torch.compile(own, dynamic=False, backend=_compile_graph)
    return compiled


def with_weights(layouts: Sequence[WeightLayout], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the weights that the first tensors belong to, and then the other tensors."""
    weights, place = [], 0
    for layout in layouts:
        weights.append(layout.build(tensors[place : place + layout.count]))
        place += layout.count
    return weights, *tensors[place:]


def _compile_graph(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor, as a function that notes its calls."""
    code = torch._inductor.compile(graph, examples, dict(OPTIONS))

    def call(*inputs: Any) -> Any:
        outputs = code(*inputs)
        _thread.calls.append((code, inputs, outputs))
        return outputs

    return call


def _choose(form: Hashable, compiled: Callable[..., Any], weights: Sequence[LinearWeights], tensors: Sequence[Tensor]) -> Any:
    """Run a segment with torch.compile, and keep the code that its guards choose for tensors of this form."""
    tensors = [each.detach() for each in tensors]  # compiled code is made for tensors that need a gradient or do not
    for each in tensors:
        if each.dim() > 1:
            torch._dynamo.maybe_mark_dynamic(each, 0)
    given = (*(tensor for each in weights for tensor in each.tensors), *tensors)
    calls: list[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] = []
    _thread.calls = calls
    with torch.autocast(given[0].device.type, enabled=False):
        results = compiled(*given)
    if len(calls) == 1:  # a graph also takes the number of rows, orders its inputs itself, and returns no tensor twice
        code, inputs, outputs = calls.pop()  # which would keep the tensors
        sizes = tuple(each for each in inputs if isinstance(each, int))
        taken, returned = _find(inputs, (*given, *sizes)), _find(results, (*outputs, None))
        if taken is not None and returned is not None:
            if len(_code) >= MOST_FORMS:
                _code.clear()
            _code[form] = code, sizes, taken, returned
    return results


def _find(values: Sequence[Any], among: Sequence[Any]) -> list[int] | None:
    """Return the place of each value, by identity; None if one is missing."""
    places = {id(value): place for place, value in enumerate(among)}
    found = [places.get(id(value)) for value in values]
    return None if None in found else found  # type: ignore[return-value]
