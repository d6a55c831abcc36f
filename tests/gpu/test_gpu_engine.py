"""The engine on a GPU: graphs change nothing, memory keeps its bound, and the learner agrees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strop.generation.torch.model_runner import CachedRunner, infer_cache_shape
from strop.gpus import KIND
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.sampling import Sampling, mix_seed
from support.models import FAMILIES, build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.sweep import sweep
from support.torch_engine import Request, cache_config, make_engine, make_runner, run_requests, token_lists

pytestmark = pytest.mark.gpu

GPU = torch.get_device_module(KIND)

FLOAT32 = 1e-4
BFLOAT16 = 0.15


def requests(count: int = 12) -> list[Request]:
    options = [Sampling(), Sampling(temperature=0.7, top_k=40), Sampling(top_p=0.9), Sampling(temperature=0.0)]
    return [
        Request(
            [(7 * (place % 4) + 3 * step) % 300 + 4 for step in range(1 + 4 * (place % 4))],
            replace(options[place % len(options)], max_new_tokens=1 + 5 * place % 19),
            mix_seed(3, place),
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("family", sweep(FAMILIES, "llama", "gemma2", "gpt_oss"))
def test_graphs_give_the_same_tokens_and_log_probabilities(family: str) -> None:
    network = Network(build(family).to(KIND))
    plain = run_requests(make_engine(make_runner(network, slots=5, cuda_graphs=False)), requests())
    graphs = run_requests(make_engine(make_runner(network, slots=5, cuda_graphs=True)), requests())
    assert token_lists(graphs) == token_lists(plain)
    for left, right in zip(graphs, plain, strict=True):
        assert torch.allclose(left.logprobs, right.logprobs, atol=FLOAT32)


def test_graphs_follow_new_weights() -> None:
    """A recorded graph reads the memory of weights or of their copies: both are refreshed in place."""
    for precision in (torch.float32, torch.bfloat16):
        network = Network(build("llama").to(KIND), precision=precision)
        runner = make_runner(network, slots=5, cuda_graphs=True)
        before = run_requests(make_engine(runner), requests())
        with torch.no_grad():
            for parameter in network.model.parameters():
                parameter.mul_(1.3)
        after = run_requests(make_engine(runner), requests())
        fresh = run_requests(make_engine(make_runner(network, slots=5, cuda_graphs=False)), requests())
        assert token_lists(after) != token_lists(before)
        assert token_lists(after) == token_lists(fresh), precision


def test_slots_and_neighbours_do_not_matter_on_the_gpu() -> None:
    network = Network(build("llama").to(KIND))
    wanted = [run_requests(make_engine(make_runner(network, slots=1)), [request])[0] for request in requests()]
    for slots in (2, 12):
        assert token_lists(run_requests(make_engine(make_runner(network, slots=slots)), requests())) == token_lists(wanted)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_sampler_and_learner_agree_on_the_gpu(precision: torch.dtype, cuda_graphs: bool) -> None:
    network = Network(build("mistral").to(KIND), precision=precision)
    sampling = Sampling(max_new_tokens=20, temperature=0.8)
    asked = [Request([5, 40, 200, 31, 7, 7, 90], sampling, seed) for seed in range(6)]
    found = run_requests(make_engine(make_runner(network, cuda_graphs=cuda_graphs)), asked)
    batch = pack_grpo(
        [make_group(*(make_rollout(request.prompt, make_turn(done)) for request, done in zip(asked, found, strict=True)))]
    )
    scores = NetworkScorer(network, sampling, score_tokens=60).score(batch)
    bound = FLOAT32 if precision == torch.float32 else BFLOAT16
    assert float((scores.logprobs - batch.rollout_logprobs).abs().max()) < bound


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_the_cache_takes_the_configured_memory_and_generating_no_more_than_a_little(cuda_graphs: bool) -> None:
    network = Network(build("llama").to(KIND))
    memory = 32 * 2**20
    length = memory // infer_cache_shape(network).bytes_per_token // 8  # eight slots fill it
    GPU.synchronize()
    before = GPU.memory_allocated()
    runner = CachedRunner(network, cache_config(memory, slots=64, cuda_graphs=cuda_graphs), length=length)
    assert runner.slots == 8
    assert GPU.memory_allocated() - before <= memory + 2**20
    GPU.reset_peak_memory_stats()
    run_requests(make_engine(runner), requests(30))
    held = sum(entry.keys.nbytes + entry.values.nbytes for entry in runner.prefixes._entries.values())
    assert runner.cache.keys.nbytes + runner.cache.values.nbytes + held <= memory
    # Besides the cache: activations of small batches, and what graphs and libraries keep.
    assert GPU.max_memory_allocated() - before < memory + 64 * 2**20


def test_draws_on_the_gpu_are_those_on_the_cpu() -> None:
    from strop.generation.torch.sampler import sample_tokens
    from strop.sampling import uniform

    logits = 2 * torch.randn(500, 1000, generator=torch.Generator().manual_seed(0))
    numbers = [uniform(1, row) for row in range(500)]
    for sampling in (Sampling(entropy=True), Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, entropy=True)):
        cpu = sample_tokens(logits, [sampling] * 500, numbers)
        gpu = sample_tokens(logits.to(KIND), [sampling] * 500, numbers)
        same = cpu.tokens == gpu.tokens.cpu()
        assert float(same.float().mean()) > 0.99, "a number may fall on the boundary between two tokens"
        assert torch.allclose(cpu.logprobs[same], gpu.logprobs.cpu()[same], atol=1e-5)
        assert torch.allclose(cpu.entropies, gpu.entropies.cpu(), atol=1e-4)
