"""Which GPUs of this process each engine in separate processes has."""

from __future__ import annotations

from strop.generation.generation_config import GenerationConfig
from strop.gpus import describe_visible, visible_gpus


def choose_engine_gpus(config: GenerationConfig, learner: int) -> list[list[str]]:
    """Return the GPUs of each engine of this process, as values of ``CUDA_VISIBLE_DEVICES``: those visible to this process,
    starting with the learner's or, if engines are not colocated, without it. ``learner``: torch's index of the learner's GPU.
    Raises ValueError."""
    options, visible = config.engine_options, visible_gpus()
    size, count = options.engine_size, options.num_local_engines
    own = visible[learner : learner + 1] if config.colocated.enabled else []
    gpus = [*own, *visible[:learner], *visible[learner + 1 :]]
    if size * count > len(gpus):
        beside = "" if config.colocated.enabled else " alongside the learner's"
        share = "" if config.colocated.enabled else ", or set policy.generation.colocated.enabled=true to share the learner's"
        raise ValueError(
            f"{_count(count, f'{config.engine_name} engine')} of {_count(size, 'GPU')} "
            f"(policy.generation.{config.engine_key}.num_engines, {options.size_key}) need "
            f"{_count(size * count, 'GPU')}{beside}, and this process sees {describe_visible()}; lower one of the two, let more GPUs be "
            f"seen{share}"
        )
    return [gpus[first : first + size] for first in range(0, size * count, size)]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
