"""Decoder layers compiled by torch.compile, each class of layer once, attention left out.

Of layers that are fused as a whole (``FusedBlock``) each side of attention is a segment (``segments``): the host then has two nodes a
layer, and few checks. Other layers are compiled before and after attention, as they are.

The layers of a model share their compiled code, for rows of all lengths: the number of tokens is dynamic. Attention follows the
plan of a call, which cannot be compiled, and has its own kernels; a layer is compiled before and after it. The code is cached on
disk between runs. Outside ``CompiledLayers.use`` the layers run as before, because an engine on the same modules has other shapes.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from strop.models.attention.attention_interface import keep_attention_uncompiled
from strop.models.layers.fused_layers import find_fused_layers, use_fused_layers
from strop.models.layers.segments import OPTIONS, compiling_segments
from strop.storage.files import user_cache_folder

log = logging.getLogger(__name__)

_STATE = "_strop_compiled"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"
CODES_OF_A_CLASS = 64  # policy, critic and reference of one family, with and without gradients; torch stops compiling at 8


class CompiledLayers:
    """The compiled forward passes of a decoder's layers, used inside ``use``."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Nothing is compiled yet: that happens in the first passes."""
        self.active = False
        self.compiled = 0  # parts of layers, with their backward passes; a layer has several
        self.seconds = 0.0  # that compiling them took
        keep_cache()
        settings: Any = torch._dynamo.config
        settings.recompile_limit = max(settings.recompile_limit, CODES_OF_A_CLASS)
        self.fused = find_fused_layers(layers)  # None: of layers that are not fused as a whole
        self._functions = {type(layer): _compile(type(layer)) for layer in layers if self.fused is None}
        self._layers = tuple(layers)
        self._began = 0.0
        for layer in layers:
            layer.__dict__[_STATE] = self
            if self.fused is None:
                layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLayers:
        """The copy of a model shares the code, but tracks separately whether it is in use."""
        twin = memo[id(self)] = CompiledLayers.__new__(CompiledLayers)
        twin.active, twin.compiled, twin.seconds, twin._began = False, 0, 0.0, 0.0
        twin._functions, twin._layers = self._functions, ()  # the layers of the copy hold their state
        twin.fused = copy.deepcopy(self.fused, memo)
        return twin

    @contextmanager
    def use(self, *, keep_copies: bool) -> Iterator[None]:
        """Use the compiled layers, including in backward passes that recompute. Logs what was compiled.

        ``keep_copies``: as in ``FusedLayers.use``.
        """
        from torch._dynamo.callback import callback_handler  # imported late, because it takes a second

        if self.active:
            yield
            return
        compiled, seconds = self.compiled, self.seconds
        self.active = True
        begin, end = self._begin, self._end
        callback_handler.register_start_callback(begin)
        callback_handler.register_end_callback(end)
        fused = nullcontext() if self.fused is None else self.fused.use(keep_copies=keep_copies)
        try:
            with fused, compiling_segments(self.fused is not None):
                yield
        finally:
            self.active = False
            callback_handler.remove_start_callback(begin)
            callback_handler.remove_end_callback(end)
            if self.compiled > compiled:
                log.info(
                    "compiled decoder layers: %d parts in %.1f s, kept in %s",
                    self.compiled - compiled,
                    self.seconds - seconds,
                    os.environ.get(_CACHE, "a temporary folder"),
                )

    def remove(self) -> None:
        """Restore the layers' own forward passes."""
        for layer in self._layers:
            del layer.__dict__[_STATE]
            if self.fused is None:
                del layer.__dict__["forward"]

    def run(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        function = self._functions[type(layer)] if self.active else type(layer).forward
        return function(layer, *args, **kwargs)

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: Any) -> None:
        self.compiled += 1
        self.seconds += time.perf_counter() - self._began


def find_compiled_layers(model: nn.Module) -> CompiledLayers | None:
    """Return a model's compiled layers, also in a copy of the model; None if it has none."""
    return next((module.__dict__[_STATE] for module in model.modules() if _STATE in module.__dict__), None)


def use_learner_layers(network: object, *, keep_copies: bool) -> AbstractContextManager[None]:
    """Return the context of a learner's passes: compiled layers if a network has them, otherwise fused ones.

    An exact network uses neither. ``keep_copies``: as in ``FusedLayers.use``.
    """
    compiled: CompiledLayers | None = getattr(network, "compiled_layers", None)
    if compiled is None:
        return use_fused_layers(network, keep_copies=keep_copies)
    return nullcontext() if getattr(network, "exact", None) is not None else compiled.use(keep_copies=keep_copies)


def _compile(kind: type[nn.Module]) -> Callable[..., Any]:
    """Return the forward pass of a class of layers, compiled for any number of tokens."""
    keep_attention_uncompiled()
    function: Callable[..., Any] = torch.compile(kind.forward, dynamic=True, options=dict(OPTIONS))
    return function


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    compiled: CompiledLayers = layer.__dict__[_STATE]
    return compiled.run(layer, *args, **kwargs)


def keep_cache() -> None:
    """Keep compiled code between runs in the user's own folder (because it is executed), unless the environment names another.

    Torch sets the variable to its own folder for temporary files once anything asks where the cache is.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # imported late, because it takes a second

    if os.environ.get(_CACHE, "") not in ("", default_cache_dir()):
        return
    folder = user_cache_folder() / "compiled_layers"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return  # torch then uses a folder for temporary files
    os.environ[_CACHE] = str(folder)
