"""Which GPUs of this process each vLLM engine has."""

from __future__ import annotations

from strop.generation.generation_config import GenerationConfig
from strop.gpus import describe_visible, visible_gpus


def choose_engine_gpus(config: GenerationConfig, learner: int) -> list[list[str]]:
    """Return the GPUs of each engine of this process, as ``CUDA_VISIBLE_DEVICES`` names them: those that this process sees, beginning with
    the learner's or, where engines are not colocated, without it. ``learner``: torch's index of the learner's GPU. Raises ValueError."""
    options, visible = config.vllm_cfg, visible_gpus()
    size, count = options.tensor_parallel_size * options.pipeline_parallel_size, options.num_local_engines
    own = visible[learner : learner + 1] if config.colocated.enabled else []
    gpus = [*own, *visible[:learner], *visible[learner + 1 :]]
    if size * count > len(gpus):
        beside = "" if config.colocated.enabled else " beside the learner's"
        raise ValueError(
            f"{count} vLLM engine{'s' if count > 1 else ''} of {size} GPU{'s' if size > 1 else ''} (policy.generation.vllm_cfg.num_engines, "
            f"tensor_parallel_size) need {size * count} GPU{'s' if size * count > 1 else ''}{beside}, and this process sees "
            f"{describe_visible()}; lower one of the two, let more GPUs be seen"
            + ("" if config.colocated.enabled else ", or set policy.generation.colocated.enabled=true to share the learner's")
        )
    return [gpus[first : first + size] for first in range(0, size * count, size)]
