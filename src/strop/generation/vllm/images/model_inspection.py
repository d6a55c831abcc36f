"""How vLLM looks at the class of a model before it starts an engine."""

from __future__ import annotations

from strop.models.vision.torchvision_hook import is_for_another_torch


def inspect_models_here() -> None:
    """Let vLLM import model classes in this process where torchvision does not fit torch: a fresh one could not import it.

    vLLM does it in a process of its own so as not to initialize CUDA in this one, and there is none then.
    """
    if is_for_another_torch():
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda function: function()
