"""A real vLLM engine answers as every generator does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch

from strop.generation.base import Completion, RequestTooLong
from strop.sampling import KEPT_TOKENS, Sampling, filtered_logits, keep_mask
from support.vllm_engines import compute_logprobs

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

PROMPT = tuple(range(40, 60))


def ask(
    room: BackgroundLoop, served: ServedModel, sampling: Sampling, seed: int = 1, prompt: tuple[int, ...] = PROMPT
) -> Completion:
    return room.run(served.pool.generate(prompt, sampling=sampling, seed=seed))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_new_tokens=24),
        Sampling(temperature=0.6, max_new_tokens=24),
        Sampling(temperature=1.3, top_k=7, max_new_tokens=24),
        Sampling(top_p=0.7, max_new_tokens=24),
        Sampling(min_p=0.2, max_new_tokens=24),
        Sampling(temperature=0.8, top_k=20, top_p=0.8, min_p=0.05, max_new_tokens=24),
        Sampling(temperature=0.0, max_new_tokens=24),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_distribution_that_sampled(
    room: BackgroundLoop, served: ServedModel, sampling: Sampling
) -> None:
    async def with_seeds() -> list[Completion]:
        return await asyncio.gather(*(served.pool.generate(PROMPT, sampling=sampling, seed=seed) for seed in range(4)))

    for completion in room.run(with_seeds()):
        expected = compute_logprobs(served.model, PROMPT, completion.tokens, sampling)
        assert (completion.logprobs - expected).abs().max() < 2e-4


def test_equal_requests_give_equal_tokens_whoever_shares_the_batch(room: BackgroundLoop, served: ServedModel) -> None:
    sampling = Sampling(max_new_tokens=16)
    alone = [ask(room, served, sampling, seed).tokens.tolist() for seed in range(6)]

    async def together() -> list[list[int]]:
        requests = [served.pool.generate(PROMPT, sampling=sampling, seed=seed) for seed in range(6)]
        others = [served.pool.generate(PROMPT[:7], sampling=sampling, seed=seed) for seed in range(9)]
        return [completion.tokens.tolist() for completion in (await asyncio.gather(*requests, *others))[:6]]

    assert room.run(together()) == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_every_token_knows_the_version_that_sampled_it(room: BackgroundLoop, served: ServedModel) -> None:
    completion = ask(room, served, Sampling(max_new_tokens=9))
    assert completion.versions.tolist() == [served.pool.version] * len(completion.tokens)


def test_a_stop_token_ends_a_completion_and_belongs_to_it(room: BackgroundLoop, served: ServedModel) -> None:
    free = ask(room, served, Sampling(max_new_tokens=30), seed=3)
    stop = int(free.tokens[4])
    stopped = ask(room, served, Sampling(max_new_tokens=30, stop_token_ids=(stop,)), seed=3)
    first = free.tokens.tolist().index(stop)
    assert stopped.stopped and stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert not ask(room, served, Sampling(max_new_tokens=2), seed=3).stopped


def test_a_stop_string_ends_a_completion_and_is_in_its_text(room: BackgroundLoop, served: ServedModel) -> None:
    free = ask(room, served, Sampling(max_new_tokens=30), seed=5)
    letter = next(character for character in free.text[2:] if character.isascii() and character.isprintable())
    stopped = ask(room, served, Sampling(max_new_tokens=30, stop_strings=(letter,)), seed=5)
    assert stopped.stopped
    assert letter in stopped.text
    assert stopped.tokens.tolist() == free.tokens[: len(stopped.tokens)].tolist()


def test_the_tokens_that_each_one_was_drawn_from_are_recorded(room: BackgroundLoop, served: ServedModel) -> None:
    sampling = Sampling(temperature=0.9, top_k=12, top_p=0.9, record_sampling_mask=True, max_new_tokens=12)
    completion = ask(room, served, sampling)
    assert completion.kept is not None, KEPT_TOKENS
    row = torch.cat([torch.tensor(PROMPT), completion.tokens])
    with torch.no_grad():
        logits = served.model(row[None]).logits[0, len(PROMPT) - 1 : -1]
    keep = keep_mask(logits / sampling.temperature, sampling)
    for place, kept in enumerate(completion.kept):
        assert set(kept[kept >= 0].tolist()) == set(keep[place].nonzero()[:, 0].tolist())
    assert torch.isfinite(filtered_logits(logits, sampling).gather(-1, completion.tokens[:, None])).all()


def test_a_later_turn_finds_its_conversation_in_the_prefix_cache(room: BackgroundLoop, served: ServedModel) -> None:
    sampling = Sampling(max_new_tokens=8)
    prompt = tuple(range(100, 180))

    async def turns() -> tuple[int, int]:
        first = await served.engine.sample_canary(prompt, sampling=sampling, seed=1)
        second = await served.engine.sample_canary((*prompt, *first.tokens.tolist(), 50, 51), sampling=sampling, seed=2)
        return first.cached, second.cached

    first, second = room.run(turns())
    assert first == 0
    assert second >= 64, "two whole blocks of the first turn"


def test_a_cancelled_request_ends_in_the_engine(room: BackgroundLoop, served: ServedModel) -> None:
    async def cancel() -> int:
        task = asyncio.create_task(served.pool.generate(PROMPT, sampling=Sampling(max_new_tokens=200), seed=1))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await served.pool.generate(PROMPT, sampling=Sampling(max_new_tokens=4), seed=1)
        return served.engine._engine.get_num_unfinished_requests()

    assert room.run(cancel()) == 0


def test_a_prompt_that_cannot_fit_is_refused_with_what_to_set(room: BackgroundLoop, served: ServedModel) -> None:
    with pytest.raises(RequestTooLong, match="max_total_sequence_length"):
        ask(room, served, Sampling(max_new_tokens=4), prompt=tuple(range(256)))


def test_what_vllm_would_sample_otherwise_than_the_learner_computes_is_refused(room: BackgroundLoop, served: ServedModel) -> None:
    with pytest.raises(ValueError, match=r"0\.01"):
        ask(room, served, Sampling(temperature=0.005))


def test_starting_an_engine_leaves_this_process_its_environment(served: ServedModel) -> None:
    import os

    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    assert os.environ.get("OMP_NUM_THREADS") == "1"
    assert served.engine.launch.output_file is not None and served.engine.launch.output_file.exists()
