"""Images in the embedded engine: sampler and learner agree (law 3), and nothing that is cached is taken for another image."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.generation.torch.image_tokens import ImageNumbers, PromptImages, find_blocks, mark_images, read_mark
from strop.generation.torch.paged.paged_runner import PagedRunner
from strop.learner.torch.scorer import NetworkScorer
from strop.models.network import Network
from strop.sampling import Sampling
from strop.types import Batch, PromptImage, observation_turn
from support.image_requests import (
    ImageRequest,
    generate_with_images,
    make_vision_network,
    mixed_prompts,
    rollout_of,
    run_image_requests,
    sample_batch,
    show,
)
from support.rollouts import make_group, make_turn, pack_grpo
from support.torch_engine import make_engine, make_paged_runner, make_runner
from support.vision_models import FAMILIES, draw_image

FLOAT32 = 2e-5  # largest difference of log-probabilities, as for families of text (test_sampler_and_learner_agree.py)
BFLOAT16 = 0.02
RECURRENT = 0.05  # the same with layers whose states are carried from token to token
LENGTH = 200
ROOM = {"length": LENGTH, "prefix_tokens": 3 * LENGTH}
RUNNERS = {"slots": make_runner, "pages": make_paged_runner}


def disagreement(network: Network, batch: Batch, sampling: Sampling | None = None) -> float:
    scores = NetworkScorer(network, sampling or Sampling(), score_tokens=400).score(batch)
    return float((scores.logprobs - batch.rollout_logprobs).abs().max())


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("qwen3_vl", "gemma3", "gemma4", "smolvlm") else pytest.mark.exhaustive)
        for name in FAMILIES
    ],
)
def test_sampler_and_learner_agree_about_images_in_float32(family: str) -> None:
    network = make_vision_network(family)
    sampling = Sampling(max_new_tokens=10, temperature=0.8)
    for make in RUNNERS.values():
        for prepack in (False, True):
            engine = make_engine(make(network, prepack=prepack, **ROOM))
            batch = sample_batch(engine, mixed_prompts(family), sampling)
            assert len(batch.images) == 3 and len(batch.target) > 60
            assert disagreement(network, batch, sampling) < FLOAT32, (make, prepack)
            assert engine.counters.encoded_images == 2, "each image is computed once for all prompts and samples"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_and_learner_agree_about_images_in_bfloat16(family: str) -> None:
    network = make_vision_network(family, precision=torch.bfloat16)
    for make in RUNNERS.values():
        for prepack in (False, True):
            runner = make(network, prepack=prepack, **ROOM)
            if isinstance(runner, PagedRunner) and not runner.rounds_as_learner:
                continue  # chosen only by paged_cache=true
            batch = sample_batch(make_engine(runner), mixed_prompts(family), Sampling(max_new_tokens=10))
            assert disagreement(network, batch) < (RECURRENT if family == "qwen3_5" else BFLOAT16), (make, prepack)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_is_seen_in_the_log_probabilities(family: str) -> None:
    network = make_vision_network(family)
    batch = sample_batch(make_engine(make_runner(network, **ROOM)), mixed_prompts(family)[:1], Sampling(max_new_tokens=10))
    other = show(family, draw_image(5)).images[0]
    assert other.length == batch.images[0].length
    wrong = replace(batch, images=tuple(replace(image, content=other.content, digest=other.digest) for image in batch.images))
    assert disagreement(network, wrong) > 100 * FLOAT32


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gemma3", "gemma4_moe"))]
)
@pytest.mark.parametrize("make", RUNNERS.values(), ids=RUNNERS)
def test_prompts_with_equal_tokens_and_different_images_share_no_cache(family: str, make: Any) -> None:
    """One after another and side by side, each gives what it gives alone, though all have the same tokens."""
    network = make_vision_network(family)
    prompts = [show(family, draw_image(seed)) for seed in (1, 2, 1)]
    assert prompts[0].tokens == prompts[1].tokens
    alone = [run_image_requests(make_engine(make(network, **ROOM)), [ImageRequest(prompt, seed=3)])[0] for prompt in prompts]
    assert alone[0].tokens.tolist() == alone[2].tokens.tolist() != alone[1].tokens.tolist()

    async def run() -> list[Any]:
        engine = make_engine(make(network, **ROOM))
        found = [(await generate_with_images(engine, [ImageRequest(prompt, seed=3)]))[0] for prompt in prompts]
        found += await generate_with_images(engine, [ImageRequest(prompt, seed=3) for prompt in prompts])
        await engine.close()
        assert engine.counters.encoded_images == 2
        shared = prompts[0].images[0].start if isinstance(engine.runner, PagedRunner) else 0  # text before the image
        assert engine.counters.prompt_tokens == 2 * len(prompts[0].tokens) - shared, "equal images are read once"
        return found

    for found, wanted in zip(asyncio.run(run()), alone * 2, strict=True):
        assert torch.allclose(found.logprobs, wanted.logprobs, atol=FLOAT32)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "gemma4", "smolvlm"])
@pytest.mark.parametrize("make", RUNNERS.values(), ids=RUNNERS)
def test_an_observation_may_have_an_image(family: str, make: Any) -> None:
    """The second turn reads the conversation's cached keys and values; the learner reads it all at once."""
    network, sampling = make_vision_network(family), Sampling(max_new_tokens=8)
    first, seen = show(family, draw_image(1)), show(family, draw_image(2, 90, 30), text="and now?")

    async def episode() -> Any:
        engine = make_engine(make(network, **ROOM))
        answer = (await generate_with_images(engine, [ImageRequest(first, sampling, 1, "s")]))[0]
        start = len(first.tokens) + len(answer.tokens)
        images = [image.moved(start) for image in seen.images]
        so_far = replace(first, tokens=[*first.tokens, *answer.tokens.tolist(), *seen.tokens], images=(*first.images, *images))
        last = (await generate_with_images(engine, [ImageRequest(so_far, sampling, 2, "s")]))[0]
        read = engine.counters.prompt_tokens
        await engine.close()
        assert read < len(so_far.tokens) + 2, "the first turn was not read again"
        rollout = rollout_of(first, answer)
        return rollout.with_turn(observation_turn(seen.tokens, "", images)).with_turn(make_turn(last))

    batch = pack_grpo([make_group(asyncio.run(episode()))])
    assert len(batch.images) == 2 and disagreement(network, batch) < FLOAT32


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.exhaustive)])
def test_a_request_that_gave_up_its_memory_sees_its_image_again(family: str) -> None:
    network = make_vision_network(family)
    prompts, sampling = [show(family, draw_image(seed)) for seed in range(4)], Sampling(max_new_tokens=40)
    runner = make_paged_runner(network, slots=4, length=96, prefix_tokens=-200)
    engine = make_engine(runner)
    batch = sample_batch(engine, prompts, sampling, copies=1)
    assert engine.counters.preemptions > 0
    assert disagreement(network, batch) < FLOAT32


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", "gemma3", "gemma4", "gemma4_moe"])
def test_a_long_prompt_with_images_is_read_in_parts(family: str) -> None:
    """All but those whose image tokens see each other both ways, which are read whole."""
    network = make_vision_network(family)
    prompt = show(family, draw_image(1), draw_image(2), text="x" * 40)
    engine = make_engine(make_paged_runner(network, **ROOM), prefill_tokens=16)
    batch = sample_batch(engine, [prompt], Sampling(max_new_tokens=5))
    assert disagreement(network, batch) < FLOAT32


