"""What happens when Transformers is imported: torchvision without images, and no messages of torchao."""

from __future__ import annotations

import logging
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


# Import messages of torchao (imported by Transformers) that are meaningless without its GPU libraries.

# Loggers, and parts of their messages: CUDA libraries do not load on a CPU, and torch warns of enums registered by torchao.
MESSAGES = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}


class MessageFilter(logging.Filter):
    """Drops messages that contain a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in str(record.msg)


def hide_import_messages() -> None:
    """Hide these messages: they do not concern a run without FP8, and a run with FP8 checks its requirements itself."""
    for name, text in MESSAGES.items():
        logging.getLogger(name).addFilter(MessageFilter(text))
