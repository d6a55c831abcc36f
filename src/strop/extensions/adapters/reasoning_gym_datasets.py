"""reasoning-gym's data sets from plain values: single tasks, composites, levels of a curriculum."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

COMPOSITE = "composite"  # the package's own name for several data sets as one


def create_reasoning_gym_dataset(task: str, values: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Create a data set as the package does. A composite's ``datasets`` are mappings of name, weight and config."""
    import reasoning_gym  # type: ignore[import-untyped,unused-ignore]
    from reasoning_gym.composite import DatasetSpec  # type: ignore[import-untyped,unused-ignore]

    if task == COMPOSITE and "datasets" in values:
        values = {**values, "datasets": [DatasetSpec(**{"weight": 1.0, "config": {}, **each}) for each in values["datasets"]]}
    return reasoning_gym.create_dataset(task, **values, seed=seed, size=size)


def options_of_level(task: str, level: int) -> dict[str, Any]:
    """Return the options of a task at a level of its curriculum, 0 the easiest. Raises ValueError if there is none."""
    from reasoning_gym.factory import create_curriculum, has_curriculum  # type: ignore[import-untyped,unused-ignore]

    if not has_curriculum(task):
        raise ValueError(f"the task {task} has no curriculum")
    curriculum = create_curriculum(task)
    highest = max((len(attribute.levels) - 1 for attribute in curriculum.attributes.values()), default=0)
    if not 0 <= level <= highest:
        raise ValueError(f"the curriculum of {task} has the levels 0 to {highest}, and level is {level}")
    curriculum.set_global_level(level)
    config = vars(curriculum.generate_configuration({"seed": 0, "size": 1}))
    return {name: value for name, value in config.items() if name not in ("seed", "size")}


def load_scorer() -> Callable[..., Callable[[], float]]:
    """Return what scores an answer, in a process of ``strop.environments.scoring``."""

    @lru_cache(maxsize=64)
    def dataset(task: str, options: str) -> Any:
        return create_reasoning_gym_dataset(task, json.loads(options), seed=0, size=1)

    def prepare(task: str, options: str, answer: str, entry: dict[str, Any]) -> Callable[[], float]:
        scorer = dataset(task, options)  # before the fork, so that it is created only once
        return lambda: float(scorer.score_answer(answer, entry))

    return prepare
