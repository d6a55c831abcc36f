"""Router replay on a GPU: captured graphs record what the model chooses, and vLLM's model runner V2 says it too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.gpus import KIND
from strop.models.network import Network
from strop.models.routing.recorded_experts import RecordedRoutes, take_replay_counts
from strop.models.routing.router_config import ROUTES
from strop.sampling import Sampling
from support.every_family import build as build_family
from support.models import VOCABULARY, build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.tokenizer import END
from support.torch_engine import Request, make_engine, make_paged_runner, make_runner, run_requests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

DEVICE = torch.device(KIND, 0)


def agreement(network: Network, tokens: list[int], routes: Tensor) -> float:
    """The share of (token, layer) pairs whose recorded set of experts is that of one pass of the model."""
    assert network.routed is not None
    own = RecordedRoutes(network.routed)
    network.use_native_attention()
    with torch.no_grad(), network.autocast():
        network.decoder(input_ids=torch.tensor([tokens], device=DEVICE), use_cache=False, routes=own)
    network.use_plan_attention()
    return float((own.stack().cpu().sort(-1).values == routes.sort(-1).values).all(-1).double().mean())


@pytest.mark.parametrize("graphs", [False, True])
def test_captured_graphs_record_the_experts_of_every_token(graphs: bool) -> None:
    network = Network(build("qwen3_moe").to(DEVICE))
    network.enable_router_replay()
    requests = [Request([5 + place, 40, 200, 31], Sampling(max_new_tokens=5 + place), seed=place) for place in range(5)]
    completions = run_requests(make_engine(make_runner(network, slots=3, cuda_graphs=graphs)), requests)
    for request, completion in zip(requests, completions, strict=True):
        assert agreement(network, [*request.prompt, *completion.tokens.tolist()][:-1], completion.columns[ROUTES]) > 0.95


@pytest.mark.parametrize("make", [make_runner, make_paged_runner])
def test_indexers_choose_for_the_engine_what_they_choose_for_the_learner(make: Callable[..., Any]) -> None:
    network = Network(build_family("glm_moe_dsa").to(DEVICE))
    network.enable_indexer_replay(64)
    sampling = Sampling(max_new_tokens=12)
    requests = [Request([5 + place, 40, 200, 31], sampling, seed=place) for place in range(5)]
    completions = run_requests(make_engine(make(network, length=64, slots=3)), requests)
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    batch = pack_grpo([make_group(rollout, index=place) for place, rollout in enumerate(rollouts)])
    scores = network.outputs(batch, sampling).logprobs
    (-scores.sum()).backward()
    assert float((scores.detach().cpu() - batch.rollout_logprobs).abs().max()) < 1e-3
    (counts,) = take_replay_counts(network).values()
    assert counts[1] > 0 and counts[0] < 0.05 * counts[1]


def test_vllm_says_the_experts_of_prompts_and_completions(tmp_path: Path, tokenizer: Any) -> None:
    from support.needs import needs_vllm

    needs_vllm()
    from dataclasses import replace

    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from strop.generation.vllm.vllm_engine import VllmEngine
    from support.vllm_engines import BackgroundLoop, make_launch, save_model_folder, serve

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=END,
        pad_token_id=0,
        initializer_range=0.08,
    )
    model = Qwen3MoeForCausalLM(config).eval().to(DEVICE)
    launch = replace(make_launch(save_model_folder(model, tokenizer, tmp_path), on_cpu=False), return_routes=True)
    network = Network(model)
    network.enable_router_replay()
    engine, room = VllmEngine("engine 0", launch, tokenizer, stop_ids=(END,)), BackgroundLoop()
    served = serve(model, tokenizer, [engine], separate_devices=False, tolerance=0.02)
    try:
        room.run(served.weights.publish(0), 600)
        prompt = list(range(40, 60))
        for seed in range(2):  # the second finds its prompt in the prefix cache
            completion = room.run(engine.generate(prompt, sampling=Sampling(max_new_tokens=12), seed=seed))
            assert agreement(network, [*prompt, *completion.tokens.tolist()][:-1], completion.columns[ROUTES]) > 0.9
    finally:
        room.run(served.close())
        room.close()