@pytest.mark.exhaustive
def test_drafts_are_never_tokens_of_images() -> None:
    network = make_vision_network("qwen2_5_vl")
    prompt = show("qwen2_5_vl", draw_image(1), text="abcabcabcabcabc")
    drafted, plain = (
        run_image_requests(
            make_engine(make_paged_runner(network, **ROOM), drafts=drafts),
            [ImageRequest(prompt, Sampling(max_new_tokens=20, temperature=0.3), seed) for seed in range(3)],
        )
        for drafts in (4, 0)
    )
    for left, right in zip(drafted, plain, strict=True):
        assert left.tokens.tolist() == right.tokens.tolist()


def test_new_weights_look_at_images_anew() -> None:
    network = make_vision_network("qwen3_vl")
    engine = make_engine(make_runner(network, **ROOM))
    prompt = show("qwen3_vl", draw_image(1))

    async def run() -> list[Any]:
        found = [(await generate_with_images(engine, [ImageRequest(prompt)]))[0]]
        await engine.drain()
        with torch.no_grad():
            for parameter in network.model.model.visual.parameters():
                parameter.mul_(1.5)
        engine.resume(1)
        found += await generate_with_images(engine, [ImageRequest(prompt)])
        await engine.close()
        return found

    before, after = asyncio.run(run())
    assert before.tokens.tolist() != after.tokens.tolist() or not torch.allclose(before.logprobs, after.logprobs)
    assert engine.counters.encoded_images == 2
    assert disagreement(network, pack_grpo([make_group(rollout_of(prompt, after))])) < FLOAT32


