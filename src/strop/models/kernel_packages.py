"""Kernels of optional packages: used on a GPU where they are installed, and compared there with plain computation first."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

LARGEST_DIFFERENCE = 0.05  # of the largest number: a few roundings of bfloat16


class KernelPackage(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def module(self) -> str: ...


Package = TypeVar("Package", bound=KernelPackage)


def choose_package(packages: Iterable[Package], use: str, find_fault: Callable[[Package], str | None]) -> Package | None:
    """Return the first installed package whose kernel is right on this GPU, and warn of those before it that are wrong."""
    for package in packages:
        if is_missing(package.module):
            continue
        with torch.inference_mode(False), torch.enable_grad():  # an engine may be the first to use it
            fault = find_fault(package)
        if fault is None:
            return package
        log.warning("%s is installed, but not used for %s on this GPU: %s", package.name, use, fault)
    return None


def is_missing(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return module.startswith(error.name or "?")  # it, or the package that would contain it
    except Exception:  # installed and broken: the comparison describes it
        return False
    return False


def compare(kernel: Callable[[], Sequence[Tensor]], plain: Callable[[], Sequence[Tensor]], names: Sequence[str]) -> str | None:
    """Return the error of a kernel, or which of its results differs from the plain one. None if it is right."""
    try:
        found = [tensor.float() for tensor in kernel()]
    except Exception as error:  # compilers of kernels raise anything
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    for name, own, wanted in zip(names, found, plain(), strict=True):
        if own.shape != wanted.shape:
            return f"its {name} has the shape {tuple(own.shape)} and not {tuple(wanted.shape)}"
        difference = float((own - wanted).abs().max() / wanted.abs().max())
        if not difference < LARGEST_DIFFERENCE:
            return f"its {name}, or the gradient of it, differs by {difference:.2g} of the largest number"
    return None
