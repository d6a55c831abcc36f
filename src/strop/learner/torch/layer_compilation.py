"""Decides whether a learner's decoder layers are compiled (``policy.compile``), and checks that compiled layers compute the same."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from strop.device_copies import is_gpu
from strop.learner.parallel.parallelism import RankLayers
from strop.models.adapters import lora_layers
from strop.models.attention.tree_plan import TreePlan
from strop.models.layers.compiled_layers import CompiledLayers
from strop.models.layers.fused_layers import enable_fused_layers, find_fused_layers, find_unknown_part
from strop.models.layers.known_code import decoder_layers
from strop.models.layers.rounded_layers import find_rounded
from strop.models.network import Network
from strop.packages import has_cpp_compiler

log = logging.getLogger(__name__)

TOKENS = 512  # of the row used to try compiled layers
ROUNDS = 3
# Largest distance of compiled values and gradients from those of the modules, relative to the norm of all of them.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


class CannotCompile(Exception):
    """The layers of a network cannot be compiled. The message gives the reason."""


@dataclass(frozen=True)
class LayerCall:
    """A decoder layer with the arguments of a call."""

    layer: nn.Module
    hidden: Tensor  # [1, T, H]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Tensor:
        output = self.layer(self.hidden, *self.args, **self.kwargs)
        values: Tensor = output[0] if isinstance(output, tuple) else output
        return values

    def run_both_passes(self) -> list[Tensor]:
        """Return the output, and the gradients of the input and of the trained weights."""
        output = self.run()
        inputs = [self.hidden, *(each for each in self.layer.parameters() if each.requires_grad)]
        return [output.detach(), *torch.autograd.grad(output, inputs, self.hidden.detach().to(output.dtype))]


def choose_layer_compilation(
    network: Network, wanted: bool | Literal["auto"], section: str, *, ranks: RankLayers | None = None
) -> CompiledLayers | None:
    """Compile the layers of a network for a learner's passes if possible, and log the decision. Return the compiled layers.

    Layers are compiled and tried at once; on ranks, each tries layers of its own. ``wanted`` true: raises ValueError if they cannot be
    compiled or compute something else. ``auto``: falls back to the modules.
    """
    if wanted is False or (wanted == "auto" and not is_gpu(network.device)):
        return None
    try:
        reason = find_obstacle(network, ranks=ranks, known_only=wanted == "auto")
        if reason is not None:
            raise CannotCompile(reason)
        network.compiled_layers = _compile_and_try(network, section, ranks)
    except CannotCompile as error:
        if wanted is True:
            raise ValueError(f"{section}.compile: found true, but {error}. Set it to auto or false") from error
        log.info("%s.compile: the layers are not compiled: %s", section, error)
    return network.compiled_layers


def find_obstacle(network: Network, *, known_only: bool, ranks: RankLayers | None = None) -> str | None:
    """Return why the layers cannot be compiled; None if they can. ``known_only``: only layers whose code is known."""
    layers = decoder_layers(network.decoder)
    if network.exact is not None:
        return "policy.exact_on_policy computes with operations of a fixed order"
    if network.routed is not None:
        return "policy.router_replay hands recorded experts to the layers"
    if network.draft is not None:
        return f"{network.draft.key} reads the states between layers, which compiled ones may not show"
    if (rounded := find_rounded(network.model)) is not None:
        return f"{rounded.rounded_by} rounds weights and inputs in the modules"
    whole = find_fused_layers(layers) is not None  # each call of such a layer looks for hooks and adapters itself
    if ranks is not None and (ranks.divided or not whole):
        what = "divide matrices" if ranks.divided else f"have layers that are not fused as a whole ({type(layers[0]).__name__})"
        return f"the learner is on ranks that {what}, and those are not compiled in this version"
    if not network.packed:
        return "the model reads padded rows, whose layers are not compiled in this version"
    if any(True for _ in lora_layers(network.model)):
        return "the layers have adapters, which the reference policy switches off, and compiled layers may ignore that"
    if ranks is None and any(
        module._forward_hooks or module._forward_pre_hooks for layer in layers for module in layer.modules()
    ):
        return "its modules have hooks, which compiled layers ignore"
    if not layers or (not whole and any("forward" in vars(layer) for layer in layers)):
        return f"{type(network.decoder).__name__} has no layers with their own forward pass"
    if known_only and (part := next(filter(None, map(find_unknown_part, layers)), None)):  # the choice of experts, for one
        return f"{part} may have steps that are compiled again for each batch; policy.compile=true tries it"
    return _find_missing_compiler(network.device)


def _find_missing_compiler(device: torch.device) -> str | None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed (pip install triton)"
    if device.type != "cpu":
        return f"layers are compiled for GPUs and CPUs, not for {device.type}"
    return None if has_cpp_compiler() else "there is no C++ compiler on this machine (install g++)"


def _compile_and_try(network: Network, section: str, ranks: RankLayers | None) -> CompiledLayers:
    """Compile the layers and compare them with the modules. Raises CannotCompile and restores the modules if that fails."""
    layers, compiled = decoder_layers(network.decoder), None
    kinds = _one_of_each_kind(layers)
    try:
        calls = record_calls(network, kinds) if ranks is None else make_calls(network, kinds, ranks.dtype)
        compiled = CompiledLayers(layers if ranks is None else [call.layer for call in calls])
        with network.autocast():
            for call, difference in zip(calls, _compare(calls, compiled), strict=True):
                _check(call, difference, network)
            _log_saving(network, compiled, calls[0], f"{section}: {len(layers)} decoder layers are compiled")
    except Exception as error:  # of torch.compile, of its code, of a compiler, or of layers that cannot be made
        if compiled is not None:
            compiled.remove()
        if isinstance(error, CannotCompile):
            raise
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise CannotCompile(f"torch.compile failed: {type(error).__name__}: {said}") from error
    return compiled if ranks is None else CompiledLayers(layers)


def _one_of_each_kind(layers: Sequence[nn.Module]) -> list[nn.Module]:
    kinds = {(type(layer), getattr(getattr(layer, "self_attn", None), "sliding_window", None)): layer for layer in layers}
    return list(kinds.values())


@torch.no_grad()
def record_calls(network: Network, layers: Sequence[nn.Module]) -> list[LayerCall]:
    """Return the calls of layers in a pass over a row of one sequence of at most 512 tokens."""
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append(LayerCall(layer, hidden.detach().clone().requires_grad_(), args[1:], others))

    positions, plan = _make_row(network)
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        tokens = (positions * 7919 + 13) % network.model.get_input_embeddings().weight.shape[0]
        with network.autocast():
            network.decoder(input_ids=tokens[None], position_ids=positions[None], plan=plan, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _make_row(network: Network) -> tuple[Tensor, TreePlan]:
    """Return the positions of one sequence of at most 512 tokens, and its plan."""
    longest: Any = getattr(network.decoder.config, "max_position_embeddings", None)
    positions = torch.arange(min(TOKENS, int(longest or TOKENS)), device=network.device)
    start, size, parent = (torch.tensor([value]) for value in (0, len(positions), -1))
    return positions, TreePlan(start, size, parent, network.device, network.attention_kernel)


def make_calls(network: Network, layers: Sequence[Any], dtype: torch.dtype) -> list[LayerCall]:
    """Return calls of layers like these with random weights: gathering the weights of a layer takes all ranks."""
    decoder: Any = network.decoder
    config, device = decoder.config, network.device
    positions, plan = _make_row(network)
    with torch.random.fork_rng(devices=[device] if is_gpu(device) else [], device_type=device.type), torch.device(device):
        torch.manual_seed(0)
        hidden = torch.randn(1, len(positions), config.hidden_size, dtype=dtype)
        twins = [_own_class(layer)(config, layer.self_attn.layer_idx).to(dtype) for layer in layers]
    enable_fused_layers(nn.ModuleList(twins))
    angles = decoder.rotary_emb(hidden, positions[None])
    return [
        LayerCall(twin.train(layer.training), hidden.clone().requires_grad_(), (), {"position_embeddings": angles, "plan": plan})
        for twin, layer in zip(twins, layers, strict=True)
    ]


def _own_class(layer: nn.Module) -> Any:
    """Return the class of a layer before FSDP derived one from it."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind for kind in type(layer).__mro__ if not issubclass(kind, FSDPModule))


