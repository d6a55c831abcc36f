"""Sequence mixers of Transformers behind one seam: their convolutions and scans are computed by the plan of a call.

Mixers of all families compute what is not token-wise by functions of their modeling file, with the same names and arguments in
each. Once per file these are replaced by functions that pass their arguments to the *plan* of ``model(..., plan=plan)``; a call
without a plan reaches the original. Learner and engine run the same module. The plan reaches them through hooks on the decoder layer: not
every mixer passes its keyword arguments on, and only the backward pass calls a layer that is recomputed. Not every decoder passes its own
on either (Mamba): its layers take the plan of the decoder's call. The plan reaches indexers of sparse attention (``indexers``) in the same
way, and modules whose class an extension declares in ``strop.mixers``: the declared class precedes it, and asks ``running_call``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.models.mixers.indexers import Chooser, IndexerPlan, IndexRows, PathBlocks, is_indexer, make_planned
from strop.models.mixers.recorded_choices import RecordedChoices, ReplayedChoices
from strop.models.mixers.recurrence import (
    GATED_DELTA_RULE,
    KIMI_DELTA_ATTENTION,
    MAMBA2,
    MixerPlan,
    MixerSpec,
    Recurrence,
    Rows,
    delta_rule,
    selective_scan,
    state_space,
    with_kernel,
)
from strop.models.routing.router_config import CHOICES
from strop.plugins import declared, load
from strop.sampling import at_least_float32

_ORIGINAL, _LAYER, _PLANNED = "_strop_original", "_strop_mixer_layer", "_strop_planned"


class LayerPlan(MixerPlan, IndexerPlan, Protocol):
    """What a plan computes for layers besides attention."""

    def blocks(self, size: int) -> PathBlocks:
        """Return the complete blocks of ``size`` tokens of each path."""
        ...


@dataclass(eq=False)
class MixerCall:
    """The convolutions and scans of one decoder layer in a pass, computed by its plan."""

    plan: LayerPlan
    layer: int
    choices: RecordedChoices | ReplayedChoices | None = None  # of indexers
    convolutions: int = 0
    scans: int = 0
    block: int | None = None  # tokens of a block, if attention reads blocks: with the next two as in its AttentionSpec
    chosen: Tensor | None = None
    pooled: bool = False

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.convolutions += 1
        return self.plan.convolve(inputs, weight, bias, MixerSpec(self.layer, self.convolutions - 1))

    def attend_to_blocks(self, size: int, chosen: Tensor | None, *, pooled: bool = False) -> None:
        """Let the attention of this layer read blocks of ``size`` tokens, those that are chosen, or the pooled keys after its own."""
        self.block, self.pooled = size, pooled
        self.chosen = chosen if chosen is not None and chosen.shape[-1] else None

    def choose(self, rows: IndexRows, layer: int) -> Tensor:
        chosen = self.plan.choose(rows, layer)
        return chosen if self.choices is None else self.choices.choose(layer, chosen)

    def scan(self, recurrence: Recurrence, rows: Rows) -> Tensor:
        """Rows are at least float32: states add up over thousands of tokens."""
        self.scans += 1
        return self.plan.scan(recurrence, rows, MixerSpec(self.layer, self.scans - 1))


class _Calls(threading.local):
    """The layers that run in a thread, outermost first. A backward pass that recomputes has threads of its own."""

    def __init__(self) -> None:
        self.running: list[tuple[nn.Module, MixerCall | None]] = []
        self.plan: LayerPlan | None = None  # of the decoder that runs


_CALLS = _Calls()


def _convolve(
    call: MixerCall, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """[1, C, T] -> [1, C, T]"""
    outputs = call.convolve(hidden_states[0].T, weight, bias)
    if activation is not None:
        outputs = ACT2FN[activation](outputs)
    return outputs.T[None].to(hidden_states.dtype)


def _delta_rule(
    call: MixerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, ...] -> [1, T, H, V]; the decay is one for each head, or one for each channel of a key."""
    dtype = query.dtype
    query, key, value, g, beta = (at_least_float32(each[0]) for each in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    rows, channels = (query, key, value, g, beta), g.dim() == key.dim()
    package = KIMI_DELTA_ATTENTION if channels else GATED_DELTA_RULE
    outputs = call.scan(with_kernel(delta_rule(key, value, channels=channels), package, rows, dtype), rows)
    return outputs[None].to(dtype), None


def _state_space(
    call: MixerCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """[1, T, H, P], with dt [1, T, H], and B and C [1, T, G, N] -> [1, T, H, P]"""
    inputs, step, rates, read_in, read_out = (at_least_float32(each) for each in (hidden_states[0], dt[0], A, B[0], C[0]))
    step = step if dt_bias is None else step + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    rows = (read_out, read_in, inputs, step, rates.expand_as(step))
    outputs = call.scan(with_kernel(state_space(read_in, inputs), MAMBA2, rows, hidden_states.dtype), rows)
    outputs = outputs if D is None else outputs + inputs * D.unsqueeze(-1)
    return outputs[None].to(hidden_states.dtype).contiguous()


def _selective_scan(
    call: MixerCall,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """[1, I, T], with dt and z [1, I, T], and B and C [1, N, T] -> [1, I, T]"""
    inputs, step, read_in, read_out = (at_least_float32(each[0].T) for each in (hidden_states, dt, B, C))
    step = step if delta_bias is None else step + delta_bias
    step = F.softplus(step) if delta_softplus else step
    outputs = call.scan(selective_scan(at_least_float32(A)), (inputs, step, read_in, read_out))
    outputs = outputs if D is None else outputs + inputs * D
    outputs = outputs if z is None else outputs * F.silu(z[0].T)
    return outputs.T[None].to(hidden_states.dtype)


def _whole_kernel(call: MixerCall, *_: Any, **__: Any) -> None:
    """A kernel for convolution and scan together, which the mixer then computes one after the other."""
    return None


# What Transformers' mixers call, in every modeling file. Without a cache of Transformers no update is called.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
    "mamba2_split_conv1d_scan_combined": _whole_kernel,
    "mamba_inner_fn": _whole_kernel,
}


def running_layer() -> int | None:
    """Return the index of the innermost decoder layer with a mixer that runs; None if none does."""
    return _CALLS.running[-1][0].__dict__[_LAYER] if _CALLS.running else None


def running_call() -> MixerCall | None:
    """Return the call of the innermost decoder layer with a mixer that runs in this thread; None if it runs without a plan."""
    return _CALLS.running[-1][1] if _CALLS.running else None


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module mixes tokens by functions that a plan computes."""
    return not FUNCTIONS.keys().isdisjoint(inspect.unwrap(type(module).forward).__code__.co_names)


def is_planned(module: nn.Module) -> bool:
    """Return whether a module chooses tokens or pools them as a plan decides."""
    return is_indexer(module) or _PLANNED in type(module).__dict__


def install_mixers(model: nn.Module) -> bool:
    """Let the plans of calls compute the mixers of a model, and choose for its indexers. Returns whether it has mixers."""
    found = False
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    for layer in layers:
        mixers = [module for module in layer.modules() if is_mixer(module)]
        _install_declared(layer)
        indexers = [module for module in layer.modules() if is_indexer(module) and _PLANNED not in type(module).__dict__]
        planned = any(is_planned(module) for module in layer.modules())
        for mixer in mixers:
            found = True
            _replace_functions(sys.modules[type(mixer).__module__])
        for indexer in indexers:
            make_planned(indexer, _find_chooser)
        if (mixers or planned) and _LAYER not in layer.__dict__:
            layer.__dict__[_LAYER] = next((each.layer_idx for each in mixers if hasattr(each, "layer_idx")), 0)
            layer.register_forward_pre_hook(_enter, with_kwargs=True, prepend=True)
            layer.register_forward_hook(_leave, always_call=True)
            if indexers:
                layer.register_forward_pre_hook(_give_mask, with_kwargs=True)
            if mixers:
                kind = type(layer)
                layer.__class__ = type(kind.__name__, (_PlannedLayer, kind), {"__module__": kind.__module__})
    if found:
        decoder = model.get_decoder()  # type: ignore[operator]
        decoder.register_forward_pre_hook(_enter_decoder, with_kwargs=True, prepend=True)
        decoder.register_forward_hook(_leave_decoder, always_call=True)
    return found


def _install_declared(layer: nn.Module) -> None:
    number = next((module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")), None)
    for module in layer.modules():
        kind = type(module)
        if kind.__name__ in declared("mixers") and _PLANNED not in kind.__dict__:
            mixin = load("mixers", kind.__name__)
            module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, _PLANNED: True})
            module.__dict__.setdefault("layer_idx", number)


class _PlannedLayer(nn.Module):
    """Mixin for the class of a decoder layer. Recomputation calls the layer again with the arguments that it has now."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _CALLS.plan is not None:
            kwargs.setdefault("plan", _CALLS.plan)
        return super().__call__(*args, **kwargs)


def _enter_decoder(decoder: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    _CALLS.plan = kwargs.get("plan")


def _leave_decoder(decoder: nn.Module, args: Any, output: Any) -> None:
    _CALLS.plan = None


def _replace_functions(code: Any) -> None:
    for name, compute in FUNCTIONS.items():
        original = getattr(code, name, None)
        if original is not None and not hasattr(original, _ORIGINAL):
            setattr(code, name, _dispatch(original, compute))


def _dispatch(original: Callable[..., Any], compute: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        call = running_call()
        return original(*args, **kwargs) if call is None else compute(call, *args, **kwargs)

    setattr(dispatch, _ORIGINAL, original)
    return torch.compiler.disable(dispatch)


def _find_chooser() -> Chooser | None:
    """Return what chooses for the indexer of the layer that runs in this thread; None if it runs without a plan."""
    call = running_call()
    return None if call is None else call.choose


def _give_mask(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Give the attention of a layer with an indexer a mask of one token, of which it takes parts and which no plan reads."""
    if kwargs.get("plan") is not None and kwargs.get("attention_mask") is None:
        hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        kwargs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden.device)
    return args, kwargs


def _enter(layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    plan = kwargs.get("plan")
    call = None if plan is None else MixerCall(plan, layer.__dict__[_LAYER], kwargs.get(CHOICES.name))
    _CALLS.running.append((layer, call))


def _leave(layer: nn.Module, args: Any, output: Any) -> None:
    if _CALLS.running and _CALLS.running[-1][0] is layer:  # not if another hook failed before
        _CALLS.running.pop()
