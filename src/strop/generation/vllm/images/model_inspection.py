"""How vLLM inspects a model's class before it starts an engine."""

from __future__ import annotations

from strop.models.vision.torchvision_hook import is_for_another_torch


def inspect_models_here() -> None:
    """Make vLLM import model classes in this process if torchvision does not match torch, because a fresh process could not
    import them.

    vLLM uses a separate process only to avoid initializing CUDA in this one, and there is no CUDA in this case.
    """
    if is_for_another_torch():
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()