def _compare(calls: Sequence[LayerCall], compiled: CompiledLayers) -> list[float]:
    """Return, for each call, the distance of compiled values and gradients from the modules'. Passes without gradients are
    compiled too.
    """
    plain = [call.run_both_passes() for call in calls]
    with compiled.use(keep_copies=True):
        found = [call.run_both_passes() for call in calls]
        with torch.no_grad():
            scored = [call.run() for call in calls]
    return [
        max(_distance([values[0]], [expected[0]]), _distance([score], [expected[0]]), _distance(values[1:], expected[1:]))
        for values, score, expected in zip(found, scored, plain, strict=True)
    ]


def _distance(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of all differences relative to that of all expected values; infinite for values that are not finite."""
    squares = [
        ((a.double() - b.double()).square().sum(), b.double().square().sum()) for a, b in zip(values, expected, strict=True)
    ]
    difference, size = (float(torch.stack(column).sum().sqrt()) for column in zip(*squares, strict=True))
    distance = difference / max(size, torch.finfo(torch.float32).tiny)
    return distance if distance == distance else float("inf")


def _check(call: LayerCall, difference: float, network: Network) -> None:
    bound = BOUNDS.get(network.precision, BOUNDS[torch.float32])
    if difference > bound:
        raise CannotCompile(
            f"{type(call.layer).__name__} computes something else when it is compiled: values or gradients differ by {difference:.2g} of "
            f"their size, and {bound:g} is the bound in {str(network.precision).removeprefix('torch.')}"
        )


def _log_saving(network: Network, compiled: CompiledLayers, call: LayerCall, said: str) -> None:
    """Alternately measure both passes of a layer, compiled and as the learner would otherwise run it."""
    contexts: tuple[Callable[[], AbstractContextManager[None]], ...] = (
        lambda: compiled.use(keep_copies=True),
        lambda: (compiled.fused or network.fused_layers).use(keep_copies=True),
    )
    seconds: tuple[list[float], ...] = ([], [])
    for _ in range(ROUNDS):
        for context, taken in zip(contexts, seconds, strict=True):
            with context():
                call.run_both_passes()  # copies of weights are created here
                taken.append(_time(call, network.device))
    fast, usual = (1000 * statistics.median(taken) for taken in seconds)
    log.info(
        "%s: both passes of one over %d tokens take %.1f ms instead of %.1f (%.2f times as fast)",
        said,
        call.hidden.shape[1],
        fast,
        usual,
        usual / fast,
    )


def _time(call: LayerCall, device: torch.device) -> float:
    synchronize: Callable[[], Any] = torch.get_device_module(device).synchronize if is_gpu(device) else lambda: None
    synchronize()
    began = time.perf_counter()
    call.run_both_passes()
    synchronize()
    return time.perf_counter() - began
