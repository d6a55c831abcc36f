"""Running sums in code that computes on the device of a model."""

from __future__ import annotations

import re
from pathlib import Path

from strop import determinism

OF_EXTENSIONS = ("extensions/recorded", "extensions/distillation", "extensions/policy_gradients")


def test_no_running_sum_of_floats_is_left_that_torch_would_refuse() -> None:
    """In code that computes on the device of a model; integers and CPU tensors are summed as ever."""
    source = Path(determinism.__file__).parent
    integers = (
        "image_tokens",
        "model_runner",
        "paged_runner",
        "recorded_scores",
        "draft_trainer",
        "exact_passes",
        "referenced",
        "indexers",
    )
    on_the_cpu = ("kl", "turns", "token_objectives", "baselines")  # columns of whole steps
    files = [source / "sampling.py"]
    for folder in ("generation/torch", "learner", "models", "algorithms", "extensions/labs", *OF_EXTENSIONS):
        files += (source / folder).rglob("*.py")
    assert {path.stem for path in files if re.search(r"\.cum(sum|prod)\(", path.read_text())} == {*integers, *on_the_cpu}
