"""What a module computes, told by its code instead of the name of its family.

Transformers repeats the code of a layer in every family that has it. A module whose forward pass is, instruction for instruction, that of a
form that Strop knows computes the same, whatever its family is called; a new family of known layers needs no entry anywhere.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from types import CodeType
from typing import Any

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
