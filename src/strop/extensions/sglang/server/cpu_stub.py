"""What SGLang lacks on a machine without a GPU, and how Strop gets round it. Refused where there is one.

SGLang's wheel imports two libraries that are built for CUDA. Of ``sgl_kernel`` it needs names at import, not the kernels: with its plain
torch backends none of them runs, and one that did would say so. Of ``torchvision`` it needs the Python part, whose import registers
shapes of operators that the missing library would have declared.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

CPU_VARIABLE = "STROP_SGLANG_CPU"  # set in the processes of an engine on a CPU
CPU_ENVIRONMENT = {CPU_VARIABLE: "1", "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ENABLE_TORCH_COMPILE": "0"}
KERNELS = "sgl_kernel"
KERNELS_VERSION = "99.0.0"  # newer than any that SGLang asks for
PINNING_MODULES = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")
TWO_BOXES = ("nms", "qnms")
OPERATORS = (
    "roi_align", "_roi_align_backward", "ps_roi_align", "_ps_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_pool",
    "_ps_roi_pool_backward", "qroi_align", "deform_conv2d", "_deform_conv2d_backward",
)  # fmt: skip


def install_cpu_stub() -> None:
    """Put stand-ins for what cannot be loaded in the way of its import. Does nothing unless this process belongs to an engine on a CPU.

    Raises RuntimeError where CUDA is available: the real kernels must be used there.
    """
    if os.environ.get(CPU_VARIABLE) != "1":
        return
    import torch

    if torch.cuda.is_available():
        raise RuntimeError(
            "this process was told to run SGLang on a CPU, without its kernels, but there is a GPU; hide it (CUDA_VISIBLE_DEVICES=) or "
            "leave policy.device at auto"
        )
    if not any(isinstance(finder, KernelStubFinder | TorchvisionHook) for finder in sys.meta_path):
        sys.meta_path[:0] = [KernelStubFinder(), TorchvisionHook()]


def use_unpinned_memory() -> None:
    """Let SGLang's LoRA layers ask for pinned memory where there is none. Does nothing in a process that is not of an engine on a CPU."""
    if os.environ.get(CPU_VARIABLE) != "1":
        return
    import torch

    torch.Tensor.pin_memory = lambda tensor, *device: tensor  # type: ignore[assignment,misc]
    for name in PINNING_MODULES:
        importlib.import_module(name).__dict__["torch"] = UnpinnedTorch()


class UnpinnedTorch:
    """Stands for torch in a module that pins memory."""

    def __getattr__(self, name: str) -> Any:
        import torch

        function = getattr(torch, name)
        return partial(_call_unpinned, function) if name in ("tensor", "zeros") else function


def _call_unpinned(function: Any, *arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
    return function(*arguments, **named)


class _MissingKernel:
    """Stands for a function, a class or a constant of the kernels. It may be named and looked into, but not called."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(
            f"{self.name} is a CUDA kernel of SGLang, and this engine runs on a CPU without it; set "
            "policy.generation.sglang_kwargs back to their defaults, or policy.generation.backend to torch or vllm"
        )

    def __getattr__(self, name: str) -> _MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _MissingKernel(f"{self.name}.{name}")


class KernelStubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``sgl_kernel`` and every module in it as a module of missing kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != KERNELS and not fullname.startswith(f"{KERNELS}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = KERNELS_VERSION
        module.__dict__["__getattr__"] = lambda name: _missing_in(module.__name__, name)


def _missing_in(module: str, name: str) -> _MissingKernel:
    if name.startswith("__"):
        raise AttributeError(name)
    return _MissingKernel(f"{module}.{name}")


class TorchvisionHook(importlib.abc.MetaPathFinder):
    """Declares torchvision's operators before its first import."""

    library: Any = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")  # kept: its declarations end with it
            for name in TWO_BOXES:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            for name in OPERATORS:
                self.library.define(f"{name}(Tensor boxes) -> Tensor")
