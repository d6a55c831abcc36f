"""Whether a model can read packed rows: by its structure, and by running its parts with weights that cannot hide a leak.

A module that mixes positions must be of a kind that follows a plan: attention through Transformers' interface, or a mixer whose
convolutions and scans are computed by the plan. What looks as if it did not mix, and mixes after all, shows in a second run of each
part of a decoder layer, on random inputs with random weights: with its own weights a mixer near zero would leak unseen.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.models.layers.known_code import decoder_layers
from strop.models.mixers.mixer_interface import is_mixer, is_planned

LARGEST = 1 << 28  # parameters of a part that gets random weights: experts larger than that mix no positions
LEAK = 1e-3  # relative; without a leak float32 differs by 1e-5

_POSITIONAL: tuple[Any, ...] = (
    nn.modules.conv._ConvNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_CACHES = frozenset(
    {"past_key_values", "past_key_value", "cache_params", "layer_past"}
)  # arguments of what keeps earlier positions


class CannotPack(Exception):
    """A model cannot read packed rows, with the reason."""


def check_structure(decoder: nn.Module) -> None:
    """Raise CannotPack for a module that mixes positions in a way that no plan computes."""
    mixers: list[str] = []
    for name, module in decoder.named_modules():
        if is_planned(module):
            continue
        if is_mixer(module):
            mixers.append(f"{name}.")
        elif _mixes_unseen(module) and not (isinstance(module, _POSITIONAL) and name.startswith(tuple(mixers))):
            raise CannotPack(f"{name}, a {type(module).__name__}, mixes positions in a way that Strop does not know")


def _mixes_unseen(module: nn.Module) -> bool:
    if isinstance(module, _POSITIONAL):
        return True
    if isinstance(module, GradientCheckpointingLayer) or hasattr(module, "get_input_embeddings"):
        return False  # what they contain is looked at by itself
    if any(_follows_a_plan(child) for child in module.children()):
        return False  # a layer inside of a layer, as Zamba's shared attention
    forward = inspect.unwrap(type(module).forward)
    caches = not _CACHES.isdisjoint(inspect.signature(forward).parameters)
    return (caches or hasattr(module, "layer_idx")) and not (_follows_a_plan(module) or _calls_only_children(module, forward))


def _follows_a_plan(module: nn.Module) -> bool:
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def _calls_only_children(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether all that a module does is to call others, as an MLP that is told its layer."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in forward.__code__.co_names)


class LayerProbe:
    """Runs the parts of decoder layers once more, on random inputs with random weights, one part of each form."""

    def __init__(self, decoder: nn.Module, places: Tensor) -> None:
        """``places`` [R, L] int64: the token of the packed row at each place of the padded rows; -1: padding."""
        parts: dict[object, tuple[str, nn.Module]] = {}
        names = {id(module): name for name, module in decoder.named_modules()}
        for layer in decoder_layers(decoder):
            for part in layer.children():
                if sum(parameter.numel() for parameter in part.parameters()) <= LARGEST:
                    parts.setdefault(_form(part), (names[id(part)], part))
        self.parts = dict(parts.values())
        self.places = places
        self.alone: dict[str, Tensor] = {}
        self.together: dict[str, Tensor] = {}
        self._running = False

    def read_alone(self) -> AbstractContextManager[None]:
        """Run the parts on padded rows."""
        return self._record(self.places, self.alone)

    def read_together(self) -> AbstractContextManager[None]:
        """Run the parts on the packed row."""
        return self._record(torch.arange(int(self.places.max()) + 1)[None], self.together)

    def check(self) -> None:
        """Raise CannotPack if a part computes something else in the packed row than in padded rows."""
        for name, alone in self.alone.items():
            if name in self.together:
                real = (self.places >= 0).to(alone.device)
                packed = self.together[name][0][self.places.to(alone.device)[real]]
                if not float((packed - alone[real]).abs().max() / alone[real].abs().max()) < LEAK:
                    kind = type(self.parts[name]).__name__
                    raise CannotPack(f"{name}, a {kind}, mixes the positions of sequences that share a row")

    @contextmanager
    def _record(self, places: Tensor, found: dict[str, Tensor]) -> Iterator[None]:
        def run(name: str) -> Callable[..., None]:
            def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
                if self._running or name in found:
                    return
                self._running = True
                try:
                    if (outputs := _run_randomly(part, args, kwargs, places)) is not None:
                        found[name] = outputs
                finally:
                    self._running = False

            return hook

        hooks = [part.register_forward_hook(run(name), with_kwargs=True) for name, part in self.parts.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _run_randomly(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], places: Tensor) -> Tensor | None:
    """The outputs [R, L, ...] of a part for rows of random tokens; None if it does not read rows of tokens."""
    first = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0] if args else None
    plain = all(each.is_floating_point() and type(each) is nn.Parameter for each in part.parameters())
    if not plain or not isinstance(first, Tensor) or first.shape[:2] != places.shape:
        return None
    weights = {name: _random_like(tensor, seed) for seed, (name, tensor) in enumerate(part.named_parameters())}
    weights |= {name: _widen(tensor) for name, tensor in part.named_buffers()}
    noise = torch.randn(int(places.max()) + 2, *first.shape[2:], generator=torch.Generator().manual_seed(0))
    noise[-1] = 0  # at places of padding
    inputs = noise[places].to(first.device)
    args, kwargs = _map(_widen, args), _map(_widen, kwargs)
    if "hidden_states" in kwargs:
        kwargs["hidden_states"] = inputs
    else:
        args = (inputs, *args[1:])
    output = torch.func.functional_call(part, weights, args, kwargs)
    output = output[0] if isinstance(output, tuple) else output
    return output if isinstance(output, Tensor) and output.shape[:2] == places.shape else None


def _form(part: nn.Module) -> object:
    modules = tuple((name, type(module)) for name, module in part.named_modules())
    return modules, tuple(tuple(parameter.shape) for parameter in part.parameters())


def _random_like(tensor: Tensor, seed: int) -> Tensor:
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return values.mul_(tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0).to(tensor.device)


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_map(change, each) for each in value)
    if isinstance(value, (dict, UserDict)):  # a copy: layers may store keys and values there for later ones
        return type(value)({name: _map(change, each) for name, each in value.items()})
    return change(value)
