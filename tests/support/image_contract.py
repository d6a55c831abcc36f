"""What a real engine makes of images, whichever library it is of: imported by the tests of vLLM and SGLang, whose fixture is ``seen``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from support.image_requests import ImageRequest, generate_with_images, make_image_processor, mixed_prompts, rollout_of, show
from support.vision_models import draw_image

if TYPE_CHECKING:
    from support.vllm_engines import BackgroundLoop, ServedModel

FLOAT32 = 2e-5
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@dataclass
class ServedFamily:
    family: str
    served: ServedModel
    room: BackgroundLoop

    def run(self, *requests: ImageRequest) -> list[Any]:
        return self.room.run(generate_with_images(self.served.pool, requests))

    def disagreement(self, request: ImageRequest, completion: Any) -> float:
        """Largest difference of log-probabilities from those of the learner."""
        from strop.learner.torch.scorer import NetworkScorer
        from strop.models.network import Network
        from support.rollouts import make_group, pack_grpo

        network = Network(self.served.model)
        network.enable_vision(make_image_processor(self.family))
        batch = pack_grpo([make_group(rollout_of(request.prompt, completion))])
        scores = NetworkScorer(network, request.sampling, score_tokens=400).score(batch)
        network.use_native_attention()
        return float((scores.logprobs - batch.rollout_logprobs).abs().max())


def test_engine_and_learner_agree_about_images(seen: ServedFamily) -> None:
    requests = [ImageRequest(prompt, seed=seed) for prompt in mixed_prompts(seen.family) for seed in (1, 2)]
    for request, completion in zip(requests, seen.run(*requests), strict=True):
        assert len(completion.tokens) > 3
        assert seen.disagreement(request, completion) < FLOAT32


def test_another_image_is_seen_in_the_engines_log_probabilities(seen: ServedFamily) -> None:
    request, other = (ImageRequest(show(seen.family, draw_image(seed))) for seed in (1, 5))
    assert request.prompt.tokens == other.prompt.tokens
    assert seen.disagreement(other, seen.run(request)[0]) > 100 * FLOAT32


def test_prompts_with_equal_tokens_and_different_images_share_no_cache(seen: ServedFamily) -> None:
    text = "a long text after the image, " * 3  # more than two blocks of the cache
    prompts = [ImageRequest(show(seen.family, draw_image(seed), text=text), seed=3) for seed in (1, 5, 1, 5)]
    for request in prompts:
        assert seen.disagreement(request, seen.run(request)[0]) < FLOAT32
    for request, completion in zip(prompts, seen.run(*prompts), strict=True):
        assert seen.disagreement(request, completion) < FLOAT32


def test_new_weights_of_the_tower_are_used_at_once(seen: ServedFamily) -> None:
    """What the tower made of an image with earlier weights is not used again."""
    request = ImageRequest(show(seen.family, draw_image(1)), seed=3)
    before = seen.run(request)[0]
    with torch.no_grad():
        for parameter in seen.served.model.model.visual.parameters():
            parameter.mul_(1.2)
    stats = seen.room.run(seen.served.weights.publish(1))
    assert stats["weights/tensors_not_read_back"].value == 0
    after = seen.run(request)[0]
    assert not torch.equal(before.logprobs, after.logprobs)
    assert seen.disagreement(request, after) < FLOAT32
    assert set(after.versions.tolist()) == {1}


def test_a_conversation_goes_on_with_an_image(seen: ServedFamily) -> None:
    first = ImageRequest(show(seen.family, draw_image(1)), seed=1, session="s")
    answer = seen.run(first)[0]
    observed = show(seen.family, draw_image(2, 90, 30), text="and now?")
    start = len(first.prompt.tokens) + len(answer.tokens)
    images = (*first.prompt.images, *(image.moved(start) for image in observed.images))
    tokens = [*first.prompt.tokens, *answer.tokens.tolist(), *observed.tokens]
    second = ImageRequest(replace(first.prompt, tokens=tokens, images=images), seed=2, session="s")
    assert seen.disagreement(second, seen.run(second)[0]) < FLOAT32
