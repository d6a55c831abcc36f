"""Families of Transformers, with every rotary embedding they take: packed rows, cached decoding and gradients beside Transformers alone."""

from __future__ import annotations

import pytest

from support.every_family import CASES, FAMILIES, compare
from support.sweep import sweep

# Relative to the largest number, in float32. What is left is the order of additions, measured 6e-7 at most; of gradients 2e-6.
FLOAT32, GRADIENT, BFLOAT16 = 1e-6, 4e-6, 0.03
NAMES = {f"{name} {scaling}": (name, scaling) for name, scaling in CASES}
# Those that once crashed, and one of each kind of layer or rotary embedding.
KEPT = (
    "bloom default",
    "falcon default",
    "llama4 default",
    "phi3 longrope",
    "gemma3 dynamic",
    "recurrent_gemma default",
    "olmo2 yarn",
)


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(NAMES, *KEPT))
def test_a_family_reads_samples_and_learns_as_transformers_alone(case: str) -> None:
    found = compare(*NAMES[case])
    assert found.scores < FLOAT32 and found.loss < FLOAT32, found
    assert found.gradient < GRADIENT, found
    assert all(each is None or each < FLOAT32 for each in (found.slots, found.pages)), found
    assert found.bfloat16 is None or found.bfloat16 < BFLOAT16, found


def test_families_that_crashed_once_are_there_with_every_rotary_embedding() -> None:
    assert {"bloom", "falcon", "llama4", "phi3"} <= FAMILIES.keys() and len(FAMILIES) >= 38
    assert {scaling for _, scaling in CASES} == {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}
