"""Forms of a decoder's layers that are known by their code: where they are, and what RMS norms they have."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import CodeType
from typing import Any

from torch import nn


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder: its module list with the most parameters, or an empty list."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    largest = max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))
    return list(largest)


_LOOKED_UP = frozenset({"eager_attention_forward"})  # what reproduces a form calls the module's own


def find_form(kind: Any, forms: tuple[str, ...]) -> str | None:
    """Return the first of ``forms`` (``llama.LlamaMLP``) whose forward pass is that of the class ``kind``; None if none is."""
    found: str | None = _find_form(kind, forms)
    return found


@cache
def _find_form(kind: Any, forms: tuple[str, ...]) -> str | None:
    return next((form for form in forms if _same_function(kind.forward, kind, _load(form).forward, _load(form))), None)


def _load(form: str) -> Any:
    family, _, name = form.partition(".")
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


def _same_function(left: Any, left_class: type, right: Any, right_class: type) -> bool:
    """Whether two functions do the same: their instructions, and the functions and methods that those call by name."""
    left, right = inspect.unwrap(left), inspect.unwrap(right)
    if left is right:
        return True
    same = _instructions(left.__code__, left.__doc__) == _instructions(right.__code__, right.__doc__)
    if not same or left.__defaults__ != right.__defaults__:
        return False
    pairs = (
        (_named(left, left_class, name), _named(right, right_class, name)) for name in {*left.__code__.co_names} - _LOOKED_UP
    )
    return all(
        one is other
        or (inspect.isfunction(one) and inspect.isfunction(other) and _same_function(one, left_class, other, right_class))
        for one, other in pairs
        if inspect.isfunction(one) or inspect.isfunction(other)
    )


def _named(function: Any, kind: type, name: str) -> object:
    return function.__globals__.get(name) or getattr(kind, name, None)


def _instructions(code: CodeType, docstring: str | None = None) -> tuple[object, ...]:
    """Return all that decides what a function does but its default values, and the docstring, which is its first constant."""
    constants = code.co_consts[1:] if code.co_consts[:1] in ((None,), (docstring,)) else code.co_consts
    found = tuple(_instructions(each) if isinstance(each, CodeType) else (type(each), each) for each in constants)
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, found


# RMSNorm (arXiv 1910.07467) as one autograd function: it saves its input and one number per row, and can write bfloat16
# directly.

# Llama's formula, weight * (x / rms(x)), and Gemma's, (1 + weight) * (x / rms(x)).
LLAMA, GEMMA = "llama.LlamaRMSNorm", "gemma.GemmaRMSNorm"


@dataclass(frozen=True)
class RmsNormSpec:
    """The formula of an RMSNorm, apart from its weight."""

    eps: float
    offset: float  # added to the weight: 1 in Gemma
    rounds_first: bool  # Llama rounds x / rms(x) to the dtype of x before it multiplies with the weight; Gemma rounds the product


def rms_norm_spec(module: nn.Module) -> RmsNormSpec | None:
    """Return what an RMSNorm of Transformers computes; None for a module whose code is not that of one."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if eps is None or isinstance(module, nn.LayerNorm) or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    form = find_form(type(module), (LLAMA, GEMMA))
    if form == LLAMA:
        return RmsNormSpec(float(eps), 0.0, True)
    return RmsNormSpec(float(eps), 1.0, False) if form == GEMMA else None
