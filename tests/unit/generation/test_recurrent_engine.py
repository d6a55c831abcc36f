"""Models whose layers carry states from token to token, sampled by the embedded engine from the states that it holds.

DeepSeek V3 carries none: as in Kimi Linear's layers with attention, its keys and values differ in size. Of those with an indexer, its keys
are held too, and it chooses among them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from strop.generation.base import Completion
from strop.generation.torch.model_runner import CachedRunner, ModelRunner, RecomputeRunner, infer_cache_shape
from strop.generation.torch.paged.paged_cache import PagePool, PrefixTree
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.speculation import DraftedRequest
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.sampling import Sampling
from support.every_family import build
from support.rollouts import make_group, make_rollout, make_turn, pack_grpo
from support.sweep import sweep, sweep_rows
from support.torch_engine import Request, cache_config, make_engine, make_paged_runner, make_runner, run_requests, token_lists

FAMILIES = (
    "qwen3_5", "qwen3_next", "olmo_hybrid", "nemotron_h", "falcon_h1", "granite_hybrid", "bamba", "lfm2", "jamba", "mamba2",
    "kimi_linear", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2",
)  # fmt: skip
OPTIONS = {"kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2}}
PROMPTS = ([5, 40, 60, 5, 40, 60, 7, 9, 5, 40, 60], [17, 300], [5, 40, 60, 5, 40, 60, 7, 9, 11] * 3, [8])
SAMPLED = Sampling(max_new_tokens=12, temperature=0.7)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


def build_network(family: str) -> Network:
    """A delta rule amplifies the rounding of large weights."""
    model: nn.Module = build(family, **OPTIONS.get(family, {}))
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
    return run_requests(make_engine(RecomputeRunner(network, max_slots=3, length=64)), requests)


def assert_same(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    assert token_lists(found) == token_lists(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)


def learner_error(network: Network, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """The largest difference between log-probabilities of engine and learner."""
    rollouts = [make_rollout(request.prompt, make_turn(found)) for request, found in zip(requests, completions, strict=True)]
    batch = pack_grpo([make_group(each, index=place) for place, each in enumerate(rollouts)])
    scores = NetworkScorer(network, requests[0].sampling, score_tokens=64).score(batch)
    return float((scores.logprobs - batch.rollout_logprobs).abs().max())


def make_slots(network: Network, **options: Any) -> CachedRunner:
    return make_runner(network, **{"slots": 3, **options})


def make_pages(network: Network, **options: Any) -> PagedRunner:
    return make_paged_runner(network, **{"slots": 3, "page": 8, **options})


@pytest.mark.parametrize(
    ("family", "make"),
    sweep_rows(product(FAMILIES, [make_slots, make_pages]), ("qwen3_5", make_slots), ("nemotron_h", make_pages)),
)
def test_the_engine_samples_what_the_model_computes_for_the_whole_sequence(family: str, make: Callable[..., ModelRunner]) -> None:
    network = build_network(family)
    engine = make_engine(make(network))
    found = run_requests(engine, REQUESTS)
    assert_same(found, compute_again(network, REQUESTS))
    assert engine.counters.prompt_tokens < sum(len(each.prompt) for each in REQUESTS), "shared prompts are read once"
    sampled = [place for place, each in enumerate(REQUESTS) if each.sampling is SAMPLED]
    assert learner_error(network, [REQUESTS[each] for each in sampled], [found[each] for each in sampled]) < 1e-5


class Foreseeing:
    """Proposes the tokens that will be sampled, some of them changed, and sometimes none."""

    count = 4
    rejection = False

    def __init__(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        self.tokens = {
            (tuple(request.prompt), request.seed): found.tokens.tolist()
            for request, found in zip(requests, completions, strict=True)
        }

    def propose(self, running: Sequence[DraftedRequest], limits: Sequence[int]) -> list[list[int]]:
        return [self._propose(each, limit) for each, limit in zip(running, limits, strict=True)]

    def _propose(self, request: DraftedRequest, limit: int) -> list[int]:
        begun = len(request.tokens)
        draft: list[int] = self.tokens[request.prompt, request.seed][begun : begun + min(limit, (begun + request.seed) % 5)]
        return [token + 1 if (begun + place) % 7 == 3 else token for place, token in enumerate(draft)]

    def verify(self, *_: Any) -> dict[int, tuple[int, float]]:
        return {}

    def forget(self, request: DraftedRequest) -> None:
        pass

    def forget_all(self) -> None:
        pass


@pytest.mark.parametrize("family", sweep([each for each in FAMILIES if each != "mamba2"], "qwen3_5"))
def test_drafts_that_turn_out_wrong_leave_no_trace(family: str) -> None:
    network = build_network(family)
    sampling = Sampling(max_new_tokens=20, temperature=0.7)
    requests = [Request(prompt, sampling, seed) for seed, prompt in enumerate((*PROMPTS, PROMPTS[0]))]
    wanted = compute_again(network, requests)
    engine = make_engine(make_pages(network, length=64), drafter=Foreseeing(requests, wanted))
    found = run_requests(engine, requests)
    assert_same(found, wanted)
    assert 0 < engine.counters.accepted_tokens < engine.counters.drafted_tokens
    assert learner_error(network, requests, found) < 1e-5


@pytest.mark.parametrize("drafts", sweep([False, True], True))
def test_long_prompts_read_in_parts_and_preempted_requests_go_on_from_held_states(drafts: bool) -> None:
    network = build_network("qwen3_5")
    requests = [Request(list(range(3 + seed, 43)), Sampling(max_new_tokens=16, temperature=0.7), seed) for seed in range(6)]
    wanted = compute_again(network, requests)
    runner = make_pages(network, length=64, slots=4)
    del runner.cache.pool.free[11:]
    drafter = Foreseeing(requests, wanted) if drafts else None
    engine = make_engine(runner, prefill_tokens=8, drafter=drafter)
    found = run_requests(engine, requests)
    assert engine.counters.preemptions > 0
    assert_same(found, wanted)


@pytest.mark.parametrize("make", sweep([make_slots, make_pages], make_pages))
def test_a_conversation_goes_on_from_its_last_state(make: Callable[..., ModelRunner]) -> None:
    network = build_network("nemotron_h")
    engine = make_engine(make(network, length=64, slots=8), drafts=3 if make is make_pages else 0)
    sampling = Sampling(max_new_tokens=9, temperature=0.7)

    async def run() -> list[tuple[list[int], Completion, int]]:
        found, prompt = [], PROMPTS[0]
        for turn in range(3):
            before = engine.counters.prompt_tokens
            others = [engine.generate(each, sampling=sampling, seed=9) for each in PROMPTS[:2]]
            said, *_ = await asyncio.gather(engine.generate(prompt, sampling=sampling, seed=turn, session="s"), *others)
            found.append((prompt, said, engine.counters.prompt_tokens - before))
            prompt = [*prompt, *said.tokens.tolist(), 11, 12]
        await engine.close()
        return found

    turns = asyncio.run(run())
    assert [read for _, _, read in turns[1:]] == [3, 3], "the last token of a turn, and what followed it"
    assert_same(
        [said for _, said, _ in turns],
        compute_again(network, [Request(prompt, sampling, turn) for turn, (prompt, _, _) in enumerate(turns)]),
    )


def test_states_are_counted_in_the_memory_of_the_cache() -> None:
    network = build_network("qwen3_5")
    shape = infer_cache_shape(network)
    assert (shape.layers, shape.attending) == (1, (3,)), "one layer in four has keys"
    delta, inputs = 4 * 8 * 8 * 4, 3 * (2 * 2 * 8 + 4 * 8) * 4
    assert shape.bytes_per_token == 2 * 2 * 8 * 4 and shape.state_bytes == 3 * (delta + inputs)
    sequence = 48 * shape.bytes_per_token + shape.state_tokens * shape.bytes_per_token
    with pytest.raises(
        ValueError, match=r"48 tokens needs .* GiB and .* GiB for the states of its recurrent layers; raise the first"
    ):
        CachedRunner(network, cache_config(sequence - 1, slots=4), length=48)
    runner = CachedRunner(network, cache_config(3 * sequence, slots=8), length=48)
    held = runner.cache.states.held.values()
    assert runner.slots == 3 and sum(each.nbytes for each in held) == 3 * shape.state_bytes
    pages = PagedRunner(network, cache_config(100 * sequence, slots=64), length=48)
    assert pages.slots == 64 or 64 > pages.slots == 100 * sequence // (4 * shape.state_tokens * shape.bytes_per_token)
    states = 2 * pages.slots * shape.state_tokens + pages.cache.pool.size * pages.cache.page
    assert states * shape.bytes_per_token <= 100 * sequence and pages.cache.tree.most_states == pages.slots


def test_a_prompt_goes_on_from_the_last_place_whose_states_are_held() -> None:
    tree = PrefixTree(PagePool(8, lambda source, target: None), 4, most_states=2)
    first = tree.insert(tree.root, (1, 2, 3, 4))
    assert first is not None
    second = tree.insert(first, (5, 6, 7, 8))
    assert second is not None
    tree.hold_states(first, 4, {})
    tree.hold_states(second, 2, {})
    assert tree.match((1, 2, 3, 4, 5, 6, 7, 8, 9)).length(4) == 6
    assert tree.match((1, 2, 3, 4, 5, 7)).length(4) == 4
    assert tree.match((1, 2, 3)).length(4) == 0, "no states are held inside of a page"
    assert tree.match((1, 2, 3, 4, 5, 6)).length(4) == 4, "the last token is read for its logits"
    second.logits[2] = torch.zeros(1)
    assert tree.match((1, 2, 3, 4, 5, 6)).logits is not None
    tree.hold_states(second, 4, {})  # the states after the first page were used longest ago
    assert tree.match((1, 2, 3, 4, 5, 7)).length(4) == 0
    assert tree.match((1, 2, 3, 4, 5, 6, 7, 8, 9)).length(4) == 8
    while tree.evict():
        pass
    assert not tree._with_states
