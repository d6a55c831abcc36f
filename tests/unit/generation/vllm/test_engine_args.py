"""Strop's options as vLLM's arguments."""

from __future__ import annotations

from typing import Any

import pytest


def arguments(**changes: Any) -> Any:
    from strop.generation.vllm.engine_args import VllmOptions, make_engine_args

    return make_engine_args(VllmOptions(model="folder", dtype="float32", max_model_len=64, on_cpu=True, **changes))


@pytest.mark.parametrize(("rank", "kernel"), [(1, 1), (2, 8), (12, 16), (16, 16), (200, 256), (512, 512)])
def test_adapters_run_at_the_next_rank_that_there_are_kernels_for(rank: int, kernel: int) -> None:
    assert arguments(max_lora_rank=rank).max_lora_rank == kernel


def test_a_rank_above_all_of_them_is_refused_with_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"lora_cfg\.dim is 513.*adapters_alone=false"):
        arguments(max_lora_rank=513)


def test_a_draft_model_is_loaded_from_where_it_lies_and_cut_as_the_policy_is() -> None:
    given = arguments(
        speculative_config={"method": "draft_model", "model": "draft", "num_speculative_tokens": 2}, tensor_parallel_size=2
    )
    assert given.load_format == "dummy", "the policy is sent its weights"
    assert given.speculative_config["draft_load_config"] == {"load_format": "auto"}
    assert given.speculative_config["draft_tensor_parallel_size"] == 2
    ngram = {"method": "ngram", "num_speculative_tokens": 2}
    assert arguments(speculative_config=ngram).speculative_config == ngram


def test_what_is_strops_to_set_and_what_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set policy\.generation\.vllm_cfg\.speculation"):
        arguments(extra_args={"speculative_config": {}})
    with pytest.raises(ValueError, match="did you mean max_num_seqs"):
        arguments(extra_args={"max_num_seq": 3})
