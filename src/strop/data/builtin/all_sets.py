"""Every built-in data set by name, those of extensions (``strop.datasets``: a mapping of names to sets) too."""

from __future__ import annotations

from collections.abc import Mapping

from strop import plugins
from strop.data.builtin.builtin_dataset import BuiltinDataset
from strop.data.builtin.choice_sets import CHOICE_SETS
from strop.data.builtin.image_sets import IMAGE_SETS
from strop.data.builtin.instruction_sets import INSTRUCTION_SETS
from strop.data.builtin.math_evaluation_sets import MATH_EVALUATION_SETS
from strop.data.builtin.math_training_sets import MATH_TRAINING_SETS
from strop.data.builtin.recorded_sets import RECORDED_SETS

BUILTIN_DATASETS: Mapping[str, BuiltinDataset] = {
    **MATH_TRAINING_SETS,
    **MATH_EVALUATION_SETS,
    **CHOICE_SETS,
    **RECORDED_SETS,
    **INSTRUCTION_SETS,
    **IMAGE_SETS,
    **{name: each for group in plugins.declared("datasets") for name, each in plugins.load("datasets", group).items()},
}
