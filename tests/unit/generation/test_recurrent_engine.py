"""Models whose layers carry states from token to token, sampled by the embedded engine from the states that it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from strop.generation.base import Completion
from strop.generation.torch.model_runner import ModelRunner, RecomputeRunner
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.sampling import Sampling
from support.every_family import build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.torch_engine import Request, make_engine, make_paged_runner, make_runner, run_requests, token_lists

FAMILIES = (
    "qwen3_5", "qwen3_next", "olmo_hybrid", "nemotron_h", "falcon_h1", "granite_hybrid", "bamba", "lfm2", "jamba", "mamba2"
)  # fmt: skip
PROMPTS = ([5, 40, 60, 5, 40, 60, 7, 9, 5, 40, 60], [17, 300], [5, 40, 60, 5, 40, 60, 7, 9, 11] * 3, [8])
SAMPLED = Sampling(max_new_tokens=12, temperature=0.7)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


def build_network(family: str) -> Network:
    """A delta rule amplifies the rounding of large weights."""
    model: nn.Module = build(family)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.5)
    return Network(model)


REQUESTS = [
    Request(prompt, sampling, seed)
    for sampling in (SAMPLED, GREEDY)
    for seed, prompt in enumerate((*PROMPTS, PROMPTS[0], PROMPTS[0], PROMPTS[2]))
]


def compute_again(network: Network, requests: Sequence[Request]) -> list[Completion]:
    """What the runner samples that holds nothing."""
    return run_requests(make_engine(RecomputeRunner(network, max_slots=3, length=48)), requests)


def learner_error(network: Network, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """The largest difference between log-probabilities of engine and learner."""
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    batch = pack_grpo([make_group(each, index=place) for place, each in enumerate(rollouts)])
    scores = NetworkScorer(network, requests[0].sampling, score_tokens=64).score(batch)
    return float((scores.logprobs - batch.rollout_logprobs).abs().max())


def make_slots(network: Network, **options: Any) -> ModelRunner:
    return make_runner(network, **{"slots": 3, **options})


def make_pages(network: Network, **options: Any) -> ModelRunner:
    return make_paged_runner(network, **{"slots": 3, "page": 8, **options})


@pytest.mark.parametrize("make", [make_slots, make_pages])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_samples_what_the_model_computes_for_the_whole_sequence(family: str, make: Callable[..., ModelRunner]) -> None:
    network = build_network(family)
    engine = make_engine(make(network))
    found = run_requests(engine, REQUESTS)
    wanted = compute_again(network, REQUESTS)
    assert token_lists(found) == token_lists(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert engine.counters.prompt_tokens < sum(len(each.prompt) for each in REQUESTS), "shared prompts are read once"
    sampled = [place for place, each in enumerate(REQUESTS) if each.sampling is SAMPLED]
    assert learner_error(network, [REQUESTS[each] for each in sampled], [found[each] for each in sampled]) < 1e-5
