"""torchvision where its compiled library cannot be loaded, so that vLLM's processors of images and videos can be imported.

PyPI's torchvision is built for CUDA. Beside a torch for CPUs its library does not load, and its import fails at operators (for detection)
that the library would have named. Named here, without code behind them, they let the rest be imported. Import this before torchvision;
where the library loads, nothing is changed.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

import torch

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
_libraries: list[torch.library.Library] = []  # a library's names last as long as it


def name_operators() -> bool:
    """Name torchvision's operators if it is installed and its library cannot be loaded. Return whether they were named."""
    if _libraries or find_spec("torchvision") is None or not _is_for_another_torch():
        return False
    library = torch.library.Library("torchvision", "DEF")
    for name, signature in OPERATORS.items():
        library.define(f"{name}{signature}")
    _libraries.append(library)
    return True


def import_models_here() -> None:
    """Let vLLM look at model classes in this process where operators are named here: a fresh one has no names for them."""
    if _libraries:
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()


def _is_for_another_torch() -> bool:
    """Whether torch is for CPUs and torchvision is not."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    spec = find_spec("torchvision")
    assert spec is not None and spec.submodule_search_locations
    version = PathFinder.find_spec("version", list(spec.submodule_search_locations))
    return version is not None and version.origin is not None and "+cpu" not in Path(version.origin).read_text()


name_operators()
