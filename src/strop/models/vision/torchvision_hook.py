"""Makes torchvision importable for Transformers and vLLM when its compiled library cannot be loaded.

PyPI's torchvision is built for CUDA. With a CPU build of torch its library does not load, and its import fails at (detection)
operators that the library would have registered; everything that imports torchvision fails too, including most of Transformers.
Registering them here without an implementation lets the import succeed. Strop's own image code does not need torchvision; vLLM's
processors do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    **dict.fromkeys(
        (
            "qnms",
            "roi_align",
            "_roi_align_backward",
            "ps_roi_align",
            "_ps_roi_align_backward",
            "roi_pool",
            "_roi_pool_backward",
            "ps_roi_pool",
            "_ps_roi_pool_backward",
            "qroi_align",
            "deform_conv2d",
            "_deform_conv2d_backward",
        ),
        "(Tensor input) -> Tensor",
    ),
}
_libraries: list[object] = []  # a library's registrations live as long as this object


class _BeforeTorchvision(MetaPathFinder):
    """Registers the operators when torchvision is first imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if is_for_another_torch():
                _name_operators()
        return None


def install_hook() -> None:
    """Register torchvision's operators on import, if its library cannot be loaded. Has no cost before."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path) and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorchvision())


def is_for_another_torch() -> bool:
    """Whether the installed torchvision is built for CUDA while torch is for CPUs."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    hidden = [finder for finder in sys.meta_path if isinstance(finder, _BeforeTorchvision)]
    for finder in hidden:  # otherwise the lookup would count as importing it
        sys.meta_path.remove(finder)
    spec = find_spec("torchvision") if "torchvision" not in sys.modules else sys.modules["torchvision"].__spec__
    sys.meta_path[:0] = hidden
    if spec is None or not spec.submodule_search_locations:
        return False
    version = PathFinder.find_spec("version", list(spec.submodule_search_locations))
    return version is not None and version.origin is not None and "+cpu" not in Path(version.origin).read_text()


def _name_operators() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name, signature in OPERATORS.items():
        library.define(f"{name}{signature}")
    _libraries.append(library)
