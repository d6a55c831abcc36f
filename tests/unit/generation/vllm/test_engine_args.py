"""Strop's options as vLLM's arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loop.tiny import build_tiny
from strop.generation.engine_launch import LaunchedAdapters, NodeRanks
from strop.generation.generation_config import GenerationConfig
from strop.generation.vllm.engine_args import select_ranks
from strop.generation.vllm.vllm_config import SpeculationConfig, VllmConfig


def arguments(
    *,
    max_lora_rank: int | None = None,
    on_cpu: bool = True,
    return_routes: bool = False,
    sampling: dict[str, Any] | None = None,
    **keys: Any,
) -> Any:
    from strop.generation.vllm.engine_args import VllmLaunch, make_engine_args

    config = GenerationConfig(vllm_cfg=VllmConfig(precision="float32", max_model_len=64, **keys), **(sampling or {}))
    launch = VllmLaunch(
        config=config,
        model="folder",
        on_cpu=on_cpu,
        adapters=None if max_lora_rank is None else LaunchedAdapters(max_lora_rank),
        return_routes=return_routes,
    )
    return make_engine_args(launch)


@pytest.mark.parametrize(("rank", "kernel"), [(1, 1), (2, 8), (12, 16), (16, 16), (200, 256), (512, 512)])
def test_adapters_run_at_the_next_rank_that_there_are_kernels_for(rank: int, kernel: int) -> None:
    assert arguments(max_lora_rank=rank).max_lora_rank == kernel


def test_a_rank_above_all_of_them_is_refused_with_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"lora_cfg\.dim is 513.*adapters_alone=false"):
        arguments(max_lora_rank=513)


def test_a_draft_model_is_loaded_from_where_it_lies_and_cut_as_the_policy_is() -> None:
    given = arguments(speculation=SpeculationConfig(method="draft_model", model_name="small"), tensor_parallel_size=2)
    assert given.load_format == "dummy", "the policy is sent its weights"
    assert given.speculative_config == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "small",
        "draft_load_config": {"load_format": "auto"},
        "draft_tensor_parallel_size": 2,
    }


def test_speculation_is_said_in_vllm_s_words() -> None:
    assert arguments().speculative_config is None
    assert arguments(speculation=SpeculationConfig(method="ngram", num_speculative_tokens=3)).speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }


def test_as_many_log_probabilities_are_allowed_as_a_sampling_mask_records() -> None:
    assert arguments(sampling={"top_k": 64}).max_logprobs == 20
    assert arguments(sampling={"top_k": 64, "keep_sampling_mask": True}).max_logprobs == 64


def test_an_engine_on_several_nodes_tells_its_executor_where_its_ranks_are(tmp_path: Path) -> None:
    from strop.generation.vllm.engine_args import SPANNED_VARIABLE, VllmLaunch

    config = GenerationConfig(vllm_cfg=VllmConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    launch = VllmLaunch(config=config, model="folder", on_cpu=False, output_file=tmp_path / "engine_0.log")
    assert SPANNED_VARIABLE not in launch.env_vars and launch.shared_folder is None
    nodes = (NodeRanks("a", 2, ("2", "3")), NodeRanks("b", 2, ("0", "1")))
    spanning = replace(launch, nodes=nodes, ray_address="10.0.0.1:6379", environment={"NCCL_DEBUG": "INFO"})
    told = json.loads(spanning.env_vars[SPANNED_VARIABLE])
    assert told["nodes"] == [{"node": "a", "count": 2, "gpus": ["2", "3"]}, {"node": "b", "count": 2, "gpus": ["0", "1"]}]
    assert told["address"] == "10.0.0.1:6379" and "NCCL_DEBUG" in told["variables"] and spanning.receivers == 4
    assert spanning.shared_folder == tmp_path, "the files of adapters are read on every node"


def test_an_engine_under_adapters_keeps_its_base_weights_when_it_sleeps_and_one_on_a_cpu_frees_nothing() -> None:
    from strop.generation.vllm.engine_args import VllmLaunch

    def level(**changes: Any) -> int:
        return VllmLaunch(**{"config": GenerationConfig(), "model": "folder", "on_cpu": False, **changes}).sleep_level

    assert (level(), level(adapters=LaunchedAdapters(8)), level(on_cpu=True)) == (2, 1, 0)
    off = GenerationConfig(vllm_cfg=VllmConfig(sleep_level=0))
    assert level(config=off, adapters=LaunchedAdapters(8)) == 0


def test_what_is_strops_to_set_and_what_vllm_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"set policy\.generation\.vllm_cfg\.speculation"):
        arguments(sampling={"vllm_kwargs": {"speculative_config": {}}})
    with pytest.raises(ValueError, match="did you mean max_num_seqs"):
        arguments(sampling={"vllm_kwargs": {"max_num_seq": 3}})


def test_experts_of_tokens_are_asked_for_with_the_prefix_cache_and_refused_on_a_cpu() -> None:
    given = arguments(return_routes=True, on_cpu=False, enable_prefix_caching=False)
    assert given.enable_return_routed_experts and given.enable_prefix_caching
    assert not arguments().enable_return_routed_experts
    with pytest.raises(
        ValueError, match=r"policy.router_replay.enabled is true, but vLLM .* set policy.generation.backend=torch"
    ):
        arguments(return_routes=True)


def test_experts_that_vllm_says_are_those_of_the_tokens_it_read() -> None:
    import numpy as np

    from strop.generation.vllm.requests import _experts
    from strop.models.routing.router_config import ROUTES

    said = np.arange(24, dtype=np.uint8).reshape(6, 2, 2)
    whole, short = _experts(said, 6)[ROUTES], _experts(said[:4], 6)[ROUTES]
    assert whole.tolist() == said.tolist() and _experts(said, 5)[ROUTES].tolist() == said[:5].tolist()
    assert short[:4].tolist() == said[:4].tolist() and bool((short[4:] == -1).all()), "the rest is not known"
    assert not _experts(None, 6) and _experts(said + 200, 6)[ROUTES].max() == 223


def test_copies_of_a_model_are_vllms_data_parallel_ranks() -> None:
    given = arguments(tensor_parallel_size=2, expert_parallel_size=8)
    assert (given.data_parallel_size, given.enable_expert_parallel) == (4, True)
    config = VllmConfig(tensor_parallel_size=2, expert_parallel_size=8, pipeline_parallel_size=3)
    assert config.engine_size == 24
    assert VllmConfig(tensor_parallel_size=4).data_parallel_size == 1
    assert arguments(tensor_parallel_size=2, expert_parallel_size=2).data_parallel_size == 1


def test_the_ranks_of_a_copy_are_found_on_the_nodes_of_an_engine() -> None:
    nodes = [NodeRanks("a", 4, ("0", "1", "2", "3")), NodeRanks("b", 4, ("0", "1", "2", "3"))]
    assert select_ranks(nodes, 4, 4) == [nodes[1]]
    assert select_ranks(nodes, 2, 4) == [NodeRanks("a", 2, ("2", "3")), NodeRanks("b", 2, ("0", "1"))]
    assert select_ranks(nodes, 0, 8) == nodes


def test_heads_that_vllm_has_no_kernel_for_on_a_cpu_are_refused_before_an_engine_starts(tmp_path: Path) -> None:
    from strop.generation.vllm.engine_args import check_cpu_attention

    check_cpu_attention(replace(arguments(), model=str(build_tiny(tmp_path / "fits", head_dim=32))))
    model = str(build_tiny(tmp_path / "tiny"))
    with pytest.raises(ValueError, match=r"head sizes 32, 64, .* has 8; set policy\.generation\.backend=torch"):
        check_cpu_attention(replace(arguments(), model=model))
