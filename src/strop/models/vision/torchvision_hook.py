"""torchvision where its compiled library cannot be loaded, so that Transformers and vLLM can import it.

PyPI's torchvision is built for CUDA. Beside a torch for CPUs its library does not load, and its import fails at operators (for detection)
that the library would have named; with it fails what imports it: most of Transformers, where torchvision is installed. Named here, without
code behind them, they let the rest be imported. Strop's own images need no torchvision; vLLM's processors do.
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
_libraries: list[object] = []  # a library's names last as long as it


class _BeforeTorchvision(MetaPathFinder):
    """Names the operators when torchvision is first imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if is_for_another_torch():
                _name_operators()
        return None


def install_hook() -> None:
    """Name torchvision's operators when it is imported, if its library cannot be loaded. Costs nothing before."""
    if not any(isinstance(finder, _BeforeTorchvision) for finder in sys.meta_path) and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _BeforeTorchvision())


def is_for_another_torch() -> bool:
    """Whether torchvision is installed and built for CUDA, and torch is for CPUs."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    hidden = [finder for finder in sys.meta_path if isinstance(finder, _BeforeTorchvision)]
    for finder in hidden:  # or looking for it would count as importing it
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
