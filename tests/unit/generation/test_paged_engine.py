"""The engine on pages: memory that runs short delays requests and changes nothing else; long prompts and drafts neither."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.generation.torch.model_runner import CachedRunner, infer_cache_shape
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.generation.torch.speculation import PromptLookup
from strop.generation.torch.torch_engine import make_torch_engine
from strop.models.network import Network
from strop.sampling import Sampling, mix_seed
from support.models import build
from support.sweep import one_in
from support.torch_engine import (
    Request,
    cache_config,
    generate_all,
    make_engine,
    make_paged_runner,
    make_runner,
    run_requests,
    token_lists,
)

FLOAT32 = 2e-5


@pytest.fixture(scope="module")
def network() -> Network:
    return Network(build("llama"))


def many_requests(count: int = 12, new: int = 20) -> list[Request]:
    prompts = [[(11 * place + 5 * step) % 300 + 4 for step in range(length)] for place, length in enumerate((3, 20, 16, 25))]
    return [
        Request(prompts[place % 4], Sampling(max_new_tokens=new - place % 5), seed=mix_seed(9, place)) for place in range(count)
    ]


@pytest.fixture(scope="module")
def expected(network: Network) -> list[Any]:
    """By an engine with fixed slots."""
    return run_requests(make_engine(make_runner(network, slots=4)), many_requests())


def check_same(found: list[Any], expected: list[Any]) -> None:
    assert token_lists(found) == token_lists(expected)
    for left, right in zip(found, expected, strict=True):
        assert torch.allclose(left.logprobs, right.logprobs, atol=FLOAT32)


@pytest.mark.parametrize("slots", one_in(2, [1, 5, 12]))
@pytest.mark.parametrize("prefix_tokens", [0, 400])
def test_tokens_and_log_probabilities_are_those_of_fixed_slots(
    network: Network, expected: list[Any], slots: int, prefix_tokens: int
) -> None:
    runner = make_paged_runner(network, slots=slots, prefix_tokens=prefix_tokens)
    check_same(run_requests(make_engine(runner), many_requests()), expected)


def test_more_sequences_run_at_once_than_fixed_slots_have_room_for(network: Network) -> None:
    requests = [Request([5 + place, 9], Sampling(max_new_tokens=10), place) for place in range(8)]
    memory = 3 * 48 * infer_cache_shape(network).bytes_per_token
    steps = {}
    for name, kind in (("slots", CachedRunner), ("pages", PagedRunner)):
        engine = make_engine(kind(network, cache_config(memory, slots=8, prepack_weights=False), length=48))
        run_requests(engine, requests)
        steps[name] = engine.counters.decode_steps
    assert steps == {"slots": 27, "pages": 9}


def test_a_request_without_memory_gives_way_and_is_read_again(network: Network, expected: list[Any]) -> None:
    """Memory for one sequence of full length, and twelve that all start: some give up their pages, and get the same tokens."""
    memory = 5 * 16 * infer_cache_shape(network).bytes_per_token
    runner = PagedRunner(network, cache_config(memory, slots=12, prepack_weights=False), length=48, page=16)
    engine = make_engine(runner)
    check_same(run_requests(engine, many_requests()), expected)
    assert engine.counters.preemptions > 0
    assert engine.counters.sampled_tokens == sum(len(each.tokens) for each in expected)
    assert engine.counters.queried_tokens == sum(len(request.prompt) for request in many_requests())
    assert not runner._sequences and not runner.cache.pool.stack


def test_preempted_requests_end_before_the_engine_is_drained(network: Network) -> None:
    async def run() -> list[bool]:
        memory = 5 * 16 * infer_cache_shape(network).bytes_per_token
        engine = make_engine(PagedRunner(network, cache_config(memory, slots=12, prepack_weights=False), length=48, page=16))
        asked = [
            asyncio.create_task(engine.generate(each.prompt, sampling=each.sampling, seed=each.seed))
            for each in many_requests(4, 40)
        ]
        while not engine.counters.preemptions:
            await asyncio.sleep(0)
        started = [bool(request.tokens) for request in (*engine._running, *engine._waiting)]
        await engine.drain()
        done = [task.done() for task in asked]
        engine.resume(1)
        await asyncio.gather(*asked)
        await engine.close()
        assert sum(done) >= sum(started), "what had begun is finished with the weights that it began with"
        return done

    asyncio.run(run())


def test_a_priority_request_takes_the_memory_of_the_newest_one(network: Network, expected: list[Any]) -> None:
    async def run() -> None:
        memory = 3 * 16 * infer_cache_shape(network).bytes_per_token
        engine = make_engine(PagedRunner(network, cache_config(memory, slots=4, prepack_weights=False), length=48, page=16))
        hog = many_requests()[1]
        asked = asyncio.create_task(engine.generate(hog.prompt, sampling=hog.sampling, seed=hog.seed))
        for _ in range(8):
            await asyncio.sleep(0)
        engine.freeze()
        canary = await engine.generate_with_priority([7] * 30, sampling=Sampling(max_new_tokens=4), seed=5)
        assert len(canary.tokens) == 4 and not asked.done() and engine.counters.preemptions == 1
        engine.resume_requests()
        assert (await asked).tokens.tolist() == expected[1].tokens.tolist()
        await engine.close()

    asyncio.run(run())


def test_a_long_prompt_is_read_in_parts_while_others_decode(network: Network) -> None:
    long = Request([place % 200 + 4 for place in range(90)], Sampling(max_new_tokens=5), 3)
    brief = Request([8, 9], Sampling(max_new_tokens=30), 4)
    wanted = run_requests(make_engine(make_runner(network, length=128)), [brief, long])
    runner = make_paged_runner(network, length=128)
    passes: list[tuple[int, bool]] = []
    forward = runner._forward
    runner._forward = lambda tokens, positions, plan, rows: (  # type: ignore[method-assign]
        passes.append((len(tokens), rows is not None)),
        forward(tokens, positions, plan, rows),
    )[1]
    engine = make_engine(runner, prefill_tokens=32)
    check_same(run_requests(engine, [brief, long]), wanted)
    assert passes[:7] == [(2, True), (1, False), (32, True), (1, False), (32, True), (1, False), (26, True)]
    assert engine.counters.prompt_tokens == 92


def test_what_was_read_with_old_weights_is_not_kept() -> None:
    """A request that goes on over a change of weights has old keys and values: no later request finds them."""
    network = Network(build("llama"))
    prompt = [place % 50 + 4 for place in range(20)]

    async def run() -> tuple[Any, Any]:
        engine = make_engine(make_paged_runner(network))
        asked = asyncio.create_task(engine.generate(prompt, sampling=Sampling(max_new_tokens=12), seed=1, session="s"))
        for _ in range(6):
            await asyncio.sleep(0)
        engine.freeze()
        with torch.no_grad():
            for parameter in network.model.parameters():
                parameter.mul_(1.2)
        engine.resume(1)
        first = await asked
        so_far = [*prompt, *first.tokens.tolist(), 9]
        second = await engine.generate(so_far, sampling=Sampling(max_new_tokens=4), seed=2, session="s")
        await engine.close()
        return first, (so_far, second)

    first, (so_far, second) = asyncio.run(run())
    assert set(first.versions.tolist()) == {0, 1}
    fresh = run_requests(make_engine(make_runner(network)), [Request(so_far, Sampling(max_new_tokens=4), 2)])
    check_same([second], fresh)


def test_running_requests_are_read_again_with_new_weights() -> None:
    network = Network(build("llama"))
    prompt = [place % 50 + 4 for place in range(20)]

    async def run(kind: Any) -> Any:
        network.model.load_state_dict(saved)
        engine = make_engine(kind(network))
        asked = [
            asyncio.create_task(engine.generate(prompt, sampling=Sampling(max_new_tokens=12), seed=seed)) for seed in range(3)
        ]
        while engine.counters.decode_steps < 4:
            await asyncio.sleep(0)
        engine.freeze()
        with torch.no_grad():
            for parameter in network.model.parameters():
                parameter.mul_(1.2)
        engine.activate_version(1)
        engine.recompute_running()
        engine.resume_requests()
        found = await asyncio.gather(*asked)
        await engine.close()
        return found

    saved = {name: tensor.clone() for name, tensor in network.model.state_dict().items()}
    check_same(asyncio.run(run(make_paged_runner)), asyncio.run(run(make_runner)))


def propose(monkeypatch: Any, sequences: list[list[int]], wrong_every: int) -> None:
    """Draft what will be sampled, but for every so many tokens."""

    def draft(_: PromptLookup, tokens: tuple[int, ...], count: int) -> list[int]:
        whole = next(each for each in sequences if each[: len(tokens)] == list(tokens))
        following = whole[len(tokens) : len(tokens) + count]
        return [token if (len(tokens) + index) % wrong_every else (token + 1) % 300 for index, token in enumerate(following)]

    monkeypatch.setattr(PromptLookup, "draft", draft)


OPTIONS = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=5, top_p=0.9, record_sampling_mask=True)]


@pytest.mark.parametrize("prepack", [False, None], ids=["modules", "kernels"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "greedy", "filtered"])
def test_drafts_change_no_token(network: Network, monkeypatch: Any, options: Sampling, prepack: bool | None) -> None:
    """Every token has its own uniform number, so drafts decide only how many tokens are computed at once."""
    requests = [
        Request([7, 8, 9, 10] * 4 + [place], replace(options, max_new_tokens=24 - place, entropy=True), seed=place)
        for place in range(6)
    ]
    wanted = run_requests(make_engine(make_runner(network, slots=6)), requests)
    propose(monkeypatch, [[*r.prompt, *w.tokens.tolist()] for r, w in zip(requests, wanted, strict=True)], wrong_every=5)
    engine = make_engine(make_paged_runner(network, slots=6, prepack=prepack), drafts=4)
    found = run_requests(engine, requests)
    check_same(found, wanted)
    for left, right in zip(found, wanted, strict=True):
        assert left.entropies is not None and right.entropies is not None
        assert torch.allclose(left.entropies, right.entropies, atol=1e-4)
        assert left.columns.keys() == right.columns.keys()
        assert all(torch.equal(values, right.columns[column]) for column, values in left.columns.items())
    assert engine.counters.sampled_tokens == sum(len(each.tokens) for each in wanted)
    assert engine.counters.decode_steps < 12
    assert 0.5 < engine.counters.accepted_tokens / engine.counters.drafted_tokens < 0.95


def test_drafts_of_some_requests_beside_others_without(network: Network, monkeypatch: Any, expected: list[Any]) -> None:
    """More requests than slots, and memory that runs short."""
    sequences = [[*r.prompt, *w.tokens.tolist()] for r, w in zip(many_requests(), expected, strict=True)]
    propose(monkeypatch, sequences, wrong_every=3)
    whole = PromptLookup.draft
    monkeypatch.setattr(PromptLookup, "draft", lambda self, tokens, count: whole(self, tokens, count) if len(tokens) % 2 else [])
    memory = 5 * 16 * infer_cache_shape(network).bytes_per_token
    runner = PagedRunner(network, cache_config(memory, slots=6, prepack_weights=False), length=48, page=16)
    engine = make_engine(runner, drafts=3)
    check_same(run_requests(engine, many_requests()), expected)
    assert engine.counters.accepted_tokens > 0 and engine.counters.preemptions > 0


def test_a_stop_inside_a_draft_ends_the_request(network: Network, monkeypatch: Any) -> None:
    request = Request([7, 8, 9, 10] * 4, Sampling(max_new_tokens=24, temperature=0.0), seed=0)
    free = run_requests(make_engine(make_runner(network)), [request])[0].tokens.tolist()
    propose(monkeypatch, [[*request.prompt, *free]], wrong_every=1000)
    for stop in set(free):
        engine = make_engine(make_paged_runner(network), stop_ids=(stop,), drafts=6)
        found = run_requests(engine, [request])[0]
        assert found.stopped and found.tokens.tolist() == free[: free.index(stop) + 1]


def test_the_engine_with_drafts_samples_the_models_distribution(network: Network, monkeypatch: Any) -> None:
    """Chi-square of the second token of 1,500 requests, which is drafted each time."""
    prompt = [7, 8, 9]
    network.use_native_attention()
    with torch.no_grad():
        first = int(network.model(torch.tensor([prompt])).logits[0, -1].argmax())
        logits = network.model(torch.tensor([[*prompt, first]])).logits[0, -1]
    network.use_learner_attention()
    kept = logits.topk(6).indices
    monkeypatch.setattr(PromptLookup, "draft", lambda self, tokens, count: [int(kept[1]), int(kept[0])][:count])
    sampling = Sampling(max_new_tokens=3, top_k=6)
    requests = [Request(prompt, sampling, seed=mix_seed(4, place)) for place in range(1500)]
    engine = make_engine(make_paged_runner(network, slots=64, prefix_tokens=4000), drafts=3)
    found = run_requests(engine, requests)
    assert engine.counters.drafted_tokens >= 1500
    second = torch.tensor([int(each.tokens[1]) for each in found if int(each.tokens[0]) == first])
    expected = logits[kept].softmax(-1) * len(second)
    counts = torch.tensor([float((second == token).sum()) for token in kept])
    assert float(counts.sum()) == len(second) > 200
    assert float(((counts - expected) ** 2 / expected).sum()) < 20.5, "chi-square with 5 degrees of freedom, p = 0.001"


def test_a_lookup_proposes_what_followed_last_time() -> None:
    lookup = PromptLookup()
    assert lookup.draft([1, 2, 3, 4, 1, 2], 3) == [3, 4, 1]
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 1, 2], 3) == [9, 1, 2], "the last occurrence"
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 1, 2, 3], 2) == [4, 1], "of the longest n-gram"
    assert lookup.draft([1, 2, 3, 4, 1, 2, 9, 1, 2, 3, 77], 2) == []


def test_what_another_sample_of_the_prompt_said_is_proposed(network: Network) -> None:
    """Greedy twice: the second sample is known but for its first two tokens."""
    request = Request([5, 17, 99, 42], Sampling(max_new_tokens=20, temperature=0.0))
    engine = make_engine(make_paged_runner(network), drafts=4)

    async def run() -> tuple[Any, int, Any]:
        first = (await generate_all(engine, [request]))[0]
        steps = engine.counters.decode_steps
        second = (await generate_all(engine, [request]))[0]
        await engine.close()
        return first, steps, second

    first, steps, second = asyncio.run(run())
    assert second.tokens.tolist() == first.tokens.tolist()
    assert engine.counters.decode_steps - steps < steps / 2 and engine.counters.accepted_tokens >= 10


def test_the_cache_is_paged_on_a_cpu_unless_it_is_turned_off(network: Network, caplog: Any) -> None:
    config = cache_config(5 * 16 * infer_cache_shape(network).bytes_per_token, slots=2)
    engine = make_torch_engine(network, None, config, length=48, stop_ids=())
    assert isinstance(engine.runner, PagedRunner)
    with caplog.at_level(logging.WARNING):
        off = replace(config, paged_cache=False, speculative_lookup=3)
        engine = make_torch_engine(network, None, off, length=48, stop_ids=())
    assert isinstance(engine.runner, CachedRunner) and engine.drafts == 0
    assert "speculative_lookup needs a paged cache" in caplog.text


def test_in_bfloat16_pages_are_used_where_they_round_as_the_learner_does() -> None:
    network = Network(build("llama"), precision=torch.bfloat16)
    config = cache_config(5 * 16 * infer_cache_shape(network).bytes_per_token, slots=2, prepack_weights=False)
    assert isinstance(make_torch_engine(network, None, config, length=48, stop_ids=()).runner, CachedRunner)
    forced = make_torch_engine(network, None, replace(config, paged_cache=True), length=48, stop_ids=()).runner
    assert isinstance(forced, PagedRunner) and not forced.rounds_as_learner


def test_memory_of_less_than_whole_pages_is_refused_with_the_keys_to_change(network: Network) -> None:
    needed = 48 * infer_cache_shape(network).bytes_per_token
    with pytest.raises(ValueError, match=r"holds 47 tokens.*max_total_sequence_length = 48"):
        PagedRunner(network, cache_config(needed - 1, slots=4), length=48)
    with pytest.raises(ValueError, match=r"too few whole pages .*paged_cache=false"):
        PagedRunner(network, cache_config(needed, slots=4), length=47, page=32)
    assert PagedRunner(network, cache_config(needed, slots=4), length=48).cache.pool.size == 3


async def _converse(engine: Any, observations: list[list[int]]) -> list[list[int]]:
    so_far: list[int] = []
    turns = []
    for turn, observed in enumerate(observations):
        so_far += observed
        (found,) = await generate_all(engine, [Request(so_far, Sampling(max_new_tokens=9), seed=turn, session="a")])
        turns.append(found.tokens.tolist())
        so_far += turns[-1]
    await engine.close()
    return turns


def test_a_conversation_over_several_pages_reads_only_what_is_new(network: Network) -> None:
    observations = [list(range(5, 25)), list(range(40, 52)), [9], list(range(60, 90))]
    wanted = asyncio.run(_converse(make_engine(make_runner(network, length=128, prefix_tokens=0)), observations))
    engine = make_engine(make_paged_runner(network, length=128, prefix_tokens=300))
    assert asyncio.run(_converse(engine, observations)) == wanted
    assert engine.counters.prompt_tokens == 20 + 13 + 2 + 31, "the last sampled token of each turn, and what was observed"
