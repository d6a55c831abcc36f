"""Replace the forward passes of norms, attention and gated MLPs of Transformers' decoders by ones with fewer passes over memory.

They round where the modules of Transformers round, so results stay comparable with a sampler that uses those modules. Unknown
modules, linear layers with an adapter, a hook or shards, and everything outside ``FusedLayers.use`` run as before.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.models.attention.attention_interface import IMPLEMENTATION
from strop.models.attention.attention_plan import AttentionSpec
from strop.models.layers.fused_functions import (
    GELU_TANH,
    SILU,
    AfterAttention,
    BeforeAttention,
    after_attention,
    before_attention,
    gated_activation,
    joined_linear,
    linear_parameters,
    rms_norm,
    rotate,
)
from strop.models.layers.known_code import RmsNormSpec, find_form, rms_norm_spec
from strop.models.layers.segments import is_compiling
from strop.models.layers.weight_copies import WeightCopies


def are_plain(linears: Sequence[object]) -> bool:
    """Return whether the modules are ordinary linear layers: without adapters, hooks, shards or another ``forward``."""
    return all(
        type(linear) is nn.Linear
        and "forward" not in linear.__dict__
        and not linear._forward_pre_hooks
        and not linear._forward_hooks
        and not isinstance(linear._parameters["weight"], DTensor)
        and (linear._parameters["bias"] is None) == (linears[0]._parameters["bias"] is None)  # type: ignore[attr-defined]
        for linear in linears
    )


# Forms of attention by the options that they pass to the attention function, which are attributes of theirs.
_WINDOW = {"sliding_window": "sliding_window"}
_ATTENTION: Mapping[str, Mapping[str, str]] = {
    "llama.LlamaAttention": {},
    "qwen2.Qwen2Attention": _WINDOW,
    "qwen3.Qwen3Attention": _WINDOW,
    "mistral.MistralAttention": {"sliding_window": "config.sliding_window"},
    "gemma2.Gemma2Attention": {"sliding_window": "sliding_window", "softcap": "attn_logit_softcapping"},
    "gemma3.Gemma3Attention": _WINDOW,
}
_MLPS = ("llama.LlamaMLP",)
# Layers whose norms are read only by attention and the MLP: one norm before each, or one before and one after.
_BLOCK = "llama.LlamaDecoderLayer"
_LAYERS = (_BLOCK, "gemma2.Gemma2DecoderLayer")
_OTHER_LAYERS = ("granite.GraniteDecoderLayer", "mixtral.MixtralDecoderLayer")
_STATE = "_strop_fused"


class FusedLayers:
    """The fused forward passes of a model's modules, used inside ``use``."""

    def __init__(self, model: nn.Module) -> None:
        self.active = False
        self.keep_copies = False
        self.copies = WeightCopies()
        self.count = sum(_fuse(module, self) for module in model.modules())

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedLayers:
        """The copy of a model has its own fused layers, with its own copies of weights."""
        copy = memo[id(self)] = FusedLayers.__new__(FusedLayers)
        copy.active = copy.keep_copies = False
        copy.copies, copy.count = WeightCopies(), self.count
        return copy

    @contextmanager
    def use(self, *, keep_copies: bool) -> Iterator[None]:
        """Use the fused forward passes, including in backward passes that recompute.

        With ``keep_copies``, weights are cast to the dtype of the products only once, so they must not change inside.
        """
        outer = self.active, self.keep_copies
        self.active, self.keep_copies = True, keep_copies
        try:
            yield
        finally:
            self.active, self.keep_copies = outer
            self.copies.clear()

    def project(self, x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
        """[..., K] -> [..., N] of each layer; modules that are not plain compute it themselves."""
        dtype = _product_dtype(x)
        if not are_plain(linears) or (dtype is None and linears[0].weight.dtype != x.dtype):
            return tuple(linear(x) for linear in linears)
        x = x if dtype is None else x.to(dtype)
        weights = self.copies.get(linears, x.dtype, keep=self.keep_copies)
        outputs = joined_linear(x.reshape(-1, x.shape[-1]), linears, weights)
        return tuple(output.view(*x.shape[:-1], -1) for output in outputs)


@dataclass(frozen=True, eq=False)
class FusedNorm:
    """How to compute a norm."""

    layers: FusedLayers
    spec: RmsNormSpec
    readers: tuple[nn.Module, ...] = ()  # linear layers that read its output (and nothing else), which is then in their dtype


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """How to compute an attention module."""

    layers: FusedLayers
    options: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class FusedBlock:
    """How to compute a decoder layer."""

    layers: FusedLayers


@dataclass(frozen=True, eq=False)
class FusedMlp:
    """How to compute a gated MLP."""

    layers: FusedLayers
    activation: str


def enable_fused_layers(model: nn.Module) -> FusedLayers:
    """Give a model's modules their fused forward passes, once. They have no effect outside ``FusedLayers.use``."""
    for module in model.modules():
        if (state := module.__dict__.get(_STATE)) is not None:
            layers: FusedLayers = state.layers
            return layers
    layers = FusedLayers(model)
    for module in model.modules():
        _connect_norms(module)
        _fuse_block(module, layers)
    return layers


def use_fused_layers(network: object, *, keep_copies: bool) -> AbstractContextManager[None]:
    """Return ``FusedLayers.use`` of a network, or a context without effect for one that has no fused layers or computes exactly."""
    layers: FusedLayers | None = getattr(network, "fused_layers", None)
    exact = getattr(network, "exact", None) is not None
    return nullcontext() if layers is None or exact else layers.use(keep_copies=keep_copies)


def find_fused_layers(layers: Sequence[nn.Module]) -> FusedLayers | None:
    """Return what fuses decoder layers as a whole; None if one of them is not fused so."""
    states = [layer.__dict__.get(_STATE) for layer in layers]
    return states[0].layers if states and all(isinstance(state, FusedBlock) for state in states) else None  # type: ignore[union-attr]


def find_unknown_part(layer: nn.Module) -> str | None:
    """Return the class of a decoder layer, or of the first module in it, whose code is not known; None if all of it is."""
    if find_form(type(layer), _LAYERS) is None:
        return type(layer).__name__
    return next((type(part).__name__ for part in layer.children() if _STATE not in part.__dict__), None)


def _fuse(module: nn.Module, layers: FusedLayers) -> bool:
    """Replace the forward pass of a module whose code is known. Return whether it is."""
    state: Any = None
    forward: Callable[..., Any] | None = None
    if (spec := rms_norm_spec(module)) is not None:
        state, forward = FusedNorm(layers, spec), _norm_forward
    elif hasattr(module, "o_proj") and (form := find_form(type(module), tuple(_ATTENTION))) is not None:
        state, forward = FusedAttention(layers, _ATTENTION[form]), _attention_forward
    elif hasattr(module, "gate_proj") and find_form(type(module), _MLPS) and (kind := activation_kind(module.act_fn)):
        state, forward = FusedMlp(layers, kind), _mlp_forward
    if forward is None or "forward" in module.__dict__:
        return False
    module.__dict__[_STATE] = state
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
    return True


def _connect_norms(layer: nn.Module) -> None:
    """Register, with the norms of a decoder layer, the linear layers that read them."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    before_mlp = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else "post_attention_layernorm"
    pairs = (("input_layernorm", attention, ("q_proj", "k_proj", "v_proj")), (before_mlp, mlp, ("gate_proj", "up_proj")))
    for name, reader, linears in pairs:
        norm = getattr(layer, name, None)
        state = getattr(norm, _STATE, None)
        known = state is not None and getattr(reader, _STATE, None) is not None
        if known and find_form(type(layer), _LAYERS + _OTHER_LAYERS) is not None:
            readers = tuple(getattr(reader, linear) for linear in linears)
            norm.__dict__[_STATE] = FusedNorm(state.layers, state.spec, readers)  # type: ignore[union-attr]


def _fuse_block(layer: nn.Module, layers: FusedLayers) -> None:
    """Replace the forward pass of a decoder layer that has Llama's code, and parts whose code is known."""
    if find_unknown_part(layer) is None and find_form(type(layer), _LAYERS) == _BLOCK and "forward" not in layer.__dict__:
        layer.__dict__[_STATE] = FusedBlock(layers)
        layer.forward = MethodType(_block_forward, layer)  # type: ignore[method-assign]


def _block_forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    layers: FusedLayers = layer.__dict__[_STATE].layers
    plan: Any = kwargs.get("plan")
    autocast = _product_dtype(hidden_states)
    dtype = autocast or hidden_states.dtype
    attention, mlp = layer.self_attn, layer.mlp
    outer = layer.input_layernorm, layer.post_attention_layernorm
    parts = (
        _find_parts(attention, mlp, outer, hidden_states, autocast) if layers.active and plan is not None and not args else None
    )
    if parts is None:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
    groups, norms = parts
    pack = not is_compiling()  # compiled products read ordinary tensors
    weights = [layers.copies.get(group, dtype, keep=layers.keep_copies, pack=pack) for group in groups]
    parameters = [linear_parameters(group) for group in groups]
    cos, sin = (angles[0].unsqueeze(1) for angles in kwargs["position_embeddings"])
    wide = torch.promote_types(dtype, norms[0].weight.dtype) if norms and norm_spec(norms[0]).rounds_first else dtype
    before = BeforeAttention(
        norm_spec(outer[0]),
        tuple(map(norm_spec, norms)),
        wide,
        attention.head_dim,
        dtype,
        autocast or torch.promote_types(wide, cos.dtype),
    )
    scales = [norm.weight for norm in norms]
    rows = before_attention(hidden_states, cos, sin, before, weights[0], outer[0].weight, scales, parameters[0])
    options = {name: _get(attention, path) for name, path in attention.__dict__[_STATE].options.items()}
    spec = AttentionSpec(attention.layer_idx, attention.scaling, options.get("sliding_window"), options.get("softcap"))
    attended = plan.attend(*rows, spec)
    after = AfterAttention(norm_spec(outer[1]), mlp.__dict__[_STATE].activation, dtype)
    return after_attention(hidden_states, attended, after, weights[1:], outer[1].weight, parameters[1:])


def norm_spec(norm: Any) -> RmsNormSpec:
    state: FusedNorm = norm.__dict__[_STATE]
    return state.spec


def _find_parts(
    attention: Any, mlp: Any, outer: Sequence[Any], x: Tensor, autocast: torch.dtype | None
) -> tuple[Sequence[Sequence[Any]], Sequence[Any]] | None:
    """Return the linear layers of a decoder layer by their inputs, and the norms of its heads.

    None unless all parts are as they were when they were fused: no hooks, adapters, shards or other forward passes.
    """
    inside, gates = attention._modules, mlp._modules  # a module looks for its attributes elsewhere first
    linears = (
        (inside["q_proj"], inside["k_proj"], inside["v_proj"]),
        (inside["o_proj"],),
        (gates["gate_proj"], gates["up_proj"]),
        (gates["down_proj"],),
    )
    of_heads = (inside["q_norm"], inside["k_norm"]) if "q_norm" in inside else ()
    norms, dtype = (*outer, *of_heads), autocast or x.dtype
    unchanged = (
        x.dtype != torch.float64
        and torch.promote_types(x.dtype, dtype) == x.dtype
        and not isinstance(x, DTensor)
        and not attention.attention_dropout
        and attention.config._attn_implementation == IMPLEMENTATION
        and all(map(are_plain, linears))
        and _runs(attention, _attention_forward)
        and _runs(mlp, _mlp_forward)
        and all(_runs(norm, _norm_forward) and not isinstance(norm.weight, DTensor) for norm in norms)
        and (autocast is not None or all(part.weight.dtype == dtype for part in (*(group[0] for group in linears), *norms)))
    )
    return (linears, of_heads) if unchanged else None


def _runs(module: Any, forward: Callable[..., Any]) -> bool:
    own = module.__dict__.get("forward")
    return getattr(own, "__func__", None) is forward and not module._forward_hooks and not module._forward_pre_hooks


def _norm_forward(module: Any, x: Tensor) -> Tensor:
    state: FusedNorm = module.__dict__[_STATE]
    if not state.layers.active or x.dtype == torch.float64 or isinstance(x, DTensor) or isinstance(module.weight, DTensor):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    dtype = torch.promote_types(x.dtype, module.weight.dtype) if state.spec.rounds_first else x.dtype
    product_dtype = _product_dtype(x)
    if product_dtype is not None and state.readers and are_plain(state.readers):
        dtype = product_dtype
    return rms_norm(x, module.weight, state.spec, dtype)


def _mlp_forward(module: Any, x: Tensor) -> Tensor:
    state: FusedMlp = module.__dict__[_STATE]
    if not state.layers.active or not are_plain((module.gate_proj, module.up_proj)):
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    gate, up = state.layers.project(x, (module.gate_proj, module.up_proj))
    return state.layers.project(gated_activation(gate, up, state.activation), (module.down_proj,))[0]


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    state: FusedAttention = module.__dict__[_STATE]
    linears = (module.q_proj, module.k_proj, module.v_proj)
    if not state.layers.active or past_key_values is not None or not are_plain(linears):
        inputs = {
            "position_embeddings": position_embeddings,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
        }
        return type(module).forward(module, hidden_states, **inputs, **kwargs)  # type: ignore[no-any-return]
    shape = hidden_states.shape[:-1]
    query, key, value = (part.view(*shape, -1, module.head_dim) for part in state.layers.project(hidden_states, linears))
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = (angles.unsqueeze(-2) for angles in position_embeddings)
    dtype = _product_dtype(query) or torch.promote_types(query.dtype, cos.dtype)
    query, key = (rotate(part, cos, sin, dtype) for part in (query, key))
    options = {name: _get(module, path) for name, path in state.options.items()}
    output, weights = _attention_function(module)(
        module,
        *(part.transpose(1, 2) for part in (query, key, value)),
        attention_mask,
        dropout=module.attention_dropout if module.training else 0.0,
        scaling=module.scaling,
        **options,
        **kwargs,
    )
    return state.layers.project(output.reshape(*shape, -1), (module.o_proj,))[0], weights


def _attention_function(module: Any) -> Callable[..., tuple[Tensor, Any]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = sys.modules[type(module).__module__].eager_attention_forward
    function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    return function


def _get(module: Any, path: str) -> Any:
    return functools.reduce(lambda value, name: getattr(value, name, None), path.split("."), module)


def _product_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast's matrix products; None without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def activation_kind(module: object) -> str | None:
    """Return the kind of an activation of Transformers; None for one that is not known."""
    name = type(module).__name__
    if isinstance(module, nn.SiLU) or name == "SiLUActivation":
        return SILU
    if isinstance(module, nn.GELU):
        return module.approximate
    if name == "GELUTanh" and getattr(module, "act", None) is not None:
        return GELU_TANH
    return None