@pytest.mark.parametrize("make", RUNNERS.values(), ids=RUNNERS)
def test_a_request_that_new_weights_interrupt_sees_its_image_with_them(make: Any) -> None:
    """Spans of versions are as for text, and a request that was cancelled beside it leaves the engine in order."""
    network = make_vision_network("qwen3_vl")
    request = ImageRequest(show("qwen3_vl", draw_image(1)), Sampling(max_new_tokens=20))

    async def run() -> Any:
        engine = make_engine(make(network, **ROOM))
        gone = asyncio.ensure_future(generate_with_images(engine, [ImageRequest(show("qwen3_vl", draw_image(2)))]))
        asked = asyncio.ensure_future(generate_with_images(engine, [request]))
        while engine.counters.decode_steps < 6:
            await asyncio.sleep(0)
        gone.cancel()
        engine.freeze()
        with torch.no_grad():
            for parameter in network.model.parameters():
                parameter.mul_(1.05)
        engine.activate_version(1)
        engine.recompute_running()
        engine.resume_requests()
        (found,) = await asked
        await engine.close()
        return found

    found = asyncio.run(run())
    assert found.versions.tolist() == sorted(found.versions.tolist()) and set(found.versions.tolist()) == {0, 1}
    batch = pack_grpo([make_group(rollout_of(request.prompt, found))])
    scores = NetworkScorer(network, Sampling(), score_tokens=400).score(batch)
    later = batch.versions == 1
    assert float((scores.logprobs - batch.rollout_logprobs)[later].abs().max()) < FLOAT32
    assert float((scores.logprobs - batch.rollout_logprobs)[~later].abs().max()) > FLOAT32


def test_images_for_a_model_that_reads_text_are_refused() -> None:
    network = make_vision_network("llava")
    network.disable_vision("its processor is missing")
    engine = make_engine(make_runner(network, **ROOM))
    with pytest.raises(ValueError, match=r"a request has 1 images, and LlavaForConditionalGeneration reads text only"):
        run_image_requests(engine, [ImageRequest(show("llava", draw_image(1)))])


def image(digest: str, start: int, length: int) -> PromptImage:
    return PromptImage(start=start, length=length, content=b"", digest=digest)


def test_each_row_of_each_image_has_an_id_of_its_own() -> None:
    numbers = ImageNumbers()
    tokens = [
        5,
        9,
        9,
        7,
        9,
        6,
        9,
        9,
    ]  # 9 stands for images; 7 is between two rows of tiles; the last two are text that was sampled
    marked = mark_images(tokens, [image("a", 1, 2), image("b", 4, 1)], numbers, 9)
    assert [token if token >= 0 else read_mark(token) for token in marked] == [5, (0, 0), (0, 1), 7, (1, 0), 6, 9, 9]
    again = mark_images(tokens, [image("b", 1, 2), image("a", 4, 1)], numbers, 9)
    assert again[1:3] != marked[1:3] and again[4] == marked[1]
    blocks = find_blocks(marked)
    assert blocks is not None and blocks.tolist() == [-1, 0, 0, -1, 1, -1, -1, -1]
    assert find_blocks(tokens) is None


def test_a_number_is_never_given_to_another_image() -> None:
    numbers = ImageNumbers(remembered=2)
    first = [numbers.number(image(digest, 0, 1)) for digest in "aab"]
    assert first == [0, 0, 1]
    assert numbers.number(image("c", 0, 1)) == 2
    assert numbers.number(image("a", 0, 1)) == 3, "it was forgotten, and is read again"


def test_rotary_positions_go_on_after_the_prompt() -> None:
    prompt = PromptImages({}, torch.tensor([[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]))
    assert prompt.offset == 0
    shorter = PromptImages({}, torch.tensor([[0, 1, 1, 2]]).expand(3, -1))
    assert shorter.offset == -1
    assert shorter.positions(2, 7)[0].tolist() == [1, 2, 3, 4, 5]
    assert shorter.positions(5, 7)[2].tolist() == [4, 5]
