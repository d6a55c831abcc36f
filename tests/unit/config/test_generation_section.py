"""How the section generation becomes the options of a request."""

from __future__ import annotations

from typing import Any

import pytest

from strop.base_config import fields_of
from strop.generation.generation_config import GenerationConfig
from strop.sampling import MAX_RECORDED_TOP_K, Sampling


def test_keeping_the_sampling_mask_records_in_training_and_not_in_validation() -> None:
    config = GenerationConfig(keep_sampling_mask=True, top_k=512, top_p=0.9)
    assert Sampling(**config.sampling_options()).records_sampling_mask
    assert not Sampling(**config.sampling_options(validation=True)).record_sampling_mask
    assert not Sampling(**GenerationConfig(top_k=512, top_p=0.9).sampling_options()).record_sampling_mask


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": -1}])
def test_sets_without_a_bound_on_their_size_are_refused_with_what_to_set(filters: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep_sampling_mask[\s\S]*needs a top_k[\s\S]*set top_k, for instance to 512"):
        GenerationConfig(keep_sampling_mask=True, **filters)
    GenerationConfig(keep_sampling_mask=False, **filters)


def test_without_filters_there_is_nothing_to_keep_and_nothing_to_refuse() -> None:
    assert not Sampling(**GenerationConfig(keep_sampling_mask=True).sampling_options()).records_sampling_mask


def test_the_description_names_the_bound_that_is_enforced() -> None:
    assert f"at most {MAX_RECORDED_TOP_K}" in str(fields_of(GenerationConfig)["keep_sampling_mask"].description)
